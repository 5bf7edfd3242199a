"""Draft without a model: n-gram counts of a prompt, of its answer and of other answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IMAGE = -1
"""Placeholder of an image in a prompt; no draft copies it and no context contains it."""
KEPT = 8
"""Tokens that are kept of a context's distribution."""

Distribution = Mapping[int, float]
"""Tokens and their probabilities; the rest of the mass belongs to no token."""


@dataclass
class Counts:
    """Count the tokens after each context of 1 to `order` tokens."""

    order: int
    counts: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens from `start` on, each after its contexts."""
        for at in range(start, len(tokens)):
            if tokens[at] == IMAGE:
                continue
            for size in range(1, min(self.order, at) + 1):
                if tokens[at - size] == IMAGE:
                    break
                after = self.counts.setdefault(tuple(tokens[at - size : at]), {})
                after[tokens[at]] = after.get(tokens[at], 0) + 1

    def after(self, tokens: Sequence[int]) -> Distribution:
        """Return the distribution of the next token, interpolated over contexts (Witten-Bell).

        A context with `n` counts of `k` different tokens gets n / (n + k) of the mass that longer
        contexts left.
        """
        probs: dict[int, float] = {}
        remaining = 1.0
        for size in range(min(self.order, len(tokens)), 0, -1):
            counted = self.counts.get(tuple(tokens[-size:]))
            if not counted:
                continue
            total = sum(counted.values())
            share = remaining / (total + len(counted))
            remaining *= len(counted) / (total + len(counted))
            likeliest = counted.items()
            if len(counted) > KEPT:
                likeliest = sorted(likeliest, key=lambda item: -item[1])[:KEPT]
            for token, count in likeliest:
                probs[token] = probs.get(token, 0.0) + share * count
        return probs
