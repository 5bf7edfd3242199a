"""MMSpec's conversations: answers of every method and the summary, in MMSpec's own files.

    python -m eval.mmspec llava15 --data mmspec=PATH --limit 600 --max-new-tokens 1024 --batch-size 1
    python -m eval.mmspec llava15 --data mmspec=PATH --target replay:ANSWERS.jsonl

Writes METHOD-temperature-T.jsonl for plain decoding (`baseline`) and for each row of the preset, summary.csv,
results.json and table.md into --out. Times are of whole batches, shared evenly; MMSpec's own are of batch 1. With a
recorded target there are none; the acceptance is exact all the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxspec.command import input_errors, script_name
from jaxspec.data.mmspec import answer_row, summary_csv, summary_rows
from jaxspec.data.sets import MMSPEC
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.mmspec import BASELINE, measure_mmspec
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.files import write_text

SHOWN = ("method", "group", "n_turns", "total_new_tokens", "MAT", "draft_accept_mean", "speedup_paired")


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/mmspec")
    """Directory for the answers and summary.csv."""


def main(args: Sequence[str] | None = None) -> None:
    """Answers MMSpec's conversations with and without the draft."""
    preset, config, options = parse_command(Options, __doc__, args)
    config = replace(config, sets=(MMSPEC,), turns=(1,))
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    answers = measure_mmspec(config, *load_models(config))
    for method, answered in answers.items():
        lines = [json.dumps(answer_row(sample, turns)) + "\n" for sample, turns in answered]
        name = f"{method.replace(' ', '-')}-temperature-{config.temperature:g}.jsonl"
        write_text(out / name, "".join(lines))
    rows = summary_rows(answers, BASELINE)
    write_text(out / "summary.csv", summary_csv(rows))
    cells = [[f"{row[k]:.2f}" if isinstance(row[k], float) else str(row[k]) for k in SHOWN] for row in rows]
    write_results(out, describe_run(preset, given), rows, [], markdown("MMSpec", SHOWN, cells))
    finish(out, options.out)
    show("MMSpec", list(SHOWN), cells)
    written = f"the answers of {len(answers)} methods, summary.csv, results.json, table.md"
    print(f"wrote {written} to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
