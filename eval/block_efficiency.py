"""Block-efficiency table: rows of views and weightings x synthetic sets x turns, beside plain decoding.

    python -m eval.block_efficiency mini --out runs/mini
    python -m eval.block_efficiency mini --limit 10 --gamma 3

Writes results.json, records.jsonl, table.md and report.html (and figures, with the `plots` extra) into --out. With
--trace the page shows who wrote each token of the first answers, and more figures are drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jaxspec.command import input_errors, script_name
from jaxspec.evaluation.block_efficiency import measure
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.config import EvalConfig
from jaxspec.evaluation.figures import draw_all
from jaxspec.evaluation.html import SHOWN, write_html
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.tables import Table, block_efficiency_table


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/eval")
    """Directory for results.json, records.jsonl, table.md, report.html and figures."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures block efficiency of the preset's rows."""
    preset, config, options = parse_command(Options, __doc__, args)
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    models = load_models(config)
    run = describe_run(preset, given)
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    table: Table = "", [], [], []
    for done, (its_rows, its_records) in enumerate(measure(config, *models), start=1):
        rows += its_rows
        records += its_records
        table = block_efficiency_table(replace(config, sets=config.sets[:done]), rows)
        write_results(out, run, rows, records, markdown(*table))  # each time: a run that is stopped keeps whole sets
    figures = draw_all(config, rows, records, out)
    write_html(out / "report.html", run, table, figures, records, _asked(config))
    finish(out, options.out)
    show(*table)
    files = ["results.json", "records.jsonl", "table.md", "report.html", *(figure.name for figure in figures)]
    print(f"wrote {', '.join(files)} to {options.out}", file=sys.stderr)


def _asked(config: EvalConfig) -> dict[tuple[str, str, int], tuple[str, Sequence[Any]]]:
    """(set, sample, turn) -> the question and the sample's images; of those that the page shows."""
    return {
        (name, sample.id, turn): (sample.turns[turn - 1][0], sample.images)
        for name in config.sets
        for turn in config.turns
        for sample in islice(config.samples(name, turns=turn), SHOWN)
    }


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
