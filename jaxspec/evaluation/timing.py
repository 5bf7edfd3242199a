"""Times of single passes: what the papers' predicted speed-ups are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration import Collaboration
from jaxspec.decoding.collaborative import Member
from jaxspec.decoding.engine import Engine, Request
from jaxspec.decoding.speculative import Speculator
from jaxspec.typing import Params


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

    draft = jax.jit(program.drafter.extend)
    level = -(-program.drafter.reads // program.drafter.gamma)
    draft_tokens = jnp.ones((rows, level), jnp.int32)
    calls = {
        "draft_ms": lambda: draft(params, draft_tokens, state.drafter),
        "target_ms": target(1),
        "verify_ms": target(program.drafter.nodes + 1),
    }
    return PassTimes(**median_ms(calls, repeats))


def median_ms(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Medians in milliseconds of calls that take turns; the first of each, which compiles, does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: float(np.median(values)) for name, values in times.items()}


IN_A_ROW = 16
"""Passes that are timed together, so that none contains the time to launch a program."""


def time_members(
    collaboration: Collaboration, request: Request, widths: Sequence[int], repeats: int = 10
) -> dict[int, list[float]]:
    """Milliseconds of a pass of each model over so many tokens, inside a loop, after the request's prompt."""
    state = collaboration.prefill([request])

    @partial(jax.jit, static_argnums=(0, 1))
    def passes(member: Member, width: int, params: Params, cache: KVCache) -> Any:
        def step(_: Any, carry: tuple[Any, KVCache]) -> tuple[Any, KVCache]:
            logits, written = member.model.extend(params, carry[0], carry[1])
            return logits.argmax(-1).astype(jnp.int32), written.replace(length=cache.length)

        tokens = jnp.ones((cache.length.shape[0], width), jnp.int32)
        return jax.lax.fori_loop(0, IN_A_ROW, step, (tokens, cache))[0]

    calls = {
        (width, m): partial(passes, member, width, params, cache)
        for width in sorted(set(widths))
        for m, (member, params, cache) in enumerate(
            zip(collaboration.program.members, collaboration.params["models"], state.caches, strict=True)
        )
    }
    found = median_ms({f"{width} {m}": call for (width, m), call in calls.items()}, repeats)
    return {
        width: [found[f"{width} {m}"] / IN_A_ROW for m in range(len(collaboration.models))] for width in set(widths)
    }
