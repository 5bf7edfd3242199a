"""Say what a stage would take, from two compiled steps; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec.engine.memory import bytes_held
from jaxspec.runtime import human_bytes
from jaxspec.sharding import on_mesh
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop.batches import Batches, read_ahead
from jaxspec.training.loop.reading import CountedBatches
from jaxspec.training.loop.step import ShardingOf, set_up
from jaxspec.training.loop.trainer import Evaluate
from jaxspec.training.losses import Loss
from jaxspec.typing import Params

STEPS = 2
"""Maximum steps that are compiled and timed."""


def dry_run(
    config: TrainConfig,
    params: Params,
    loss: Loss,
    batches: Batches,
    directory: Path,
    *,
    sharding_of: ShardingOf | None = None,
    evaluate: Evaluate | None = None,
    inputs: Mapping[str, Any] | None = None,
    apart: Sequence[str] = (),
) -> Params:
    """Print what `fit` with these arguments would take, and return the parameters unchanged.

    The hours are those of the steps: the second step's time a slot, times the mean slots of the
    steps whose rows were read.

    Args:
      evaluate, inputs: Arguments of `fit` that a dry run does not need.
    """
    mesh = config.make_mesh()
    state, frozen, step = set_up(config, params, loss, mesh, sharding_of, apart)
    timed = min(STEPS, config.steps)
    slots = seconds = compiling = 0.0
    parts: dict[str, int] = {}
    with closing(read_ahead(batches, range(timed), mesh)) as ready, on_mesh(mesh):
        for batch in ready:
            since = time.perf_counter()
            program = step.lower(state, frozen, batch).compile()
            compiling += time.perf_counter() - since
            memory = program.memory_analysis()
            parts = {
                "frozen": bytes_held(frozen),
                "trained": bytes_held(state.params) + bytes_held(state.average),
                "optimizer": bytes_held(state.opt_state),
                "batch": bytes_held(batch),
                "gradient and activations": memory.temp_size_in_bytes if memory else 0,
            }
            state, metrics = program(state, frozen, batch)
            jax.block_until_ready(metrics)
            since = time.perf_counter()
            state, metrics = program(state, frozen, batch)
            jax.block_until_ready(metrics)
            seconds += time.perf_counter() - since
            slots += getattr(batch, "tokens", np.zeros(1)).size
    if jax.process_index():
        return params
    rows = ""
    if isinstance(batches, CountedBatches):
        mean_slots, shares = batches.survey()
        rows = f"; {shares}"
        seconds *= mean_slots / slots * timed
    each = seconds / timed
    listing = ", ".join(f"{human_bytes(count)} {name}" for name, count in parts.items())
    print(
        f"{directory.name}: {config.steps:,} steps of {config.batch} samples{rows}\n"
        f"  memory of each of {mesh.size} {jax.devices()[0].platform} devices: "
        f"{human_bytes(sum(parts.values()))} ({listing})\n"
        f"  a step takes {1e3 * each:.0f} ms, compiling {compiling:.0f} s; "
        f"all steps about {config.steps * each / 3600:.2f} hours"
    )
    return params
