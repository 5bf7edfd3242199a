"""Show papers' numbers next to ours of the same models and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxspec.checkpoints.locating import hub_id

UNCHANGED = {"adapter": None, "target_weights": None, "width": None, "limit": 100}
"""Values of fields that every paper's lines need, where its settings name no other."""


@dataclass(frozen=True)
class Published:
    """Hold numbers from one or more tables of a paper, and what they are of."""

    source: str
    """Names of the tables, for the line below ours."""
    settings: Mapping[str, Any]
    """The paper's values of the configuration's fields; other configurations do not show its
    numbers."""
    numbers: Mapping[int, Mapping[str, Mapping[str, float]]]
    """Numbers by turn, row, and column: a set, or one of `EvalConfig.averages`."""
    rows: tuple[Any, ...] = ()
    """The rows or pairings of the paper; others of the same names do not show its numbers."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Where the recipes leave the models that rows bring along, by row; others do not show its
    numbers."""
    suffix: str = "paper"
    """What follows the name of our row in the name of the paper's."""

    @property
    def columns(self) -> set[str]:
        """Return the names of all columns."""
        lines = (line for rows in self.numbers.values() for line in rows.values())
        return {column for line in lines for column in line}

    def is_of(self, config: Any) -> bool:
        """Return whether the configuration has all the settings, with sets in any order.

        The revision of a model may be any, as the papers name none.
        """
        unchanged = {n: v for n, v in UNCHANGED.items() if hasattr(config, n)}
        return all(
            _unordered(_unpinned(getattr(config, name))) == _unordered(value)
            for name, value in (unchanged | dict(self.settings)).items()
        )


def papers_of(config: Any, published: Sequence[Published]) -> list[Published]:
    """Return the numbers that hold for this configuration."""
    return [paper for paper in published if paper.is_of(config)]


def sources(config: Any, papers: Sequence[Published]) -> list[str]:
    """Return the notes below a table that shows these papers' numbers."""
    copies = f"read from {', '.join(config.data)}" if config.data else ""
    return [
        *dict.fromkeys(f"paper: {paper.source}." for paper in papers),
        *([f"Taken for the paper's sets: {copies}."] if papers and copies else []),
    ]


def _unpinned(value: Any) -> Any:
    """Return a value without the revisions of its hub ids."""
    if isinstance(value, tuple):
        return tuple(map(_unpinned, value))
    parts = hub_id(value) if isinstance(value, str) else None
    return parts[0] if parts else value


def _unordered(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def read_numbers(text: str) -> dict[str, dict[str, float]]:
    """Return the numbers of a text table, by row and column; `-` is no number.

    >>> read_numbers('''row        pope  avg
    ...                 MT static  2.47  -''')
    {'MT static': {'pope': 2.47}}
    """
    header, *lines = text.strip().splitlines()
    columns = header.split()[1:]
    rows = {}
    for line in lines:
        name, *cells = line.strip().rsplit(maxsplit=len(columns))
        rows[name] = {
            column: float(cell) for column, cell in zip(columns, cells, strict=True) if cell != "-"
        }
    return rows
