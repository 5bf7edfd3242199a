"""Hyperparameters of one training stage, as a command line sees them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxspec.errors import InputError, check_counts
from jaxspec.sharding import make_mesh


@dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis of the mesh has; see `jaxspec.sharding`."""

    data: int | None = None
    """Copies of the model, each of other samples; None: as many as there are devices left and the batch divides."""
    fsdp: int = 1
    """Devices that one copy, its gradient and its optimiser state are split over, each with samples of its own."""
    model: int = 1
    """Devices that heads, MLPs and the vocabulary are split over."""

    def make(self, batch: int, devices: Sequence[Any] | None = None) -> Mesh:
        """Return the mesh for batches of so many samples, of all devices or of those given.

        Raises InputError where the devices or the batch do not fit.
        """
        devices, data = jax.devices() if devices is None else devices, self.data
        if data is None:
            left = len(devices) // (self.fsdp * self.model)
            data = max(1, math.gcd(batch // self.fsdp if batch % self.fsdp == 0 else 1, left))
        mesh = make_mesh(self.model, self.fsdp, data, devices)
        check_batch(batch, mesh)
        processes = len({device.process_index for device in devices})
        if processes > 1 and mesh.size < len(devices):
            raise InputError(
                f"mesh: {mesh.size} of the {len(devices)} devices of {processes} processes; "
                "give a mesh and a batch that use all"
            )
        return mesh


def check_batch(batch: int, mesh: Mesh | AbstractMesh) -> None:
    """Raise InputError for a batch that does not divide over the devices that have samples of their own."""
    data, fsdp = mesh.shape["data"], mesh.shape["fsdp"]
    if batch % (data * fsdp):
        raise InputError(
            f"mesh: a batch of {batch} does not divide over {data} data x {fsdp} fsdp devices; "
            "give another batch or another mesh"
        )


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of one stage."""

    steps: int
    """Optimiser steps."""
    batch: int
    """Samples a step, over all devices."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW."""
    warmup: int = 100
    """Steps of linear warm-up; cosine decay follows."""
    final_rate: float = 0.1
    """What the cosine decays to, as a share of the peak. A run of 1 can go on later with more steps."""
    beta2: float = 0.98
    """AdamW's decay of squared gradients."""
    weight_decay: float = 0.01
    """On matrices only."""
    clip: float = 1.0
    """Largest global gradient norm."""
    frozen: tuple[str, ...] = ()
    """Regexes of parameter paths that do not train."""
    rates: tuple[tuple[str, float], ...] = ()
    """(regex of a parameter path, factor of the learning rate); the first that matches counts."""
    accumulate: int = 1
    """Parts that a batch is computed in, one after the other, to fit memory; the step is the same."""
    dtype: str = "float32"
    """What losses and gradients are computed in; the trained parameters and their update stay float32."""
    remat: bool = False
    """Compute each layer's activations anew for its gradient, instead of keeping them."""
    seed: int = 0
    """Seed of the initial parameters and of the data."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    save_every: int = 200
    """Steps between checkpoints."""
    checkpoints: str = ""
    """Where they go: a folder that all hosts see, or an address such as gs://bucket/run; empty: beside the metrics."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    log_every: int = 20
    """Steps between lines of metrics."""
    evaluate_every: int = 0
    """Steps between evaluations of the half-trained model; 0: none."""
    tensorboard: bool = False
    """Write event files beside `metrics.jsonl` (the `tensorboard` extra)."""
    wandb: str = ""
    """Project of Weights & Biases to report to (the `wandb` extra); empty: none."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "accumulate", "save_every", "keep", "log_every")
        check_counts(**{name: getattr(self, name) for name in counts})
        for name, holds, wanted in (
            ("learning_rate", 0 < self.learning_rate < math.inf, "more than 0"),
            ("warmup", self.warmup >= 0, "0 or more"),
            ("final_rate", 0 <= self.final_rate <= 1, "0 to 1"),
            ("beta2", 0 <= self.beta2 < 1, "0 or more, and less than 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("clip", self.clip > 0, "more than 0"),
            ("evaluate_every", self.evaluate_every >= 0, "0 or more"),
        ):
            if not holds:
                raise InputError(f"{name}: {getattr(self, name)}; give {wanted}")
        if self.batch % self.accumulate:
            raise InputError(
                f"accumulate: {self.accumulate} parts do not divide a batch of {self.batch}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"dtype: {self.dtype!r}; use 'float32' or 'bfloat16'")

    def shortened(self) -> TrainConfig:
        """Return the options of a trial: two steps of as few samples as the mesh and the parts of a batch take.

        Its checkpoints lie beside the run's, to show that they can be written there; who runs it removes them.
        """
        few = self.accumulate * self.mesh.fsdp * (self.mesh.data or 1)
        own = self.checkpoints and f"{self.checkpoints.rstrip('/')}.debug"
        shorter = {
            "steps": min(self.steps, 2),
            "batch": min(self.batch, few),
            "warmup": min(self.warmup, 1),
        }
        return replace(self, checkpoints=own, **shorter)


RUNTIME = {
    "mesh",
    "checkpoints",
    "save_every",
    "keep",
    "log_every",
    "evaluate_every",
    "tensorboard",
    "wandb",
    "remat",
}
"""Fields that may differ when a run goes on: they do not change what is computed, but for rounding."""
