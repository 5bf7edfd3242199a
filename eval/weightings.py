"""Weightings against the best fixed weights in hindsight: losses, regret, and block efficiency of each rule.

    python -m eval.weightings mini --out runs/weightings
    python -m eval.weightings mini --views M T --rules static em mt-paper --windows 4 --limit 4

The target answers once, greedily; target and draft are recorded over the answers, and every rule is replayed on the
recording. Rules that take a window are replayed with each of --windows besides all.
Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxspec.command import input_errors, script_name
from jaxspec.decoding.weighting import PRESETS, RULES, Adaptive, parse_weighting
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.regret import measure_regret
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.tables import regret_table


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields, of which the rows are not used."""

    out: Path = Path("runs/weightings")
    """Directory for results.json, records.jsonl and table.md."""
    views: tuple[str, ...] = ("M", "T")
    """Draft views to weigh."""
    rules: tuple[str, ...] = tuple(dict.fromkeys([*RULES, *map(str, PRESETS.values())]))
    """Weightings as text, such as grid:measure=tvd."""
    windows: tuple[int, ...] = (1, 4, 16)
    """Windows besides all, in verified tokens."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures regret of weightings."""
    preset, config, options = parse_command(Options, __doc__, args)
    swept = [parse_weighting(text) for text in options.rules]
    swept += [replace(rule, window=h) for rule in swept if isinstance(rule, Adaptive) for h in options.windows]
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    models = load_models(config, options.views)
    rows, records = measure_regret(config, *models, views=options.views, rules=list(dict.fromkeys(map(str, swept))))
    table = regret_table(config, rows)
    write_results(out, describe_run(preset, given), rows, records, markdown(*table))
    finish(out, options.out)
    show(*table)
    print(f"wrote results.json, records.jsonl, table.md to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
