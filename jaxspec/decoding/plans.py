"""Decode a speculator's state for a while with some of its sources, or with none.

A *plan* names the sources that draft and the length of their blocks. All plans of a speculator are
loops over one state, so a batch may change its plan wherever a loop pauses, in the middle of an
answer. Sources that were idle catch up when a plan with them begins. All blocks are verified, so a
greedy answer is the target's own, and a sampled one follows the target's law. But which of its
answers a seed gives depends on what was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.drafting.drafter import States
from jaxspec.decoding.drafting.trees import make_drafter
from jaxspec.decoding.drafting.weighting import Static
from jaxspec.decoding.records import Trace
from jaxspec.decoding.sources.source import Committed, Source
from jaxspec.decoding.speculative import WEIGHTS_STREAM, Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState, Pause, step_keys
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Bool, Float, Int, Params


@dataclass(frozen=True)
class Plan:
    """Say how blocks of a stretch are drafted. Static: part of the compiled program."""

    whole: Speculator
    """Program that made the state."""
    drafting: tuple[int, ...]
    """Which of its sources draft; () decodes plainly."""
    gamma: int
    """Length of blocks; 0 decodes plainly."""
    width: int | None = None
    """Tokens that each pass of all plans reads, see `TargetProgram.extend`; None: no padding."""

    @property
    def name(self) -> str:
        """Return the sources and the length, as `lookup 7`; `plain` for neither."""
        names = (self.whole.sources[i].name for i in self.drafting)
        return f"{' + '.join(names)} {self.gamma}" if self.drafting else "plain"

    @property
    def compiler_options(self) -> dict[str, bool]:
        return self.part.compiler_options

    @cached_property
    def part(self) -> Speculator | Autoregressive:
        """Return the program of the loop, over the part of the state that it reads."""
        whole = self.whole
        if not self.drafting:
            return Autoregressive(whole.target, self.width or 1)
        alone = len(self.drafting) == 1
        sources = [whole.sources[i].planned(self.gamma, alone) for i in self.drafting]
        drafter = make_drafter(sources, self.gamma, whole.drafter.vocabulary)
        rule = whole.weighting if self._is_whole else Static()
        return Speculator(whole.target, drafter, rule, whole.traces, self.width or self.gamma + 1)

    @property
    def _is_whole(self) -> bool:
        return len(self.drafting) == len(self.whole.sources)

    @property
    def _columns(self) -> np.ndarray:
        """Return which distributions of the whole mixture belong to the sources that draft."""
        widths = [source.width for source in self.whole.sources]
        owners = np.repeat(np.arange(len(widths)), widths)
        return np.flatnonzero(np.isin(owners, self.drafting))

    def foreseen(self, text: Int[np.ndarray, " S"], count: int) -> Bool[np.ndarray, " new"] | None:
        """Return which of the newest tokens it would have drafted, see `Source.foreseen`."""
        if len(self.drafting) != 1:
            return None
        return self.whole.sources[self.drafting[0]].foreseen(text, count)

    def decode(
        self, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
    ) -> DecodeState:
        """Decode until every row is done, or until `pause`."""
        part = self.part
        if isinstance(part, Autoregressive):
            after = part.decode(params, state.replace(trace=None), options, pause)
            return after.replace(trace=self._traced(state, None))
        committed = Committed(params, state.tokens, state.count, state.target, part.drafter.reads)
        inside = state.replace(drafter=self.caught_up(committed, state.drafter))
        if not self._is_whole:
            inside = inside.replace(weighting=self.weights(state, options))
            if state.trace is not None:
                columns = self._columns
                weights, agree = (
                    leaf[..., columns] for leaf in (state.trace.weights, state.trace.agree)
                )
                inside = inside.replace(trace=state.trace.replace(weights=weights, agree=agree))
        after = part.decode(params, inside, options, pause)
        states = dict(enumerate(state.drafter)) | dict(zip(self.drafting, after.drafter))
        whole = after.replace(drafter=tuple(states.values()))
        if self._is_whole:
            return whole
        return whole.replace(weighting=state.weighting, trace=self._traced(state, after.trace))

    def caught_up(self, committed: Committed, states: States) -> States:
        """Return the states of the sources that draft, which have read what they missed."""
        pairs = zip(self.part.sources, self.drafting, strict=True)
        return tuple(source.catch_up(committed, states[i]) for source, i in pairs)

    def weights(self, state: DecodeState, options: Sampling) -> Float[Array, "B R"]:
        """Return what the whole rule has learned of the sources that draft."""
        keys = step_keys(options, state.count, WEIGHTS_STREAM)
        weights = self.whole.weighting.weights(state.weighting, keys)[:, self._columns]
        total = weights.sum(-1, keepdims=True)
        return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), 1 / weights.shape[1])

    def _traced(self, before: DecodeState, trace: Trace | None) -> Trace | None:
        """Return the whole trace: of new tokens, idle sources have no weight.

        trace: The trace of the sources that drafted; None if none did.
        """
        old = before.trace
        if old is None:
            return None
        new = jnp.arange(old.place.shape[1]) >= before.count[:, None]
        idle = new[..., None]
        weights, agree = jnp.where(idle, 0, old.weights), ~idle & old.agree
        shares = jnp.where(idle, jnp.asarray([1.0, 0.0]), old.shares)
        if trace is None:
            place, drafted = jnp.where(new, -1, old.place), ~new & old.drafted
        else:
            place, drafted = trace.place, trace.drafted
            weights = weights.at[..., self._columns].set(trace.weights)
            agree = agree.at[..., self._columns].set(trace.agree)
        return Trace(place, weights, agree, drafted, shares)


def longest_block(sources: Sequence[Source], width: int | None) -> int:
    """Return the length of the longest block of any plan.

    width: Tokens that each pass of all plans reads; None: as many as a block has.
    """
    limits = [source.longest for source in sources if source.longest is not None]
    limits += [] if width is None else [width - 1]
    return max(min([max(source.lengths[-1] for source in sources), *limits]), 1)


def plans_of(whole: Speculator, width: int | None) -> tuple[Plan, ...]:
    """Return the plans among which a policy chooses: plain first, all sources last."""
    sources, most = whole.sources, whole.drafter.gamma
    every, shapes = tuple(range(len(sources))), list[tuple[tuple[int, ...], int]]([((), 0)])
    for i, source in enumerate(sources):
        shapes += [((i,), gamma) for gamma in sorted({min(n, most) for n in source.lengths})]
    if len(every) > 1:
        shapes.append((every, min(5, most)))
    return tuple(Plan(whole, *shape, width) for shape in shapes)
