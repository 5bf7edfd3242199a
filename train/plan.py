"""Prints what each device would hold while LLaVA-1.5-7B teaches a 68M draft, on devices that are not there."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from configs.latency.llava7b_68m import config as pair
from jaxspec.command import run_script
from jaxspec.errors import InputError, check_counts
from jaxspec.models import LanguageModel, abstract_params, image_zeros, split_tower
from jaxspec.models.inputs import PromptRows
from jaxspec.runtime import human_bytes, parse_dtype
from jaxspec.sharding import abstract_mesh, on_mesh, shardings
from jaxspec.training.batches import rows_sharding
from jaxspec.training.config import TrainConfig, check_batch
from jaxspec.training.conversations import ConversationBatch, TeacherRows
from jaxspec.training.measured import model_flops
from jaxspec.training.objectives import TEACHER, Distillation, tuning_loss
from jaxspec.training.step import in_dtype, init_state, like_parameters, make_optimizer, make_step, partition, placed_on
from jaxspec.typing import Params

FROZEN = ("vision_tower", TEACHER)


@dataclass(frozen=True)
class StepMemory:
    """Bytes that the most loaded device holds through a step; activations come on top."""

    frozen: int
    trained: int
    optimizer: int
    gradient: int
    batch: int
    flops: float
    """Operations of the model in one step, all devices together."""
    lowered: Any
    """The step, lowered for the mesh."""


def batch_of(rows: int, length: int) -> ConversationBatch:
    """Return shapes of rows of one image and `length` tokens, as `ConversationBatches` makes them with a teacher."""

    def make() -> ConversationBatch:
        wide, narrow = jnp.zeros((rows, length), jnp.int32), jnp.zeros(rows, jnp.int32)
        form = PromptRows(wide, narrow, wide[..., None])
        images = image_zeros(pair.draft, rows, 1)
        return ConversationBatch(form, wide > 0, images, narrow.astype(jnp.uint32), TeacherRows(form, None, wide))

    return jax.eval_shape(make)


def step_memory(config: TrainConfig, mesh: Mesh | AbstractMesh, length: int) -> StepMemory:
    """Lower the step of `fit` for logit distillation, on rows of one image and `length` tokens; nothing is allocated.

    The tower is one and the same.

    Args:
      mesh: in place of `config.mesh`. An abstract one (`jaxspec.sharding.abstract_mesh`) is taken to be of TPUs.

    Raises InputError where the batch does not divide over the mesh.
    """
    check_batch(config.batch, mesh)
    draft, teacher = abstract_params(pair.draft), split_tower(pair.target, abstract_params(pair.target))[1]
    loss_fn = tuning_loss(
        LanguageModel(pair.draft), teacher=LanguageModel(pair.target), distillation=Distillation("forward_kl")
    )

    def places(mesh: Any) -> Params:
        return shardings(pair.draft, draft, mesh) | {TEACHER: shardings(pair.target, teacher, mesh)}

    params = {**draft, TEACHER: teacher}
    trainable, frozen = partition(params, config.frozen)
    where = placed_on(mesh, params, places)
    optimizer = make_optimizer(config, trainable)
    state = jax.eval_shape(partial(init_state, optimizer=optimizer), trainable)
    state = _placed(state, like_parameters(state, where, mesh))
    frozen = jax.eval_shape(partial(in_dtype, dtype=config.dtype), frozen)
    frozen = _placed(frozen, {path: where[path] for path in frozen})
    batch = batch_of(config.batch, length)
    batch = _placed(batch, jax.tree.map(lambda _: rows_sharding(mesh), batch))
    step = jax.jit(make_step(loss_fn, optimizer, config), donate_argnums=0)
    with on_mesh(mesh):
        traced = step.trace(state, frozen, batch)
        lowered = traced.lower(lowering_platforms=("tpu",)) if isinstance(mesh, AbstractMesh) else traced.lower()
    trained, flops = _bytes(state.params), model_flops(loss_fn, config, state.params, frozen, batch)
    return StepMemory(_bytes(frozen), trained, _bytes(state.opt_state), trained, _bytes(batch), flops, lowered)


def _placed(tree: Any, places: Any) -> Any:
    return jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree, places)


def _bytes(tree: Any) -> int:
    """Return bytes of one device's parts."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


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
    columns = ("frozen", "trained", "optimizer", "gradient", "batch")
    heads = " ".join(f"{name:>11}" for name in (*columns, "together"))
    print(f"{'devices':>8} {'mesh':>20} {heads}{'TFLOP a step':>14}")
    for count in devices:
        mesh = abstract_mesh(model, count // model)
        config = TrainConfig(steps=1, batch=batch, frozen=FROZEN, accumulate=accumulate, dtype=dtype, remat=True)
        found = step_memory(config, mesh, length)
        parts = [getattr(found, name) for name in columns]
        axes = " x ".join(f"{size} {name}" for name, size in mesh.shape.items() if size > 1)
        sizes = " ".join(f"{human_bytes(part):>11}" for part in (*parts, sum(parts)))
        print(f"{count:>8} {axes:>20} {sizes} {found.flops / 1e12:>13.0f}", flush=True)


if __name__ == "__main__":
    run_script(main, __doc__)
