"""Results of a measurement: `results.json`, `records.jsonl`, `table.md`, and the terminal.

A `Run` writes into `OUT.unfinished`; when it ends, its files replace those in OUT together. If the
script calls `restore`, the same command continues a stopped run from `OUT.unfinished`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import reprlib
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import jaxspec
from eval.lib.figures import TITLES
from eval.lib.tables import Record, Table, failures, markdown, show
from jaxspec.cluster import on_first, process
from jaxspec.errors import InputError, reading
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
from jaxspec.training.signatures import file_signature

PART = ("dataset", "turn", "follow_up", "gamma", "pairing")
"""Fields that rows measured by turns share; they are saved together, and measured again together if
one of them failed."""
PACKAGES = ("jax", "jaxlib", "flax", "transformers", "numpy")
INPUTS = (
    *("target", "draft", "kv_head", "adapter", "captioner", "captioners", "models", "tokenizer"),
    *("drafts", "heads", "baselines", "data", "shots", "images"),
)
"""Options that name models and data: ids, paths, and NAME=PATH, KIND:PATH or PATH:VIEW."""
FILES = (
    *("results.json", "records.jsonl", "table.md", "report.html", "summary.csv"),
    "*-temperature-*.jsonl",
    *(f"{name}.png" for name in (*TITLES, "sweep")),
)
"""Files of a run, which the next run with the same options replaces."""


class Run:
    """A measurement in progress: its rows and records, and the `folder` of its files.

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
        self,
        rows: Sequence[Record],
        records: Sequence[Record] = (),
        failed: Sequence[Record] = (),
    ) -> None:
        """Add measurements, which the next `write` writes."""
        self.rows += rows
        self.records += records
        self.failed += failed

    def collect(
        self, parts: Iterable[Sequence[Sequence[Record]]], tables: Callable[[], Sequence[Table]]
    ) -> None:
        """Add each part (rows, records, failures) as it is measured, and write the tables."""
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
        on_first(lambda: write_results(self.folder, about, self.rows, self.records, text))

    def restore(self) -> None:
        """Read the measurements of a stopped run with the same options, without failed parts.

        Raises InputError for results of another device, whose speeds do not belong in one table,
        of models or data with other contents, and for files that cannot be read.
        """
        self.rows = on_first(self._restored)

    def _restored(self) -> list[Record]:
        self.about = describe_run(self.preset, self.options)
        self.about["inputs"] = input_signatures(self.options)
        if not (self.folder / "results.json").exists():
            return []
        left = read_results(self.folder, stopped=True)
        there, here = left["run"]["device"], self.about["device"]
        if there != here:
            raise InputError(
                f"{self.folder}: was measured on {there}, and this is {here}; continue there, give "
                "another --out, or remove it"
            )
        before = left["run"].get("inputs", {})
        for name, now in self.about["inputs"].items():
            # A model on the hub may have had no fingerprint before it was fetched.
            if before.get(name, now) != now:
                raise InputError(
                    f"{self.folder}: was measured with {name}, whose content is another now "
                    f"(fingerprint {before[name]}, now {now}); give another --out, or remove it"
                )

        def part(record: Record) -> tuple[Any, ...]:
            return tuple(record.get(field) for field in PART)

        failed = set(map(part, left["run"].get("failed", ())))
        rows, self.records = (
            [record for record in left[kind] if part(record) not in failed]
            for kind in ("rows", "records")
        )
        if rows:
            print(
                f"{self.folder}: {len(rows)} rows are measured already; measuring the rest",
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


def progress(total: int, what: str, unit: str = "run", done: int = 0) -> tqdm:
    """Return a progress bar, which process 0 shows after a second."""
    hidden = process()[0] > 0
    return tqdm(total=total, desc=what, unit=unit, initial=done, delay=1, disable=hidden)


def describe_run(preset: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the device, versions and options of a measurement."""
    device = jax.devices()[0]
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "preset": preset,
        "options": _deciding(options),
        "device": f"{device.device_kind} ({device.platform})",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {"jaxspec": jaxspec.__version__} | {name: version(name) for name in PACKAGES},
        "git": _git(),
    }


def input_signatures(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of the models and data that options name, by those names."""
    signatures = {}
    # Dataclasses inside, such as pairings, have options of their own.
    for name, value in _as_json(options).items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                signatures |= input_signatures(part)
            elif name in INPUTS and isinstance(part, str) and (path := _path_in(part)):
                shipped = part.replace(f"{ASSETS.parents[1]}/", "")
                signatures[f"{name} {shipped}"] = file_signature(path)
    return signatures


def _path_in(text: str) -> Path | None:
    """Return the file or folder that an option names, or the cached copy of a model on the hub."""
    ends = [text[found.end() :] for found in re.finditer("^|[=:]", text)]
    for place in (*ends, *(end.rpartition(":")[0] for end in ends)):
        if place and os.path.exists(Path(place).expanduser()):
            return Path(place).expanduser()
        if re.fullmatch(r"\w[\w.-]*/[\w.-]+", place):
            from huggingface_hub import try_to_load_from_cache

            if isinstance(file := try_to_load_from_cache(place, "config.json"), str):
                return Path(file).parent
    return None


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
        theirs = read_results(folder)["run"].get("options", {})
        for name, mine in _deciding(options).items():
            if theirs.get(name) != mine:
                raise InputError(
                    f"{folder}: holds results of {name} {reprlib.repr(theirs.get(name))}, and now "
                    f"it is {reprlib.repr(mine)}; give another --out, or remove it"
                )
    with writing(fresh):
        fresh.mkdir(parents=True, exist_ok=True)
    return fresh


def finish(fresh: Path, out: Path) -> None:
    """Replace an earlier run's files by this run's in one step; other files in `out` stay."""
    with whole_directory(
        Path(os.path.abspath(out)), lambda name: any(fnmatch(name, file) for file in FILES)
    ) as place:
        # A killed run leaves unfinished files.
        unfinished = shutil.ignore_patterns(".*.tmp")
        shutil.copytree(fresh, place, dirs_exist_ok=True, ignore=unfinished)
    shutil.rmtree(fresh)


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that decide the results, with shipped files relative to the checkout."""
    text = json.dumps(_as_json(options)).replace(f"{ASSETS.parents[1]}/", "")
    deciding = json.loads(text)
    return {
        name: deciding[name] for name in deciding if name not in ("out", "published", "cluster")
    }


def _as_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as they are read back from JSON."""
    text = json.dumps(
        dict(options), default=lambda value: vars(value) if is_dataclass(value) else str(value)
    )
    return json.loads(text)


def write_results(
    out: Path, run: Record, rows: Sequence[Record], records: Sequence[Record], table: str
) -> None:
    """Write the three files, each whole or not at all, records before rows."""
    lines = [json.dumps(record) + "\n" for record in records]
    found: Record = {"run": run, "rows": list(rows)}
    found["records"] = {"count": len(lines), "sha256": _checksum("".join(lines))}
    found["sha256"] = _checksum(json.dumps(found))
    write_text(out / "table.md", table)
    write_text(out / "records.jsonl", "".join(lines))
    write_text(out / "results.json", json.dumps(found, indent=1) + "\n")


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
        found = json.loads(file.read_text(encoding="utf-8"))
        checksum = found.pop("sha256", None)
        if checksum != _checksum(json.dumps(found)) and (stopped or checksum):
            raise ValueError("wrong checksum")
        known, found = found.get("records"), {"run": dict(found["run"]), "rows": found["rows"]}
    if not stopped:
        return found
    file = folder / "records.jsonl"
    with reading(f"{file}: cannot be read", "remove it"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)[: known["count"]]
        if known["sha256"] != _checksum("".join(lines)):
            raise ValueError("wrong checksum")
        return found | {"records": [json.loads(line) for line in lines]}


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _processor() -> str:
    """Return the CPU's name, on Linux with family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    known = {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    names = {"model name": "", "cpu family": "family ", "model": "model "}
    return (
        ", ".join(f"{word}{known[name]}" for name, word in names.items() if name in known)
        or platform.machine()
    )


def _git() -> str | None:
    """Return the commit of the working tree, marked if it has changes; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(
            command, cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
