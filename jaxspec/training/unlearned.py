"""Rows of which nothing is learned: each is counted once, and all are told when a run ends."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from jaxspec.training.batches import Batch


class Unlearned(NamedTuple):
    """A row without an answer within the buckets, or with more image units than theirs."""

    dataset: str
    id: str
    tokens: int
    """That it takes for the first token of an answer to be within them."""
    units: int


@dataclass
class CountedBatches:
    """An iterator over the batches that `made` pairs with their unlearned rows; closing it tells of these."""

    made: Any
    limits: tuple[int, int]
    """Tokens and image units of the largest buckets."""
    batch: int
    """Rows of a step, over all processes."""
    _seen: set[Unlearned] = field(default_factory=set)
    _rows: int = 0
    _lost: int = 0

    def __next__(self) -> Batch:
        batch, lost = next(self.made)
        self._seen.update(Unlearned(*row) for row in lost)
        self._rows += self.batch
        self._lost += len(lost)
        return batch

    def get_state(self) -> Any:
        return self.made.get_state()

    def set_state(self, state: Any) -> None:
        self.made.set_state(state)

    def close(self) -> None:
        if self._seen and jax.process_index() == 0:
            print(told(self._seen, self.limits, self._lost / self._rows), file=sys.stderr)


def told(rows: Iterable[Unlearned], limits: tuple[int, int], share: float) -> str:
    """The line that says how many rows taught nothing, and what would mend it."""
    tokens, units = limits
    large = [row for row in rows if row.units > units]
    late = [row for row in rows if row.units <= units]
    reasons = []
    if late:
        reasons.append(
            f"{len(late):,} without an answer in the first {tokens} tokens (the first {max(r.tokens for r in late)} "
            "would do: give longer --buckets; python -m train.prepare --target tells what fits)"
        )
    if large:
        most = max(row.units for row in large)
        reasons.append(f"{len(large):,} with over {units} image units (up to {most}: show fewer images)")
    names = ", ".join(sorted({row.dataset for row in rows}))
    return f"rows of {names} that taught nothing, {share:.1%} of what was read: {'; '.join(reasons)}"
