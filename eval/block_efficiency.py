"""Block-efficiency table: rows of views and weightings x twin sets x turns, beside plain decoding.

    python eval/block_efficiency.py mini --out runs/mini
    python eval/block_efficiency.py mini --limit 10 --gamma 3

Writes results.json, records.jsonl and table.md (and figures, with the `plots` extra) into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jaxspec.evaluation.block_efficiency import measure
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.figures import draw_all
from jaxspec.evaluation.report import describe_run, markdown, show, write_results
from jaxspec.evaluation.tables import block_efficiency_table
from jaxspec.runtime import input_errors


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/eval")
    """Directory for results.json, records.jsonl, table.md and figures."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures block efficiency of the preset's rows."""
    preset, config, options = parse_command(Options, main.__doc__, args)
    out = options.out
    models = load_models(config)
    rows, records = measure(config, *models)
    title, header, cells, notes = block_efficiency_table(config, rows)
    write_results(out, describe_run(preset), rows, records, markdown(title, header, cells, notes))
    show(title, header, cells, notes)
    figures = draw_all(config, rows, records, out)
    files = ["results.json", "records.jsonl", "table.md", *(figure.name for figure in figures)]
    print(f"wrote {', '.join(files)} to {out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors("block_efficiency"):
        main()
