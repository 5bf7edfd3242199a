"""Collaborative decoding: every method on every set, measured and predicted, and the dial of quality and speed.

    python -m eval.collaborative gsm8k --data gsm8k=path/to/test.jsonl --out runs/collaborative
    python -m eval.collaborative visual --limit 8

Writes results.json, records.jsonl and table.md (and dial.png, with the `plots` extra) into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.command import input_errors, script_name
from jaxspec.evaluation.collaboration import measure
from jaxspec.evaluation.collaborative_tables import dial_table, draw_dial, methods_table
from jaxspec.evaluation.command import parse_command
from jaxspec.evaluation.config import CollaborativeEvalConfig, data_places
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.tables import Table


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/collaborative")
    """Directory for results.json, records.jsonl, table.md and the figure."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures collaborative decoding of the preset's pairings of models."""
    preset, config, options = parse_command(Options, __doc__, args, CollaborativeEvalConfig, "gsm8k")
    for name in set(config.sets) & set(data_places(config.data)):
        config.samples(name, config.limit)  # what cannot be read is told before models load
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    run = describe_run(preset, given)
    rows: list[dict[str, Any]] = []
    dial: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    tables: list[Table] = []
    for its_rows, its_dial, its_records in measure(config):
        rows += its_rows
        dial += its_dial
        records += its_records
        tables = [methods_table(config, rows)] + ([dial_table(config, dial)] if dial else [])
        text = "\n".join(markdown(*table) for table in tables)
        write_results(out, run, [*rows, *dial], records, text)  # a run that is stopped keeps whole pairings
    figure = draw_dial(dial, out)
    finish(out, options.out)
    for table in tables:
        show(*table)
    files = ["results.json", "records.jsonl", "table.md", *([figure.name] if figure else [])]
    print(f"wrote {', '.join(files)} to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
