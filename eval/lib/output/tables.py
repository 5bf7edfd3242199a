"""Print tables as Markdown and in the terminal, and pivot rows of results into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table as Lines

from jaxspec.errors import InputError, reading
from jaxspec.files import write_text

Record = dict[str, Any]
Label = tuple[str, ...]
Line = TypeVar("Line")
Item = TypeVar("Item")
Key = TypeVar("Key")


class Table(NamedTuple):
    """Hold a table with numbers as text."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def pivot(
    title: str,
    labels: Sequence[str],
    lines: Iterable[tuple[Label, Line]],
    columns: Mapping[str, Callable[[Line], str]],
    printed: Callable[[Label], Iterable[tuple[Label, Mapping[str, float]]]] = lambda label: (),
    notes: Sequence[str] = (),
) -> Table:
    """Return a table of results, with the papers' numbers below our lines.

    Args:
      title: Heading of the table.
      labels: Names of the first columns, which identify a line.
      lines: Label of each line, and its row or rows of results.
      columns: The other columns by name, each a function of a line's row or rows.
      printed: Papers' lines to show below ours: a label, and numbers by column.
      notes: Sentences below the table.

    With labels ("set", "draft") and the column "tau" a line is `| pope | KV head | 2.72 |`.
    """
    cells = []
    for label, line in lines:
        cells.append([*label, *(column(line) for column in columns.values())])
        for names, numbers in printed(label):
            cells.append([*names, *(number(numbers.get(column)) for column in columns)])
    return Table(title, [*labels, *columns], cells, notes)


def without_failed(rows: Sequence[Record], failed: Sequence[Record], *fields: str) -> list[Record]:
    """Return the rows that do not share these fields, such as "dataset", "row", with a failure."""
    lost = {tuple(record[field] for field in fields) for record in failed}
    return [row for row in rows if tuple(row[field] for field in fields) not in lost]


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by key; keys, and the items of each, keep their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def has(rows: Sequence[Record], **fields: Any) -> bool:
    """Return whether one of the rows has these fields."""
    return any(fields.items() <= row.items() for row in rows)


def number(value: float | None, places: int = 2) -> str:
    """Return a cell of a table; `-` for None."""
    return "-" if value is None else f"{value:.{places}f}"


def digits(value: float | None, count: int = 3) -> str:
    """Return a cell with so many significant digits; `-` for None."""
    return "-" if value is None else f"{value:.{count}g}"


def percent(share: float | None, places: int = 0) -> str:
    """Return a share as a cell of a table; `-` for None."""
    return "-" if share is None else f"{100 * share:.{places}f}%"


def cell(field: str, form: Callable[..., str] = str, *places: int) -> Callable[[Record], str]:
    """Return the column that shows a field of a line's row: `cell("nats", number, 3)`."""
    return lambda row: form(row[field], *places)


