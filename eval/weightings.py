"""Weightings against the best fixed weights in hindsight: losses, regret, and block efficiency of each rule.

    python eval/weightings.py mini --out runs/weightings
    python eval/weightings.py mini --views M T --rules static em mt-paper --windows 4 --limit 4

The target answers once, greedily; target and draft are recorded over the answers, and every rule is replayed on the
recording. Rules that take a window are replayed with each of --windows besides all.
Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from jaxspec.decoding.weighting import Adaptive
from jaxspec.decoding.weighting_rules import PRESETS, RULES, parse_weighting
from jaxspec.evaluation.regret import measure_regret
from jaxspec.evaluation.report import describe_run, markdown, show, write_results
from jaxspec.evaluation.tables import regret_table
from jaxspec.presets import load_preset
from jaxspec.runtime import input_errors, setup_runtime


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/weightings"),
    views: tuple[str, ...] = ("M", "T"),
    rules: tuple[str, ...] = tuple(dict.fromkeys([*RULES, *map(str, PRESETS.values())])),
    windows: tuple[int, ...] = (1, 4, 16),
    limit: int | None = None,
    twins: tuple[str, ...] | None = None,
    turns: tuple[int, ...] | None = None,
    gamma: int | None = None,
    target: str | None = None,
    draft: str | None = None,
) -> None:
    """Measures regret of weightings.

    Args:
      preset: name of a file in configs/eval, such as `mini`; its rows are not used.
      out: directory for results.json, records.jsonl and table.md.
      views: draft views to weigh.
      rules: weightings as text, such as grid:measure=tvd.
      windows: windows besides all, in verified tokens.
      limit: samples of each set (overrides the preset, as do the options below).
      twins: names of picturebook sets.
      turns: 1, 2 or both.
      gamma: drafted tokens a block.
      target: directory or hub id of the target.
      draft: directory or hub id of the draft.
    """
    given = {"limit": limit, "twins": twins, "turns": turns, "gamma": gamma, "target": target, "draft": draft}
    config = replace(load_preset("eval", preset), **{k: v for k, v in given.items() if v is not None})
    swept = [parse_weighting(text) for text in rules]
    swept += [replace(rule, window=h) for rule in swept if isinstance(rule, Adaptive) for h in windows]
    setup_runtime(config.dtype)
    models = config.load()
    print(f"target {config.target}\ndraft  {config.draft}", file=sys.stderr)
    rows, records = measure_regret(config, *models, views=views, rules=list(dict.fromkeys(map(str, swept))))
    table = regret_table(config, rows)
    write_results(out, describe_run(preset), rows, records, markdown(*table))
    show(*table)
    print(f"wrote results.json, records.jsonl, table.md to {out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors("weightings"):
        tyro.cli(main)
