"""Prints what each device would hold while LLaVA-1.5-7B teaches a 68M draft, on devices that are not there."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from configs.latency.llava7b_68m import config as pair
from jaxspec.command import run_script
from jaxspec.errors import InputError, check_counts
from jaxspec.models import LanguageModel, abstract_params, image_zeros, split_tower
from jaxspec.runtime import human_bytes, parse_dtype
from jaxspec.sharding import abstract_mesh, shardings
from jaxspec.training.config import TrainConfig
from jaxspec.training.conversations import TEACHER
from jaxspec.training.objectives import HELD_BY, Distillation, tuning_loss
from jaxspec.training.plan import Plan, plan_training
from jaxspec.typing import Params

FROZEN = ("vision_tower", HELD_BY)


def batch_of(rows: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of rows of one image and `length` tokens, as `ConversationBatches` makes them with a teacher."""
    form = {"tokens": (rows, length), "length": (rows,), "sources": (rows, length, 1)}
    whole = form | {f"{TEACHER}{name}": shape for name, shape in form.items()} | {"before": (rows, length)}
    batch = {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in whole.items()}
    batch["mask"] = jax.ShapeDtypeStruct((rows, length), jnp.bool_)
    batch["seed"] = jax.ShapeDtypeStruct((rows,), jnp.uint32)
    return batch | jax.eval_shape(partial(image_zeros, pair.draft, rows, 1))


def plan(config: TrainConfig, mesh: Mesh | AbstractMesh, length: int) -> Plan:
    """The step of logit distillation, on rows of one image and `length` tokens; the tower is one and the same."""
    draft, teacher = abstract_params(pair.draft), split_tower(pair.target, abstract_params(pair.target))[1]
    loss_fn = tuning_loss(
        LanguageModel(pair.draft), teacher=LanguageModel(pair.target), distillation=Distillation("forward_kl")
    )

    def places(mesh: Any) -> Params:
        return shardings(pair.draft, draft, mesh) | {HELD_BY: shardings(pair.target, teacher, mesh)}

    return plan_training(config, mesh, {**draft, HELD_BY: teacher}, loss_fn, batch_of(config.batch, length), places)


def main(
    devices: tuple[int, ...] = (16, 64),
    model: int = 1,
    batch: int = 256,
    length: int = 1024,
    accumulate: int = 1,
    dtype: str = "bfloat16",
) -> None:
    """Lowers the training step for slices of some sizes and prints what each device holds, besides activations.

    Args:
      devices: sizes of the slices to plan for.
      model: devices that heads, MLPs and the vocabulary are split over; the others split parameters and batch.
      batch: samples a step.
      length: tokens of a sample, its image's 576 included.
      accumulate: parts that a batch is computed in.
    """
    check_counts(model=model, batch=batch, length=length, accumulate=accumulate)
    for count in devices:
        check_counts(devices=count)
        if count % model:
            raise InputError(f"devices: {count} do not divide by --model {model}; give a multiple of it")
    parse_dtype(dtype)
    columns = ("frozen", "trained", "optimizer", "gradient", "batch", "together")
    print(f"{'devices':>8} {'mesh':>20} " + " ".join(f"{name:>11}" for name in columns) + f"{'TFLOP a step':>14}")
    for count in devices:
        mesh = abstract_mesh(model, count // model)
        config = TrainConfig(steps=1, batch=batch, frozen=FROZEN, accumulate=accumulate, dtype=dtype, remat=True)
        found = plan(config, mesh, length)
        parts = (found.frozen, found.trained, found.optimizer, found.gradient, found.batch, found.total)
        axes = " x ".join(f"{size} {name}" for name, size in mesh.shape.items() if size > 1)
        sizes = " ".join(f"{human_bytes(part):>11}" for part in parts)
        print(f"{count:>8} {axes:>20} {sizes} {found.flops / 1e12:>13.0f}", flush=True)


if __name__ == "__main__":
    run_script(main, __doc__)
