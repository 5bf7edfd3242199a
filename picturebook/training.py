"""Read the endless train split as a source of training samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxspec.data.samples import Sample
from picturebook.sets import train_sample


class Picturebook(Sequence[Sample]):
    """Draw the training samples when they are asked for.

    Args:
      seed: Name of one train split.
      kinds: Names of the kinds of samples to keep; None keeps all.
      size: Number of samples.
    """

    def __init__(
        self, seed: int = 0, kinds: tuple[str, ...] | None = None, size: int = 2**31 - 1
    ) -> None:
        self.seed, self.kinds, self.size = seed, kinds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of a number; slices are not read."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        return train_sample(self.seed, int(index), self.kinds)


def named(name: str) -> Picturebook | None:
    """Return the source that `picturebook` or `picturebook:describe,read` names; None for
    others."""
    head, _, kinds = name.partition(":")
    if head != "picturebook":
        return None
    return Picturebook(kinds=tuple(kinds.split(",")) if kinds else None)
