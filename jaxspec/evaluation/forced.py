"""Forced acceptance: the wall-clock of a block efficiency that nobody has trained.

Draft and target compute all that they compute for real, on weights of any kind, random ones too; only the verdict's
count is not theirs but given. So the time of a loop at a block efficiency of, say, 2.29 can be measured at full size
without a trained pair. What such a loop writes is meaningless, and no figure of it says anything about acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp

from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Float
from jaxspec.verification import Draft, Verdict


@dataclass(frozen=True)
class ForcedSpeculator(Speculator):
    """A speculator in which block i accepts `pattern[i mod len(pattern)]` of its drafted tokens."""

    pattern: tuple[int, ...] = (0,)

    def judge(self, logits: Float[Array, "B T V"], draft: Draft, state: DecodeState, options: Sampling) -> Verdict:
        """The verdict with its count replaced."""
        verdict = super().judge(logits, draft, state, options)
        return verdict.replace(count=jnp.asarray(self.pattern)[state.stats.steps % len(self.pattern)])


def accepted_pattern(block_efficiency: float, gamma: int, blocks: int = 100) -> tuple[int, ...]:
    """Accepted tokens of each of so many blocks, spread evenly, that make this many tokens a block on average.

    >>> accepted_pattern(2.5, 5, 4)
    (1, 2, 1, 2)
    """
    if not 1 <= block_efficiency <= gamma + 1:
        raise ValueError(f"block_efficiency {block_efficiency}: from 1 to gamma + 1 = {gamma + 1}")
    reached = [int((block_efficiency - 1) * i + 1e-9) for i in range(blocks + 1)]
    return tuple(after - before for before, after in pairwise(reached))
