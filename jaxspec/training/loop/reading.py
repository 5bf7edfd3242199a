"""Make batches of conversations ahead of their steps, and count the rows that teach nothing."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import jax

from jaxspec.errors import InputError
from jaxspec.training.conversations import GROUP, ConversationBatches
from jaxspec.training.loop.batches import made_ahead

AHEAD = 4
"""Batches that threads make ahead, after the one that is asked for."""
SURVEYED = 4 * GROUP
"""Maximum steps whose rows a survey reads."""
SURE = 512
"""Rows to read before the share that teaches nothing can end a run."""


class CountedBatches:
    """Make the batches of a stage, step after step, and count unlearned rows; closing it prints
    their share.

    Raises InputError once more than the share `limit` of the rows teach nothing, by three standard
    deviations of what chance gathers.

    Args:
      steps: Steps of the stage. Threads make the batches of the next ones meanwhile. A resumed
        stage begins at any step.
      make: Function of the step that makes the batches from these rows; None takes the rows.
    """

    def __init__(
        self,
        rows: ConversationBatches,
        steps: int,
        make: Callable[[int], Any] | None = None,
        limit: float = 1.0,
    ) -> None:
        self._rows, self._steps, self._make, self._limit = rows, steps, make or rows, limit
        self._ready: Generator[tuple[Any, int], None, None] | None = None
        self._lost = self._read = 0
        self._refused = False

    def __call__(self, step: int) -> Any:
        """Return the batch of a step; raise InputError once too many rows have taught nothing."""
        if self._ready is None:
            threads = min(AHEAD, os.cpu_count() or 1)  # decoding images releases Python's lock
            steps = range(step, self._steps)
            self._ready = made_ahead(self._counted, steps, AHEAD, threads)
        batch, lost = next(self._ready)
        self._lost += lost
        self._read += self._rows.batch
        expected = self._limit * self._read
        most = expected + 3 * math.sqrt(expected * (1 - self._limit))
        if self._read >= SURE and self._lost > most:
            self._refused = True
            mend = f"or let more than {self._limit:.0%} be with --unlearned"
            raise InputError(f"{self._report()}; {mend}")
        return batch

    def _counted(self, step: int) -> tuple[Any, int]:
        return self._make(step), self._rows.unlearned(step)

    def survey(self) -> tuple[float, str]:
        """Read the texts of the first steps' rows; return the mean slots of a step, with padding.

        Also return a line: the share of rows that teach, and the shares of slots that hold a token
        as the rows are laid out, and as they would be with packing, or without it.
        """
        rows, count = self._rows, min(self._steps, SURVEYED)

        def slots_of(rows: ConversationBatches) -> tuple[float, float]:
            filled, slots = zip(*map(rows.filled, range(count)), strict=True)
            return sum(slots) / count, sum(filled) / sum(slots)

        _, otherwise = slots_of(replace(rows, packing=not rows.packing))
        slots, filled = slots_of(rows)
        read, lost = count * rows.batch, sum(map(rows.unlearned, range(count)))
        return slots, (
            f"of {read:,} samples {1 - lost / read:.1%} teach, and {filled:.1%} of the slots are "
            f"filled ({otherwise:.1%} {'without' if rows.packing else 'with'} packing)"
        )

    def close(self) -> None:
        """Print how many rows taught nothing, and the mend."""
        if self._ready is not None:
            self._ready.close()
        if self._lost and not self._refused and not jax.process_index():
            print(self._report(), file=sys.stderr)

    def _report(self) -> str:
        tokens, tiles = max(self._rows.buckets), max(self._rows.tile_buckets)
        return (
            f"data: {self._lost / self._read:.1%} of the rows taught nothing: they have no answer "
            f"in the first {tokens} tokens, or over {tiles} image tiles; give longer --buckets "
            "(python -m train.prepare --target shows what fits) or show fewer images"
        )
