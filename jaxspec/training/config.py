"""Hold the hyperparameters of a training stage, each an option of the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxspec.errors import InputError, check_counts, check_numbers, check_seed
from jaxspec.sharding import make_mesh


@dataclass(frozen=True)
class MeshConfig:
    """Set the number of devices on each axis of the mesh; see `jaxspec.sharding`."""

    data: int | None = None
    """Copies of the model, each with its own samples; by default the most that divide both the
    devices and the samples computed at a time."""
    fsdp: int = 1
    """Devices, each with its own samples, that share one copy, its gradient and optimiser state."""
    model: int = 1
    """Devices that share heads, MLPs and the vocabulary."""

    def make(self, part: int, devices: Sequence[Any] | None = None) -> Mesh:
        """Return the mesh of all devices, or of those given, for parts of this many samples.

        Raises InputError where the devices or the samples do not fit.
        """
        devices, data = jax.devices() if devices is None else devices, self.data
        if data is None:
            copy, data = self.fsdp * self.model, 1
            if min(self.fsdp, self.model) > 0 and len(devices) >= copy and part % self.fsdp == 0:
                data = math.gcd(part // self.fsdp, len(devices) // copy)
        mesh = make_mesh(self.model, self.fsdp, data, devices)
        if part % (data * self.fsdp):
            raise InputError(
                f"mesh: {part} samples at a time do not divide over {data} data x {self.fsdp} "
                "fsdp devices; change the mesh, the batch or the parts that it accumulates"
            )
        processes = len({device.process_index for device in devices})
        if processes > 1 and mesh.size < len(devices):
            raise InputError(
                f"mesh: {mesh.size} of the {len(devices)} devices of {processes} processes; "
                "give a mesh and a batch that use all"
            )
        return mesh


@dataclass(frozen=True)
class TrainConfig:
    """Set the hyperparameters of one stage."""

    steps: int
    """Optimiser steps."""
    batch: int
    """Samples of a step, on all devices."""
    learning_rate: float = 1e-3
    """Peak rate."""
    warmup: int = 100
    """Steps of linear warm-up, at most half of all."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Decay of the rate after warm-up; wsd stays at the peak until a linear decay over the last
    fifth of the steps."""
    final_rate: float = 0.1
    """Last rate as a share of the peak. With 1, a finished run can go on with more steps."""
    optimizer: Literal["adamw", "lion", "muon"] = "adamw"
    """optax's. muon takes matrices, and gives embeddings, output matrices and vectors to AdamW, at
    the same rate and without decay."""
    beta2: float = 0.98
    """AdamW's decay of squared gradients, and Lion's of its momentum."""
    weight_decay: float = 0.01
    """Decay of matrices."""
    ema: float = 0.0
    """Decay of an average of the parameters (0.999, say), which is evaluated and written instead;
    0 keeps none."""
    clip: float = 1.0
    """Largest global gradient norm, above 0."""
    frozen: tuple[str, ...] = ()
    """Regexes of parameter paths that do not train."""
    rates: tuple[tuple[str, float], ...] = ()
    """(regex of a parameter path, factor of the learning rate); the first match counts."""
    accumulate: int = 1
    """Parts in which a batch is computed, to fit memory. The step is the same up to rounding."""
    packing: bool = False
    """Lay several samples into a row, so that few slots are padding. Steps have `batch` samples on
    average; losses of samples stay the same."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of losses and gradients. Trained parameters and their updates stay float32."""
    remat: bool = False
    """Recompute each layer's activations for its gradient, instead of keeping them."""
    seed: int = 0
    """Seed of the initial parameters and of the data."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    save_every: int = 200
    """Steps between checkpoints."""
    checkpoints: str = ""
    """Shared folder, or address such as gs://bucket/run; by default next to the metrics."""
    keep: int = 2
    """Newest checkpoints to keep."""
    log_every: int = 20
    """Steps between lines of metrics."""
    evaluate_every: int = 0
    """Steps between evaluations during training; 0 never evaluates."""
    profile: str = ""
    """FIRST:LAST, steps to write a profiler's trace of, next to the metrics, for xprof."""
    tensorboard: bool = False
    """Write event files next to `metrics.jsonl` (extra `tensorboard`)."""
    wandb: str = ""
    """Project of Weights & Biases to report to (extra `wandb`); may be empty."""

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "accumulate", "save_every", "keep", "log_every")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_seed(self.seed)
        check_numbers(
            learning_rate=self.learning_rate,
            warmup=self.warmup,
            final_rate=self.final_rate,
            weight_decay=self.weight_decay,
            clip=self.clip,
            evaluate_every=self.evaluate_every,
            **{f"rates of {pattern!r}": factor for pattern, factor in self.rates},
        )
        if not self.clip:
            raise InputError("clip: 0 leaves no gradient; give a number above 0")
        for name in ("beta2", "ema"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise InputError(f"{name}: {value}; give a number from 0 to below 1")
        for name, patterns in (("frozen", self.frozen), ("rates", dict(self.rates))):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    wrong = f"{name}: {pattern!r} is no regular expression ({error}); mend it"
                    raise InputError(wrong) from None
        if self.profile and not self.profiled:
            raise InputError(f"profile: {self.profile!r} is not FIRST:LAST of steps, such as 10:12")
        if self.profile and self.profiled.start > self.steps:
            raise InputError(
                f"profile: {self.profile!r} begins after step {self.steps}, the last; give earlier "
                "steps"
            )
        if self.batch % self.accumulate:
            raise InputError(f"accumulate: {self.accumulate} does not divide batch {self.batch}")

    @property
    def profiled(self) -> range:
        """Return the steps to trace; empty without any."""
        match = re.fullmatch(r"([1-9]\d*):([1-9]\d*)", self.profile)
        return range(int(match[1]), int(match[2]) + 1) if match else range(0)

    def make_mesh(self) -> Mesh:
        """Return the mesh of all devices, over which each accumulated part of a batch is split."""
        return self.mesh.make(self.batch // self.accumulate)

    def shortened(self) -> TrainConfig:
        """Return a trial's options: two steps, of as few samples as mesh and accumulation take.

        The mesh is that of the whole run, so call it after `join_cluster`. Rows hold one sample
        each, because packing would lay so few samples into fewer rows than the mesh takes.
        Checkpoints go next to the run's, which tests that path; the caller removes them.
        """
        mesh = self.make_mesh()
        few = self.accumulate * mesh.shape["data"] * mesh.shape["fsdp"]
        checkpoints = self.checkpoints and f"{self.checkpoints.rstrip('/')}.debug"
        shorter = {
            "steps": min(self.steps, 2),
            "batch": min(self.batch, few),
            "warmup": min(self.warmup, 1),
            "packing": False,
            "profile": "",
        }
        return replace(self, checkpoints=checkpoints, **shorter)


RUNTIME = {
    *("mesh", "checkpoints", "save_every", "keep", "log_every", "evaluate_every"),
    *("tensorboard", "wandb", "remat", "accumulate", "profile"),
}
"""Fields that may differ when a run goes on: they change the result by rounding at most."""
