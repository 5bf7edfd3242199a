"""Papers' numbers, shown next to ours of the same models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """Tokens a pass as one or more tables of a paper print them."""

    source: str
    """The tables, for the line below ours."""
    settings: Mapping[str, Any]
    """Fields of `EvalConfig` and what the paper has there: elsewhere its numbers are not shown."""
    numbers: Mapping[int, Mapping[str, Mapping[str, float]]]
    """By turn, row, and column: the name of a set or of one of `EvalConfig.averages`."""

    def is_of(self, config: Any) -> bool:
        """Return whether the configuration has all the settings, with sets in any order."""
        return all(
            _unordered(getattr(config, name)) == _unordered(value)
            for name, value in self.settings.items()
        )


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
