"""Read how a checkpoint was trained, and its measurements, from the folder of its run.

A run writes RUNS/hf, or RUNS/hf/NAME of several heads, and RUNS/STAGE with `train_config.json` and
`metrics.jsonl`. A table whose --out is a folder of RUNS belongs to it, too.
"""

from __future__ import annotations

import math
import re
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from jaxspec.checkpoints.directories import read_json
from jaxspec.errors import InputError
from jaxspec.files import logged

_INTERVALS = re.compile(r"^# Intervals\n+((?:\|.*\n)+)", re.MULTILINE)
"""The table of intervals in a folder's `table.md`."""
_LAST = 0.1
"""Share of a stage's lines of metrics that describe its result."""


def training_facts(source: Path) -> dict[str, str]:
    """Return a card's facts about each stage that trained a checkpoint; {} where none is known."""
    facts: dict[str, str] = {}
    for folder, run in _stages(source):
        data = ", ".join(
            f"{Path(name).name} ({count:,} samples)" for name, _, count, _ in run["data"]
        )
        facts[folder.name] = (
            f"{run['steps']:,} steps of {run['batch']} samples, peak rate "
            f"{run['learning_rate']:g}, on {data}{_measured(folder / 'metrics.jsonl', source.name)}"
        )
    return facts


def measured_tables(source: Path) -> dict[str, str]:
    """Return the intervals of each table in a run's folder, as Markdown, by the table's title."""
    tables: dict[str, str] = {}
    for file in sorted(_run_files(source, "table.md")):
        text = file.read_text(encoding="utf-8")
        if match := _INTERVALS.search(text):
            title = text.splitlines()[0].removeprefix("# ")
            title += f" ({file.parent.name})" * (title in tables)
            tables[title] = match[1].rstrip()
    return tables


def _stages(source: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders and configurations of the stages that wrote RUNS/hf, in their order."""
    stages = []
    for file in _run_files(source, "train_config.json"):
        with suppress(InputError):
            run = read_json(file)
            # Stages of recipes list their data sets, and `train.text` names its one file.
            if all(isinstance(entry, list) for entry in run.get("data", [""])):
                stages.append((file.parent, run))
    return sorted(stages, key=lambda stage: len(stage[1].get("before", {})))


def _run_files(source: Path, name: str) -> list[Path]:
    """Return the files of this name in the folders of the run that wrote RUNS/hf."""
    folder = source if source.name == "hf" else source.parent
    return [*folder.parent.glob(f"*/{name}")] if folder.name == "hf" else []


def _measured(metrics: Path, head: str) -> str:
    """Return the mean tokens per pass of a stage's last batches, with its 95 % interval.

    head: Name of the checkpoint's folder: of several heads, its name in the metrics.
    """
    names = f"{head}/tokens_per_pass", "tokens_per_pass"
    lines = logged(metrics)
    values: list[float] = [line[name] for line in lines for name in names if name in line]
    last = values[-max(math.ceil(_LAST * len(values)), 2) :]
    if len(last) < 2:
        return ""
    mean, half = fmean(last), 1.96 * stdev(last) / math.sqrt(len(last))
    return (
        f"; {mean:.2f} tokens per pass, simulated on the last {len(last)} logged batches "
        f"(95 %: {mean - half:.2f} to {mean + half:.2f})"
    )
