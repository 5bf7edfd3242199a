"""Papers' numbers, shown next to ours of the same models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """Tokens a pass from one or more tables of a paper."""

    source: str
    """Names of the tables, for the line below ours."""
    settings: Mapping[str, Any]
    """The paper's values of `EvalConfig` fields; other configurations do not show its numbers."""
    numbers: Mapping[int, Mapping[str, Mapping[str, float]]]
    """Numbers by turn, row, and column: a set, or one of `EvalConfig.averages`."""

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
