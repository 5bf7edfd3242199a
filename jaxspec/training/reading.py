"""Read batches of conversations ahead with Grain, and count the rows that teach nothing."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, replace
from typing import Any, Generic

import grain
import jax

from jaxspec.errors import InputError
from jaxspec.training.conversations import GROUP, ConversationBatches
from jaxspec.training.loop.batches import Batch

AHEAD = 4
"""Batches that are made ahead, each by a thread of its own."""
SURVEYED = 4 * GROUP
"""Most steps whose rows a survey reads."""
SURE = 512
"""Rows to read before the share that teaches nothing can end a run."""


@dataclass(frozen=True)
class Survey:
    """Count what the first steps of a stage read.

    Fields:
      rows: Rows of these steps.
      lost: Rows that teach nothing, which others replace.
      tokens: Filled slots.
      slots: Slots of all batches, with padding.
      otherwise: Share of filled slots with packing, or for a stage that packs without it.
    """

    steps: int
    rows: int
    lost: int
    tokens: int
    slots: int
    otherwise: float


@dataclass
class CountedBatches(Generic[Batch]):
    """Iterate over batches and count unlearned rows; closing it prints their share.

    Its position is Grain's, the next step. Raises InputError once more than the share `limit` of
    the rows teach nothing, by three standard deviations of what chance gathers.
    """

    batches: Any
    rows: ConversationBatches
    limit: float
    _lost: int = 0
    _read: int = 0

    def __next__(self) -> Batch:
        batch, lost = next(self.batches)
        self._lost += lost
        self._read += self.rows.batch
        expected = self.limit * self._read
        most = expected + 3 * math.sqrt(expected * (1 - self.limit))
        if self._read >= SURE and self._lost > most:
            report, self._lost = self._report(), 0
            raise InputError(f"{report}; or let more than {self.limit:.0%} be with --unlearned")
        return batch

    def get_state(self) -> Any:
        return self.batches.get_state()

    def set_state(self, state: Any) -> None:
        self.batches.set_state(state)

    def survey(self, steps: int) -> Survey:
        """Read the texts of the first steps' rows, and count those that teach and their slots."""
        rows, count = self.rows, min(steps, SURVEYED)

        def filled(rows: ConversationBatches) -> tuple[int, int]:
            tokens, slots = zip(*map(rows.filled, range(count)), strict=True)
            return sum(tokens), sum(slots)

        tokens, slots = filled(replace(rows, packing=not rows.packing))
        lost = sum(map(rows.unlearned, range(count)))
        return Survey(count, count * rows.batch, lost, *filled(rows), tokens / slots)

    def close(self) -> None:
        """Print how many rows taught nothing, and the mend."""
        if self._lost and not jax.process_index():
            print(self._report(), file=sys.stderr)

    def _report(self) -> str:
        tokens, tiles = max(self.rows.buckets), max(self.rows.tile_buckets)
        return (
            f"data: {self._lost / self._read:.1%} of the rows taught nothing: they have no answer "
            f"in the first {tokens} tokens, or over {tiles} image tiles; give longer --buckets "
            "(python -m train.prepare --target shows what fits) or show fewer images"
        )


def iterate(
    rows: ConversationBatches, steps: int, read: Any = None, limit: float = 1.0
) -> CountedBatches[Any]:
    """Return an iterator over the batches of `steps` steps, which makes `AHEAD` of them ahead.

    Args:
      read: Function of the step that makes the batches from these rows; None takes the rows.
      limit: Share of rows that may teach nothing.
    """
    make = read or rows
    dataset = grain.MapDataset.range(steps).map(lambda step: (make(step), rows.unlearned(step)))
    threads = min(AHEAD, os.cpu_count() or 1)  # decoding an image releases Python's lock
    batches = dataset.to_iter_dataset(grain.ReadOptions(threads, prefetch_buffer_size=AHEAD))
    return CountedBatches(iter(batches), rows, limit)