def mean(rows: Sequence[Record], field: str) -> float | None:
    """Return the mean of a field over the rows that have it; None if no row has it."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return sum(values) / len(values) if values else None


def mean_over(rows: Sequence[Record], sets: Sequence[str], field: str) -> float | None:
    """Return the mean of a field over sets, each the mean of its rows; None if a set is missing."""
    means = [mean([row for row in rows if row["dataset"] == name], field) for name in sets]
    measured = [each for each in means if each is not None]
    return sum(measured) / len(measured) if measured and len(measured) == len(means) else None


def sample_counts(rows: Sequence[Record]) -> str:
    """Return how many samples the rows have: `40`, or the least and the most: `26 to 40`."""
    counts = [row["samples"] for row in rows] or [0]
    return " to ".join(map(str, sorted({min(counts), max(counts)})))


def answer_lengths(rows: Sequence[Record], sets: Sequence[str]) -> list[str]:
    """Return the sentence of the mean length of answers, by set and turn; none without lengths."""
    lengths: dict[int, list[str]] = {}
    for turn in dict.fromkeys(row["turn"] for row in rows if "mean_new_tokens" in row):
        for name in sets:
            part = [row for row in rows if (row["dataset"], row.get("turn")) == (name, turn)]
            if (length := mean(part, "mean_new_tokens")) is not None:
                lengths.setdefault(turn, []).append(f"{name} {length:.0f}")
    means = "; ".join(f"turn {turn}: {', '.join(names)}" for turn, names in lengths.items())
    return [f"Mean new tokens of an answer, {means}."] if means else []


def failures(failed: Sequence[Record]) -> list[str]:
    """Return a line for each failed row of the table: its sets, and its first error."""
    places: dict[str, list[str]] = {}
    for record in failed:
        places.setdefault(record["row"], []).append(f"{record['dataset']} (turn {record['turn']})")
    errors = {record["row"]: record["error"] for record in reversed(failed)}
    return [
        f"{row} failed on {', '.join(dict.fromkeys(where))}: {errors[row]}"
        for row, where in places.items()
    ]


def put_between(page: Path, name: str, content: str) -> None:
    """Replace the text between a page's markers of this name; InputError without markers."""
    between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    with reading(f"page {page}: cannot be read", "give one with the markers"):
        before = page.read_text(encoding="utf-8")
    text, count = between.subn(lambda match: f"{match[1]}\n{content}\n\n{match[2]}", before)
    if count != 1:
        raise InputError(
            f"{page}: {count} pairs of markers <!-- {name}: --> ... <!-- /{name} -->; put in one"
        )
    write_text(page, text)


def markdown(table: Table) -> str:
    """Return a Markdown table under a heading, numbers right-aligned."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"

    lines = [f"# {_one_line(table.title)}", "", line(table.header)]
    lines += ["|---|" + "---:|" * (len(table.header) - 1), *map(line, table.cells)]
    return "\n".join([*lines, "", *map(_one_line, table.notes)]) + "\n"


def parse_markdown(text: str) -> list[Table]:
    """Return the tables of a text, as `markdown` writes them; several may be below one title."""
    tables: list[Table] = []
    title = ""
    for before, line in pairwise(["", *text.splitlines()]):
        if line.startswith("# "):
            title = line.removeprefix("# ")
        elif line.startswith("|---"):
            tables.append(Table(title, _cells(before), [], []))
        elif line.startswith("|") and before.startswith("|"):
            tables[-1] = tables[-1]._replace(cells=[*tables[-1].cells, _cells(line)])
        elif line and not line.startswith("|") and tables and tables[-1].title == title:
            tables[-1] = tables[-1]._replace(notes=[*tables[-1].notes, line])
    return tables


def _cells(line: str) -> list[str]:
    """Return the cells of a line of Markdown."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _one_line(text: str) -> str:
    """Return a text without line ends, which names may hold and which end a table."""
    return " ".join(text.splitlines())


def show(table: Table) -> None:
    """Print the table; transpose or split it if the terminal is narrow."""
    console = Console(markup=False, emoji=False)  # names of rows may hold brackets
    rows = [table.header, *table.cells]
    columns = list(zip(*rows, strict=True))
    if _width(columns) > console.width >= _width(rows):
        rows, columns = columns, rows
    names = 1  # the number of first columns that identify a row; each part repeats them
    while names < len(columns) and len({tuple(row[:names]) for row in rows}) < len(rows):
        names += 1
    parts = [columns[:names]]
    for column in columns[names:]:
        if len(parts[-1]) > names and _width([*parts[-1], column]) > console.width:
            parts.append(columns[:names])
        parts[-1] = [*parts[-1], column]
    for i, part in enumerate(parts):
        lines = Lines(title=None if i else table.title, title_justify="left")
        for j, (name, *_) in enumerate(part):
            lines.add_column(name, justify="right" if j else "left", no_wrap=True)
        for row in zip(*(cells[1:] for cells in part), strict=True):
            lines.add_row(*row)
        console.print(lines)
    for note in table.notes:
        console.print(note)


def _width(columns: Sequence[Sequence[str]]) -> int:
    """Return the width in characters of a table with these columns."""
    return sum(max(map(len, column)) + 3 for column in columns) + 1
