"""Write the results of a measurement: `results.json`, `records.jsonl`, `table.md`, and the
terminal; and `prompts.jsonl` of the prompts that each model read.

A `Run` writes into `OUT.unfinished`; when it ends, its files replace those in OUT together. If the
script calls `restore`, the same command continues a stopped run from `OUT.unfinished`.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.lib.output.plotting import TITLES
from eval.lib.output.provenance import deciding_options, describe_run, input_signatures
from eval.lib.output.tables import Record, Table, failures, markdown, show
from jaxspec.cluster import on_first, process
from jaxspec.errors import InputError, reading
from jaxspec.files import (
    check_directory,
    forget_trial,
    is_trial,
    sole,
    trial_of,
    whole_directory,
    write_text,
    writing,
)

PART = ("dataset", "turn", "follow_up", "gamma", "pairing")
"""Fields that rows measured by turns share; they are saved together, and measured again together if
one of them failed."""
PROMPTS = "prompts.jsonl"
KEPT = "kept"
"""Folder of the values of a part that is being measured."""
FILES = (
    *("results.json", "records.jsonl", PROMPTS, "table.md", "report.html", "summary.csv"),
    "*-temperature-*.jsonl",
    *(f"{name}.{kind}" for name in TITLES for kind in ("png", "svg")),
)
"""Files of a run, which the next run with the same options replaces."""


class Run:
    """Hold a measurement in progress: its rows and records, and the `folder` of its files.

    As a context manager it keeps other runs from writing into `out`. At the end of the block it
    replaces the files there and prints the tables. In a cluster process 0 writes; the other
    processes get a temporary `folder`.

    Args:
      timed: Kind of the times in the tables, such as "the median of 3 runs"; a note below each
        table shows it with the machine's load.
    """

    def __init__(self, preset: str, options: Mapping[str, Any], out: Path, timed: str = "") -> None:
        self.preset, self.options, self.out, self.timed = preset, options, out, timed
        self.rows: list[Record] = []
        self.records: list[Record] = []
        self.failed: list[Record] = []
        """Measurements that failed, each with its `error`; the run then ends with exit code 1."""
        self.prompts: dict[str, None] = {}
        """Lines of `prompts.jsonl`; a line that a part repeats is written once."""
        self.about: Record = {}
        self.tables: Sequence[Table] = ()
        self._open = ExitStack()
        self.folder = on_first(lambda: begin(out, options))
        if process()[0] > 0:
            self.folder = Path(self._open.enter_context(tempfile.TemporaryDirectory()))

    def add(
        self,
        rows: Sequence[Record],
        records: Sequence[Record] = (),
        failed: Sequence[Record] = (),
        prompts: Sequence[Record] = (),
    ) -> None:
        """Add measurements, which the next `write` writes."""
        self.rows += rows
        self.records += records
        self.failed += failed
        self.prompts |= dict.fromkeys(json.dumps(prompt) + "\n" for prompt in prompts)

    def collect(
        self, parts: Iterable[Sequence[Sequence[Record]]], tables: Callable[[], Sequence[Table]]
    ) -> None:
        """Add each part (arguments of `add`) as it is measured, and write the tables."""
        for part in parts:
            self.add(*part)
            self.write(*tables())
        self.write(*tables())

    def write(self, *tables: Table) -> None:
        """Write all measurements so far, so that a stopped run keeps its finished parts."""
        self.about = self.about or describe_run(self.preset, self.options)
        self.about["load"] = os.getloadavg()[0]
        if self.timed:
            load = f"load {self.about['load']:.1f} on {os.cpu_count()} processors"
            times = f"Times are {self.timed}; {load}."
            tables = tuple(table._replace(notes=[*table.notes, times]) for table in tables)
        self.tables = tables
        about = self.about | ({"failed": self.failed} if self.failed else {})
        text = "\n".join(map(markdown, tables))
        on_first(lambda: self._write_files(about, text))

    def _write_files(self, about: Record, text: str) -> None:
        # Prompts come first, as their parts count as measured once the rows are written.
        if self.prompts:
            write_text(self.folder / PROMPTS, "".join(self.prompts))
        write_results(self.folder, about, self.rows, self.records, text)
        shutil.rmtree(self.folder / KEPT, ignore_errors=True)

    def keep(self, key: Record, work: Callable[[], Any]) -> Any:
        """Return the work's JSON value; a run that is stopped before it writes more keeps it."""
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        file = self.folder / KEPT / f"{name}.json"

        def stored() -> list[Any]:
            with reading(f"{file}: cannot be read", "remove it"):
                return [json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []

        for value in on_first(stored):
            return value
        value = work()
        if not on_first((self.folder / "results.json").exists):
            self.write()  # by whose options and inputs the value is known again

        def write() -> None:
            file.parent.mkdir(exist_ok=True)
            write_text(file, json.dumps(value))

        on_first(write)
        return value

    def restore(self) -> None:
        """Read the measurements of a stopped run with the same options, without failed parts.

        Raises InputError for results of another device, whose speeds do not belong in one table,
        of models or data with other contents, and for files that cannot be read.
        """
        self.rows, self.records = on_first(self._restored)

    def _restored(self) -> tuple[list[Record], list[Record]]:
        """Return the rows and records of a stopped run; InputError for a run of something else."""
        self.about = describe_run(self.preset, self.options)
        self.about["inputs"] = input_signatures(self.options)
        if not (self.folder / "results.json").exists():
            return [], []
        stopped = read_results(self.folder, stopped=True)
        # Counts of two processors belong in one table; times do not.
        fields = ("device", "processor") if self.timed else ("device",)
        there, here = (
            ", ".join(str(run.get(field)) for field in fields)
            for run in (stopped["run"], self.about)
        )
        if there != here:
            raise InputError(
                f"{self.folder}: was measured on {there}, but this is {here}; continue there, give "
                "another --out, or remove it"
            )
        before = stopped["run"].get("inputs", {})
        for name, now in self.about["inputs"].items():
            # A model on the hub may have had no fingerprint before it was fetched.
            if before.get(name, now) != now:
                raise InputError(
                    f"{self.folder}: was measured with {name}, whose content is another now "
                    f"(fingerprint {before[name]}, now {now}); give another --out, or remove it"
                )

        def part(record: Record) -> tuple[Any, ...]:
            return tuple(record.get(field) for field in PART)

        if (file := self.folder / PROMPTS).exists():
            with reading(f"{file}: cannot be read", "remove it"):
                lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
                self.prompts = dict.fromkeys(lines)
        failed = set(map(part, stopped["run"].get("failed", ())))
        rows, records = (
            [record for record in stopped[kind] if part(record) not in failed]
            for kind in ("rows", "records")
        )
        if rows:
            done = f"{len(rows)} rows are measured already; measuring the rest"
            print(f"{self.folder}: {done}", file=sys.stderr)
        return rows, records

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


def progress(total: int, what: str, unit: str = "run", done: int = 0) -> tqdm:
    """Return a progress bar, which process 0 shows after a second."""
    hidden = process()[0] > 0
    return tqdm(total=total, desc=what, unit=unit, initial=done, delay=1, disable=hidden)


def by_rows(results: Mapping[str, Any]) -> str:
    """Return results as JSON with one row a line, so that a difference is one of rows.

    >>> print(by_rows({"run": {"seed": 0}, "rows": [{"row": "M"}, {"row": "T"}]}), end="")
    {"run": {"seed": 0},
    "rows": [
    {"row": "M"},
    {"row": "T"}
    ]}
    """

    def written(name: str, value: Any) -> str:
        if name == "rows":
            return '"rows": [\n' + ",\n".join(map(json.dumps, value)) + "\n]"
        return f"{json.dumps(name)}: {json.dumps(value)}"

    return "{" + ",\n".join(written(*entry) for entry in results.items()) + "}\n"


def results_folder(out: Path, preset: str, debug: bool) -> Path:
    """Return the folder of results: PRESET becomes the preset's name; trials go to runs/debug."""
    out = out.with_name(preset) if out.name == "PRESET" else out
    return trial_of(out) if debug else out


def begin(out: Path, options: Mapping[str, Any]) -> Path:
    """Make the folder that a run writes into until `finish`.

    Raises InputError if `out` cannot be written, or holds results of other options (a trial's
    results are replaced).
    """
    out = Path(os.path.abspath(out))
    fresh = out.with_name(f"{out.name}.unfinished")
    check_directory(out)
    for folder in (out, fresh):
        if is_trial(out) or not (folder / "results.json").exists():
            continue
        before = deciding_options(read_results(folder)["run"].get("options", {}))
        now = deciding_options(options)
        for name in now | before:  # another script's options have other names
            if before.get(name) != now.get(name):
                raise InputError(
                    f"{folder}: holds results of {name} {reprlib.repr(before.get(name))}, but now "
                    f"it is {reprlib.repr(now.get(name))}; give another --out, or remove it"
                )
    with writing(fresh):
        fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def finish(fresh: Path, out: Path) -> None:
    """Replace an earlier run's files by this run's in one step; other files in `out` stay."""
    with whole_directory(
        Path(os.path.abspath(out)), lambda name: any(fnmatch(name, file) for file in FILES)
    ) as folder:
        # A killed run leaves unfinished files.
        unfinished = shutil.ignore_patterns(".*.tmp")
        shutil.copytree(fresh, folder, dirs_exist_ok=True, ignore=unfinished)
    shutil.rmtree(fresh)


def write_results(
    out: Path, run: Record, rows: Sequence[Record], records: Sequence[Record], table: str
) -> None:
    """Write the three files, each whole or not at all, records before rows."""
    lines = [json.dumps(record) + "\n" for record in records]
    contents: Record = {"run": run, "rows": list(rows)}
    contents["records"] = {"count": len(lines), "sha256": _checksum("".join(lines))}
    contents["sha256"] = _checksum(json.dumps(contents))
    write_text(out / "table.md", table)
    write_text(out / "records.jsonl", "".join(lines))
    write_text(out / "results.json", by_rows(contents))


def read_results(folder: Path, stopped: bool = False) -> Record:
    """Return `run` and `rows` of an earlier run.

    Args:
      stopped: Also return the `records` of a stopped run that will continue, and check the
        checksums. A run that was killed between two files has written records that it has not
        counted; they are dropped.

    Raises InputError for a file that cannot be read.
    """
    file = folder / "results.json"
    with reading(f"{file}: cannot be read", "remove it"):
        contents = json.loads(file.read_text(encoding="utf-8"))
        checksum = contents.pop("sha256", None)
        if checksum != _checksum(json.dumps(contents)) and (stopped or checksum):
            raise ValueError("wrong checksum")
        stored = contents.get("records")
        contents = {"run": dict(contents["run"]), "rows": contents["rows"]}
    if not stopped:
        return contents
    file = folder / "records.jsonl"
    with reading(f"{file}: cannot be read", "remove it"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[: stored["count"]]
        if stored["sha256"] != _checksum("".join(lines)):
            raise ValueError("wrong checksum")
        return contents | {"records": [json.loads(line) for line in lines]}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
