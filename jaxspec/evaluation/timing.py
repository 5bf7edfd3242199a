"""Times of single passes and stages, inside compiled loops: what the papers' predicted speed-ups are made of.

A pass that is called from the host by itself also pays for its dispatch and, as its inputs have to outlive it, for a
copy of the cache. In a decode loop it pays neither, so each is timed in a loop of its own kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.decoding.collaboration import Collaboration
from jaxspec.decoding.compile_cache import Held, executable
from jaxspec.decoding.engine import Engine, Request, Result
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import rewound
from jaxspec.sampling import argmax
from jaxspec.sharding import mesh_of
from jaxspec.typing import Array, Int, Params

CALL_MS = 40.0
"""How long one timed call lasts: long against its dispatch, which takes up to a millisecond."""


@dataclass(frozen=True)
class PassTimes:
    """Milliseconds at the batch and cache size of the given requests."""

    draft_ms: float
    """T_q: one draft pass over all views; of a tree, over a level of average size."""
    target_ms: float
    """T_p: one target pass over one token."""
    verify_ms: float
    """T_p(J+1): one target pass over a block."""


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is the processor's time of all threads: what a pass costs on a CPU that others use as well."""


def time_loops(
    calls: Mapping[str, Callable[[int], Any]],
    repeats: int,
    clock: Literal["wall", "cpu"] = "wall",
    name: str | None = None,
) -> dict[str, float]:
    """Least milliseconds of what `call(n)` does n times, each call in turn, so that all see the same machine.

    The least, because what else runs on a machine can only add: on an idle one it is next to the median.

    Args:
      name: of a bar of progress, whose first turn compiles; without, none is shown.
    """
    counts = {}
    times: dict[str, list[float]] = {key: [] for key in calls}
    with tqdm(total=(1 + repeats) * len(calls), desc=name, unit="call", leave=False, disable=name is None) as bar:
        for key, call in calls.items():
            for _ in range(2):  # compiles; what a call hands on to the next may be of another kind than it was given
                jax.block_until_ready(call(1))
            once = _milliseconds(partial(call, 2), clock) / 2
            counts[key] = int(np.clip(CALL_MS / once, 1, 1000))
            bar.update()
        for _ in range(repeats):
            for key, call in calls.items():
                times[key].append(_milliseconds(partial(call, counts[key]), clock) / counts[key])
                bar.update()
    return {key: min(values) for key, values in times.items()}


def _milliseconds(call: Callable[[], Any], clock: str) -> float:
    now = CLOCKS[clock]
    start = now()
    jax.block_until_ready(call())
    return 1e3 * (now() - start)


class Passes:
    """Passes over one state (a cache, or what holds caches), which they share and hand on.

    Args:
      extend: (params, tokens [B, T], state) -> logits [..., B, T, V], state.
      params: those for a pass of so many rows, T of each.
    """

    def __init__(
        self, extend: Callable[..., tuple[Array, Any]], params: Callable[[int], Params], state: Any, batch: int
    ) -> None:
        self.extend, self.params, self.state, self.batch = extend, params, state, batch

    def over(self, tokens: int) -> Callable[[int], Any]:
        """`call(n)`: n passes over so many tokens a row, each from the same length on."""
        fed = jnp.ones((self.batch, tokens), jnp.int32)
        params = self.params(fed.size)
        held = Held(self.extend, mesh_of(params), params)

        def call(times: int) -> Array:
            args = fed, self.state, jnp.int32(times)
            out, self.state = executable(_run_passes, held, *args)(params, *args)
            return out

        return call


@partial(jax.jit, static_argnames=("extend",), donate_argnames=("state",))
def _run_passes(
    extend: Callable[..., tuple[Array, Any]], params: Params, tokens: Int[Array, "B T"], state: Any, times: Array
) -> tuple[Int[Array, "B T"], Any]:
    def step(_: int, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        logits, after = extend(params, *carry)
        said = argmax(logits)
        return said.reshape(-1, *tokens.shape)[0], rewound(after, state)

    return jax.lax.fori_loop(0, times, step, (tokens, state))


def by_turns(
    programs: Sequence[Any], requests: Sequence[Request], repeats: int, bar: Any = None
) -> tuple[list[list[Result[Any]]], np.ndarray]:
    """Runs engines (or collaborations) on the same requests by turns, so that what else the machine does slows all
    alike.

    Args:
      bar: of progress; a run is a unit of it.

    Returns the answers of each in the last run, and its tokens of the loop a second in every run, [program, run].
    """
    answers, rates = [], np.zeros((len(programs), repeats))
    for run in range(repeats):
        answers = []
        for i, program in enumerate(programs):
            done = program.generate(requests)
            spent = sum(r.decode_ms / r.batch for r in done)
            rates[i, run] = 1e3 * sum(r.stats.emitted for r in done) / max(spent, 1e-9)
            answers.append(done)
            if bar is not None:
                bar.update()
    return answers, rates


def time_passes(engine: Engine, requests: list[Request], repeats: int = 20) -> PassTimes:
    """Times draft and target passes on the state after the requests' prefill, in turns."""
    program = engine.program
    assert isinstance(program, Speculator)
    state = engine.prefill(requests)
    params = engine.loop_params(engine.params, len(state.count))
    target = Passes(program.target.extend, lambda _: params["target"], state.target, len(state.count))
    draft = Passes(program.drafter.extend, lambda _: params, state.drafter, len(state.count))
    calls = {
        "draft_ms": draft.over(-(-program.drafter.reads // program.drafter.gamma)),
        "target_ms": target.over(1),
        "verify_ms": target.over(program.drafter.nodes + 1),
    }
    return PassTimes(**time_loops(calls, repeats))


def time_members(
    collaboration: Collaboration, request: Request, widths: Sequence[int], repeats: int = 10
) -> dict[int, list[float]]:
    """Milliseconds of a pass of each model over so many tokens, after the request's prompt."""
    state = collaboration.prefill([request])
    members = [
        Passes(model.model.extend, model.loop_params, cache, len(cache.length))
        for model, cache in zip(collaboration.models, state.caches, strict=True)
    ]
    calls = {f"{width} {m}": model.over(width) for width in set(widths) for m, model in enumerate(members)}
    found = time_loops(calls, repeats)
    return {width: [found[f"{width} {m}"] for m in range(len(members))] for width in set(widths)}
