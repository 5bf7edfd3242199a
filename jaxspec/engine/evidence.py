"""Count what requests show of drafts: how often a drafted token was accepted, place by place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

TRUST = 4.0
"""Blocks of a request that count as much as what earlier requests showed."""
FADE = 0.98
"""Weight of a block's evidence after the next block of the same sources."""
FIRST = 0.6
"""Chance of acceptance before anything was seen."""


class Progress(NamedTuple):
    """Hold what a request's answer is so far."""

    stats: Any
    """`DecodeStats`, as numpy."""
    prompt: np.ndarray
    """Tokens of the prompt, `NO_TOKEN` for slots of images."""
    answer: tuple[int, ...]
    """Tokens up to the stop string, with which it ends."""
    ended: bool


class Counts(NamedTuple):
    """Count drafted and accepted tokens of some blocks, by place."""

    drafted: np.ndarray
    accepted: np.ndarray


@dataclass
class Evidence:
    """Count, by place of a block, how often a token was verified there and how often accepted."""

    verified: np.ndarray
    accepted: np.ndarray

    @classmethod
    def none(cls, places: int) -> Evidence:
        return cls(np.zeros(places), np.zeros(places))

    def add(self, new: Counts) -> None:
        """Add the counts of new blocks; older ones fade."""
        blocks = new.drafted[0]
        weight = FADE ** float(blocks)
        self.verified = weight * self.verified + np.minimum(
            [blocks, *new.accepted[:-1]], new.drafted
        )
        self.accepted = weight * self.accepted + new.accepted

    def chances(self, prior: np.ndarray | None = None) -> np.ndarray:
        """Return the chance of each place if those before it are accepted.

        prior: Chances that count `TRUST` blocks; None: those of the place before.
        """
        chances, before = [], FIRST
        for place, (verified, accepted) in enumerate(zip(self.verified, self.accepted)):
            expected = before if prior is None else prior[place]
            before = (accepted + TRUST * expected) / (verified + TRUST)
            chances.append(before)
        return np.asarray(chances)


Beliefs = dict[tuple[int, ...], Evidence]
"""Evidence by the sources that drafted."""


@dataclass
class Shadow:
    """Count the blocks that a plan would have drafted while others did.

    With blocks of 2, the hits yes, yes, no, no, yes are blocks of two accepted tokens and of none,
    and the first token of an open block: the third token, which the target would have written, is
    no draft.
    """

    gamma: int
    accepted: int = 0
    """Accepted tokens of the open block."""

    def add(self, hits: Iterable[bool], places: int) -> Counts:
        """Return the counts of the blocks that end, given whether each new token was foreseen."""
        counts = Counts(np.zeros(places), np.zeros(places))
        for hit in hits:
            if hit and self.accepted < self.gamma:
                self.accepted += 1
                continue
            counts.drafted[: self.gamma] += 1
            counts.accepted[: self.accepted] += 1
            self.accepted = 0
        return counts
