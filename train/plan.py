"""Prints what each device would hold while LLaVA-1.5-7B teaches a 68M draft, on devices that are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import AbstractMesh, Mesh

from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig
from jaxspec.models import abstract_params, build
from jaxspec.runtime import human_bytes, input_errors
from jaxspec.sharding import abstract_mesh, shardings
from jaxspec.training.config import TrainConfig
from jaxspec.training.plan import Plan, plan_training
from jaxspec.typing import Array, Params

TOWER = VisionConfig(
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    image_size=336,
    patch_size=14,
    projection_dim=768,
)
TARGET = LlavaConfig(LlamaConfig(vocab_size=32064, max_position_embeddings=4096), TOWER)
DRAFT = LlavaConfig(
    LlamaConfig(
        vocab_size=32064,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
    ),
    TOWER,
)
FROZEN = ("teacher", "draft/vision_tower")
MODELS = {"teacher": TARGET, "draft": DRAFT}


def distillation(params: Params, batch: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """Cross entropy of the draft with the teacher's distributions: forward KL, up to what no draft changes."""
    logits: dict[str, Any] = {
        name: build(config).apply({"params": params[name]}, batch["tokens"], batch["pixels"])
        for name, config in MODELS.items()
    }
    taught = jax.nn.softmax(jax.lax.stop_gradient(logits["teacher"]))
    loss = -(taught * jax.nn.log_softmax(logits["draft"])).sum(-1)
    count = batch["mask"].sum().astype(jnp.float32)
    loss = (loss * batch["mask"]).sum() / jnp.maximum(count, 1)
    return loss, {"loss": loss, "tokens": count}


def plan(config: TrainConfig, mesh: Mesh | AbstractMesh, length: int) -> Plan:
    """The step that teaches DRAFT what TARGET would say, on rows of one image and `length` tokens."""
    params = {name: abstract_params(model) for name, model in MODELS.items()}
    rows, size = config.batch, TOWER.image_size
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32),
        "mask": jax.ShapeDtypeStruct((rows, length), jnp.bool_),
        "pixels": jax.ShapeDtypeStruct((rows, 1, size, size, 3), jnp.dtype(config.dtype)),
    }

    def places(mesh: Any) -> Params:
        return {name: shardings(model, params[name], mesh) for name, model in MODELS.items()}

    return plan_training(config, mesh, params, distillation, batch, places)


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
    with input_errors("plan"):
        tyro.cli(main)
