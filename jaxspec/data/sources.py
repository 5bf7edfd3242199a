"""Where training samples come from: picturebook, prepared data, and weighted mixtures of them, at random access."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grain

from jaxspec.data.picturebook import train_sample
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError


class Picturebook(Sequence[Sample]):
    """Picturebook's training samples, drawn as they are asked for.

    Args:
      seed: names one of its splits.
      kinds: names of its mixture to keep; None keeps all.
    """

    def __init__(self, seed: int = 0, kinds: tuple[str, ...] | None = None, size: int = 2**31 - 1) -> None:
        self.seed, self.kinds, self.size = seed, kinds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return train_sample(self.seed, int(index), self.kinds)


def open_source(name: str) -> Sequence[Sample]:
    """A folder of prepared data, or `picturebook`, or `picturebook:describe,read` for some of its kinds."""
    head, _, kinds = name.partition(":")
    if head == "picturebook":
        return Picturebook(kinds=tuple(kinds.split(",")) if kinds else None)
    from jaxspec.data.builders import Prepared

    return Prepared(Path(name))


def mixture(sources: Sequence[tuple[Sequence[Sample], float]], seed: int) -> Any:
    """An endless sequence of samples of all sources, by their weights: a Grain `MapDataset`, read by index.

    Each source is shuffled as a whole, and anew in every epoch of its own; the order is a function of the seed.

    Raises InputError for weights that are not above 0.
    """
    for source, weight in sources:
        if not 0 < weight < float("inf"):
            raise InputError(f"mixture: weight {weight} of a source of {len(source)} samples; give more than 0")
    parts = [
        grain.MapDataset.source(source).seed(seed + number).shuffle().repeat()
        for number, (source, _) in enumerate(sources)
    ]
    return grain.MapDataset.mix(parts, [weight for _, weight in sources])
