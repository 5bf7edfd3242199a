"""Drafts without a model: prompt lookup, and n-gram counts of a prompt and of other answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

IMAGE = -1
"""Placeholder of an image in a prompt; no draft copies it and no context contains it."""
KEPT = 8
"""Tokens that are kept of a context's distribution."""

Distribution = Mapping[int, float]
"""Tokens and their probabilities; the rest of the mass belongs to no token."""


def lookup(tokens: Sequence[int], gamma: int, longest: int = 3) -> list[int]:
    """Return the drafts of jaxspec's view `lookup`.

    Each drafted token followed the last few tokens before it at their latest earlier occurrence.

    Args:
      tokens: Prompt and answer so far.
      gamma: The most tokens to return.
      longest: Tokens of the suffix to look for first; shorter ones follow, down to one.

    For [5 6 7 8 5 6] and gamma 2 the suffix [5 6] was followed by 7, and [5 6 7] by 8.
    """
    text = list(tokens)
    while len(text) < len(tokens) + gamma and (position := _follows(text, longest)) is not None:
        text.append(position)
    return text[len(tokens) :]


def _follows(text: list[int], longest: int) -> int | None:
    for size in range(min(longest, len(text) - 1), 0, -1):
        suffix = text[-size:]
        if IMAGE in suffix:
            continue
        for at in range(len(text) - size - 1, -1, -1):
            end = at + size
            if text[end - 1] == suffix[-1] and text[at:end] == suffix and text[end] != IMAGE:
                return text[end]
    return None


@dataclass
class Counts:
    """Counts of the tokens after each context of 1 to `order` tokens."""

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
