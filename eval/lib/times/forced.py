"""Decode loops at forced acceptance: all the work of a real block, with a given verdict."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from eval.lib.output.tables import Record
from eval.lib.times.passes import greedy_options, predicted_speedup, time_loops
from eval.lib.times.random_pair import Pair, blocks
from jaxspec.decoding.drafting.weighting import Static
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_prefill
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Float, Params
from jaxspec.verification import Draft, Verdict


@dataclass(frozen=True)
class ForcedSpeculator(Speculator):
    """Accept `pattern[i mod len(pattern)]` of the drafted tokens in block i."""

    pattern: tuple[int, ...] = (0,)

    def judge(
        self, scores: Float[Array, "B T V"], draft: Draft, state: DecodeState, options: Sampling
    ) -> Verdict:
        """Return the verdict with its count replaced."""
        verdict = super().judge(scores, draft, state, options)
        return verdict.replace(
            count=jnp.asarray(self.pattern)[state.stats.steps % len(self.pattern)]
        )


def accepted_pattern(tokens_per_pass: float, gamma: int, blocks: int = 100) -> tuple[int, ...]:
    """Return the accepted tokens of each block, spread evenly, for these tokens per pass.

    >>> accepted_pattern(2.5, 5, 4)
    (1, 2, 1, 2)
    """
    if not 1 <= tokens_per_pass <= gamma + 1:
        raise ValueError(f"tokens_per_pass {tokens_per_pass}: from 1 to gamma + 1 = {gamma + 1}")
    reached = [int((tokens_per_pass - 1) * i + 1e-9) for i in range(blocks + 1)]
    return tuple(after - before for before, after in pairwise(reached))


def measure_forced(pair: Pair, batch: int = 1, views: int = 1) -> list[Record]:
    """Time decode loops at forced acceptance and the plain loop, with Eq. (1)'s prediction.

    `speedup_measured` is the ratio of the loops' tokens a second; `loop_efficiency` divides it by
    the prediction from T_q, T_p and T_p(gamma+1). A block costs `block_ms`, its passes gamma T_q
    and T_p(gamma+1).
    """
    config, gamma = pair.config, pair.config.gamma
    drafter, inputs = pair.drafter(views), pair.prompts(batch, views)
    options = greedy_options(batch, config.new)
    programs: dict[str, Any] = {"plain": Autoregressive(pair.target.model)}
    for tau in config.forced:
        pattern = accepted_pattern(tau, gamma)
        programs[f"{tau:g}"] = ForcedSpeculator(
            pair.target.model, drafter, Static(), pattern=pattern
        )
    states = {
        name: run_prefill(program, pair.params, inputs, options, config.new)[0]
        for name, program in programs.items()
    }
    steps: dict[str, float] = {}

    def decode(name: str, times: int) -> Array:
        done = [
            _run_decode(programs[name], pair.params, states[name], options) for _ in range(times)
        ]
        steps[name] = float(done[-1].stats.steps.max())
        return done[-1].count

    first = f"{config.forced[0]:g}"
    slots = config.context + config.new  # a pass reads the empty slots of the cache too
    target = pair.passes(pair.target, batch, slots, gamma + 1)
    calls = {name: partial(decode, name) for name in programs} | {
        "draft_ms": pair.passes(pair.draft, views * batch, slots, 1).over(1),
        "target_ms": target.over(1),
        "verify_ms": target.over(gamma + 1),
        "block_ms": blocks(programs[first], pair.params, states[first], options),
    }
    ms = time_loops(calls, config.repeats, f"forced, B = {batch}, R = {views}")
    times = {name: value for name, value in ms.items() if name.endswith("_ms")}
    rows, written = [], config.new - 1  # prefill writes the first token
    for tau in config.forced:
        loop, reached = ms[f"{tau:g}"], written / steps[f"{tau:g}"]
        passes = tau, gamma, times["draft_ms"], times["target_ms"]
        predicted = predicted_speedup(*passes, times["verify_ms"])
        row: Record = {"kind": "forced", "batch": batch, "views": views, "gamma": gamma}
        row |= {"forced_tokens_per_pass": tau, "tokens_per_pass": reached}
        row |= {"plain_tokens_per_second": batch * 1e3 * written / ms["plain"]}
        row |= {"tokens_per_second": batch * 1e3 * written / loop}
        row |= {"speedup_measured": ms["plain"] / loop}
        row |= {"speedup_predicted": predicted_speedup(*passes)}
        row |= {"speedup_predicted_with_verify": predicted}
        row |= {"loop_efficiency": ms["plain"] / loop / predicted * tau / reached}
        rows.append(row | times)
    return rows


@partial(jax.jit, static_argnames="program")
def _run_decode(program: Any, params: Params, state: DecodeState, options: Sampling) -> DecodeState:
    """Decode without donation, so that one state starts all runs."""
    return program.decode(params, state, options)
