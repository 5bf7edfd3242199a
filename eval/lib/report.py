"""Records on disk and tables for people: `results.json`, `records.jsonl`, `table.md`, and the terminal.

A `Run` writes into `OUT.unfinished`, and at its end all its files take the place of those in OUT. One that was stopped
goes on from there, where its script asks for what is left by `restore`.
"""

from __future__ import annotations

import json
import os
import platform
import re
import reprlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table as Lines

from jaxspec.cluster import on_first, process
from jaxspec.errors import InputError
from jaxspec.files import (
    ASSETS,
    check_directory,
    forget_trial,
    is_trial,
    sole,
    trial_of,
    whole_directory,
    write_text,
    writing,
)

PACKAGES = ("jaxspec", "jax", "jaxlib", "flax", "transformers", "numpy")
FILES = (
    *(
        "results.json",
        "records.jsonl",
        "table.md",
        "report.html",
        "summary.csv",
        "*-temperature-*.jsonl",
    ),
    *(
        "block_efficiency.png",
        "acceptance_by_position.png",
        "stage_times.png",
        "weight_trajectory.png",
        "overlap.png",
    ),
    *("accepted_over_time.png", "sweep.png"),
)
"""What runs write, and what the next one with the same options replaces."""
Record = dict[str, Any]


class Table(NamedTuple):
    """A table as it is shown: numbers are text."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


class Run:
    """A measurement that is being made: rows and records so far, and `folder`, where its files lie until its end.

    As a context manager: no other run writes into `out` then; at the end of the block the files take the place of
    those there, and the tables are shown. Of several processes the first writes; what others put into their `folder`
    is thrown away.
    """

    def __init__(self, preset: str, options: Mapping[str, Any], out: Path) -> None:
        self.preset, self.options, self.out = preset, options, out
        self.rows: list[Record] = []
        self.records: list[Record] = []
        self.failed: list[Record] = []
        """What could not be measured, each with its `error`; the run ends with exit code 1 then."""
        self.about: Record = {}
        self.tables: Sequence[Table] = ()
        self._open = ExitStack()
        begun = on_first(lambda: begin(out, options))
        self.folder = (
            begun
            if process()[0] == 0
            else Path(self._open.enter_context(tempfile.TemporaryDirectory()))
        )

    def add(
        self, rows: Sequence[Record], records: Sequence[Record], failed: Sequence[Record] = ()
    ) -> None:
        """Add what was measured, to be written next."""
        self.rows += rows
        self.records += records
        self.failed += failed

    def write(self, *tables: Table, **about: Any) -> None:
        """Write what there is; called for each part that is done, so that a run that is stopped keeps whole ones."""
        self.about = self.about or describe_run(self.preset, self.options)
        self.tables = tables
        about |= {"failed": self.failed} if self.failed else {}
        text = "\n".join(map(markdown, tables))
        on_first(
            lambda: write_results(self.folder, self.about | about, self.rows, self.records, text)
        )

    def restore(self, group: Sequence[str]) -> None:
        """Take up the rows and records that a stopped run of the same options has left; one line tells of it.

        Rows are written in groups, those that are equal in the fields `group`. One in which something failed is left
        out, to be measured again.

        Raises InputError where they were measured on another device: speeds of two have no place in one table.
        """
        self.rows = on_first(lambda: self._restored(group))

    def _restored(self, group: Sequence[str]) -> list[Record]:
        if not (self.folder / "results.json").exists():
            return []
        left = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))
        self.about = describe_run(self.preset, self.options)
        if left["run"]["device"] != self.about["device"]:
            there = f"was measured on {left['run']['device']}, and this is {self.about['device']}"
            raise InputError(
                f"{self.folder}: {there}; go on there, give another --out, or remove it"
            )

        def place(row: Record) -> tuple[Any, ...]:
            return tuple(row.get(field) for field in group)

        failed = set(map(place, left["run"].get("failed", ())))
        rows = [row for row in left["rows"] if place(row) not in failed]
        whole = set(map(place, rows))
        lines = (self.folder / "records.jsonl").read_text(encoding="utf-8").splitlines()
        self.records = [record for record in map(json.loads, lines) if place(record) in whole]
        if whole:
            print(
                f"{self.folder}: {len(whole)} parts are measured already; goes on with the rest",
                file=sys.stderr,
            )
        return rows

    def __enter__(self) -> Run:
        on_first(self._begin)
        return self

    def _begin(self) -> None:
        self._open.enter_context(sole(Path(f"{os.path.abspath(self.out)}.lock")))
        forget_trial(self.out)
        self.folder.mkdir(parents=True, exist_ok=True)

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                if self.failed and not self.rows:
                    raise InputError(f"nothing could be measured; {failures(self.failed)[0]}")
                on_first(self._finish)
        finally:
            self._open.close()
        if kind is None and self.failed:
            print(f"{len(self.failed)} of the cells could not be measured", file=sys.stderr)
            sys.exit(1)

    def _finish(self) -> None:
        names = sorted(file.name for file in self.folder.iterdir() if not file.name.startswith("."))
        finish(self.folder, self.out)
        for table in self.tables:
            show(table)
        print(f"wrote {', '.join(names)} to {self.out}", file=sys.stderr)


def describe_run(preset: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return where and with what a measurement was made."""
    device = jax.devices()[0]
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "preset": preset,
        "options": _deciding(options),
        "device": f"{device.device_kind} ({device.platform})",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git": _git(),
    }


