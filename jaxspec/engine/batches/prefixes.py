"""Keep the keys of prompts, so that a prompt which begins alike reads only what is new."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.cache import KVCache
from jaxspec.engine.memory import bytes_held
from jaxspec.engine.requests import EncodedRequest
from jaxspec.prompts.rows import PromptRow, same_slots


def image_names(request: EncodedRequest) -> tuple[str, ...]:
    """Return a name of each image of a request: equal names are equal to the tower."""
    limits = sorted(request.image_limits.items())
    return tuple(f"{image.hash} {limits}" for image in request.prompt.images)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Hold what the target made of a prompt."""

    owner: str
    row: PromptRow
    images: tuple[str, ...]
    """Name of each image of the row."""
    cache: KVCache
    features: Any = None
    """What the tower made of the images; None without any."""

    def shared(self, row: PromptRow, images: tuple[str, ...]) -> int:
        """Return how many slots at the start of another row hold the same tokens and images."""
        count = same_slots(self.row, row)
        differ = [i for i, pair in enumerate(zip(self.images, images)) if len({*pair}) > 1]
        slots = np.flatnonzero(row.images >= differ[0]) if differ else ()
        return int(min(count, *slots[:1], count))


class Prefixes:
    """Keep the prefixes that were used last, in a limited number of a device's bytes.

    Args:
      most: Maximum bytes; 0 keeps nothing.
      spare: Tokens of an older prefix that a new one may lack, to be kept in its place.
    """

    def __init__(self, most: int, spare: int) -> None:
        self.most, self.spare = most, spare
        self.kept: list[Prefix] = []
        """The most recently used last."""

    def find(
        self, owner: str, row: PromptRow, images: tuple[str, ...]
    ) -> tuple[Prefix | None, int]:
        """Return the owner's prefix that shares most slots with a row, and their number."""
        shared = [(p.shared(row, images), p) for p in self.kept if p.owner == owner]
        count, best = max(shared, key=lambda pair: pair[0], default=(0, None))
        if not count or best is None:
            return None, 0
        self.kept = [*(p for p in self.kept if p is not best), best]
        return best, count

    def add(self, new: Prefix) -> None:
        """Keep a prefix, in place of those that it holds, until newer ones need its bytes."""
        self.kept = [*(p for p in self.kept if not self._held(p, new)), new]
        sizes = [bytes_held((p.cache, p.features)) for p in self.kept]
        while sum(sizes) > self.most:
            del self.kept[0], sizes[0]

    def _held(self, old: Prefix, new: Prefix) -> bool:
        lost = len(old.row) - old.shared(new.row, new.images)
        return old.owner == new.owner and lost < min(self.spare, len(old.row) / 2)
