"""How well draft and target answer on their own: accuracy, ROUGE-L and METEOR of plain decoding.

    python -m eval.draft_quality mini --limit 20 --out runs/quality
    python -m eval.draft_quality llava15 --sets ocrbench textcaps --data ocrbench=PATH textcaps=PATH

Needs the `quality` extra. Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxspec.command import input_errors, script_name
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.quality import measure_quality, quality_table
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/quality")
    """Directory for results.json, records.jsonl and table.md."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures the quality of the target's and the draft's own answers."""
    preset, config, options = parse_command(Options, __doc__, args)
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    target, draft, _ = load_models(config, views=())
    rows, records = measure_quality(config, {"target": target, "draft": draft})
    table = quality_table(config, rows)
    write_results(out, describe_run(preset, given), rows, records, markdown(*table))
    finish(out, options.out)
    show(*table)
    print(f"wrote results.json, records.jsonl, table.md to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