def results_folder(out: Path, preset: str, debug: bool) -> Path:
    """Return where the results of a preset go: into a folder of its name where `out` ends in PRESET, as defaults do; a
    trial's under runs/debug."""
    out = out.with_name(preset) if out.name == "PRESET" else out
    return trial_of(out) if debug else out


def begin(out: Path, options: Mapping[str, Any]) -> Path:
    """Make the folder for a run to write into until `finish`; one that is stopped leaves there what it has measured.

    Raises InputError where `out` cannot be written, or holds the results of other options and is no trial's.
    """
    out = Path(os.path.abspath(out))
    fresh = out.with_name(f"{out.name}.unfinished")
    check_directory(out)
    for folder in (out, fresh):
        if is_trial(out) or not (folder / "results.json").exists():
            continue
        theirs = _options(folder / "results.json")
        for name, mine in _deciding(options).items():
            if theirs.get(name) != mine:
                told = (
                    f"{name} {reprlib.repr(theirs.get(name))}, and now it is {reprlib.repr(mine)}"
                )
                raise InputError(
                    f"{folder}: holds results of {told}; give another --out, or remove it"
                )
    with writing(fresh):
        fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def finish(fresh: Path, out: Path) -> None:
    """Put all files of the run in the place of an earlier one's, in one step; what else lies in `out` stays."""
    with whole_directory(
        Path(os.path.abspath(out)), lambda name: any(fnmatch(name, file) for file in FILES)
    ) as place:
        shutil.copytree(
            fresh, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*.tmp")
        )  # a kill's halves
    shutil.rmtree(fresh)


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what decides the results, as JSON has it: all but where they are written, and what stands beside them.

    Places of what this checkout ships begin at its root, wherever it lies.
    """
    told = json.dumps(
        dict(options), default=lambda value: vars(value) if is_dataclass(value) else str(value)
    )
    told = told.replace(f"{ASSETS.parents[1]}/", "")
    return {
        name: value
        for name, value in json.loads(told).items()
        if name not in ("out", "published", "cluster")
    }


def _options(file: Path) -> dict[str, Any]:
    """Return the options of an earlier run; none where it does not say."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))["run"]["options"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_results(
    out: Path, run: Record, rows: Sequence[Record], records: Sequence[Record], table: str
) -> None:
    """Write the three files, each of them whole or not at all; the rows last, so that each has its records."""
    write_text(out / "table.md", table)
    write_text(out / "records.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    write_text(out / "results.json", json.dumps({"run": run, "rows": list(rows)}, indent=1) + "\n")


def number(value: float | None, places: int = 2) -> str:
    """Return a cell of a table; `-` where there is nothing."""
    return "-" if value is None else f"{value:.{places}f}"


def percent(share: float | None, places: int = 0) -> str:
    """Return a share as a cell of a table; `-` where there is nothing."""
    return "-" if share is None else f"{100 * share:.{places}f}%"


def mean(rows: Sequence[Record], field: str) -> float | None:
    """Return the mean of a field over the rows that have it; None where none has."""
    values = [row[field] for row in rows if row.get(field) is not None]
    return sum(values) / len(values) if values else None


def failures(failed: Sequence[Record]) -> list[str]:
    """Return a line for each row of the table that failed: where, and its first error."""
    places: dict[str, list[str]] = {}
    for record in failed:
        places.setdefault(record["row"], []).append(f"{record['dataset']} (turn {record['turn']})")
    errors = {record["row"]: record["error"] for record in reversed(failed)}
    return [
        f"{row} failed on {', '.join(dict.fromkeys(where))}: {errors[row]}"
        for row, where in places.items()
    ]


def put_between(page: Path, name: str, made: str) -> None:
    """Replace what stands between the markers of this name in a page. Raises InputError where it has none."""
    between = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    text, count = between.subn(
        lambda found: f"{found[1]}\n{made}\n\n{found[2]}", page.read_text(encoding="utf-8")
    )
    if count != 1:
        raise InputError(
            f"{page}: {count} pairs of markers <!-- {name}: --> ... <!-- /{name} -->; put in one"
        )
    write_text(page, text)


def markdown(table: Table) -> str:
    """Return a Markdown table under a heading, numbers right-aligned."""
    lines = [f"# {table.title}", "", "| " + " | ".join(table.header) + " |"]
    lines += [
        "|---|" + "---:|" * (len(table.header) - 1),
        *("| " + " | ".join(row) + " |" for row in table.cells),
    ]
    return "\n".join([*lines, "", *table.notes]) + "\n"


def show(table: Table) -> None:
    """Print the table; where the terminal is too narrow, on its side, or else in parts."""
    console = Console()
    rows = [table.header, *table.cells]
    columns = list(zip(*rows, strict=True))
    if _width(columns) > console.width >= _width(rows):
        rows, columns = columns, rows
    names = 1  # so many of the first columns tell the rows apart, and stand in each part
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
    """Return the characters that a table of these columns takes."""
    return sum(max(map(len, column)) + 3 for column in columns) + 1


def _processor() -> str:
    """Return the CPU's name; where Linux tells, with the family and model, as virtual machines give it a vague one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    names = {"model name": "", "cpu family": "family ", "model": "model "}
    return (
        ", ".join(f"{word}{told[name]}" for name, word in names.items() if name in told)
        or platform.machine()
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> str | None:
    """Return the commit of the working tree, marked when it has changes; None outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
