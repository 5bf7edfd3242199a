"""Times of single passes: what the papers' predicted speed-ups are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.engine import Engine, Request
from jaxspec.decoding.speculative import Speculator


@dataclass(frozen=True)
class PassTimes:
    """Medians in milliseconds, at the batch and cache size of the given requests."""

    draft_ms: float
    """T_q: one draft pass over all views; of a tree, over a level of average size."""
    target_ms: float
    """T_p: one target pass over one token."""
    verify_ms: float
    """T_p(J+1): one target pass over a block."""


def time_passes(engine: Engine, requests: list[Request], repeats: int = 20) -> PassTimes:
    """Times draft and target passes on the state after the requests' prefill, interleaved."""
    program = engine.program
    assert isinstance(program, Speculator)
    state = engine.prefill(requests)
    params = engine.params
    rows = state.count.shape[0]

    def target(tokens: int) -> Callable[[], Any]:
        fed = jnp.ones((rows, tokens), jnp.int32)
        step = jax.jit(program.target.extend)
        return lambda: step(params["target"], fed, state.target)

    draft = jax.jit(program.drafter.model.extend)
    level = -(-program.drafter.reads // program.drafter.gamma)
    draft_rows = jnp.ones((rows * len(program.drafter.views), level), jnp.int32)
    calls = {
        "draft_ms": lambda: draft(params["drafter"], draft_rows, state.drafter.cache),
        "target_ms": target(1),
        "verify_ms": target(program.drafter.nodes + 1),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first call compiles
                times[name].append(1e3 * (time.perf_counter() - start))
    return PassTimes(**{name: float(np.median(values)) for name, values in times.items()})
