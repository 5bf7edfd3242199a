"""A sample of an evaluation set, wherever it comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """A conversation about images.

    `turns` are (question, answer); the questions hold as many `<image>` as there are `images`, in that order.
    The answer is the set's reference, empty where the set has none.
    """

    id: str
    dataset: str
    images: tuple[Any, ...]
    """uint8 arrays [Y, X, 3], PIL images or `StoredImage`s."""
    turns: tuple[tuple[str, str], ...]
    accepted: tuple[str, ...] = field(default=(), kw_only=True)
    """Short answers to the first question that count as right, where the set tells them."""
    labels: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    """What else the set says of the sample, such as MMSpec's topic and category."""
