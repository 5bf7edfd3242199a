"""Block-efficiency table: rows of views and weightings x twin sets x turns, beside plain decoding.

    python eval/block_efficiency.py mini --out runs/mini
    python eval/block_efficiency.py mini --limit 10 --gamma 3

Writes results.json, records.jsonl and table.md (and figures, with the `plots` extra) into --out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from jaxspec.evaluation.block_efficiency import measure
from jaxspec.evaluation.figures import draw_all
from jaxspec.evaluation.report import describe_run, markdown, show, write_results
from jaxspec.evaluation.tables import block_efficiency_table
from jaxspec.presets import load_preset
from jaxspec.runtime import input_errors, setup_runtime


def main(
    preset: Annotated[str, tyro.conf.Positional],
    out: Path = Path("runs/eval"),
    limit: int | None = None,
    twins: tuple[str, ...] | None = None,
    gamma: int | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    batch_size: int | None = None,
    target: str | None = None,
    draft: str | None = None,
    captioner: str | None = None,
) -> None:
    """Measures block efficiency of the preset's rows.

    Args:
      preset: name of a file in configs/eval, such as `mini`.
      out: directory for results.json, records.jsonl, table.md and figures.
      limit: samples of each set (overrides the preset, as do the options below).
      twins: names of picturebook sets.
      gamma: drafted tokens a block.
      temperature: 0 is greedy.
      max_new_tokens: most tokens of an answer.
      batch_size: most requests decoded together.
      target: directory or hub id of the target.
      draft: directory or hub id of the draft.
      captioner: for view C: jax:DIR, florence2:ID, blip:ID or file:captions.jsonl.
    """
    overrides = {
        "limit": limit,
        "twins": twins,
        "gamma": gamma,
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "target": target,
        "draft": draft,
        "captioner": captioner,
    }
    config = replace(load_preset("eval", preset), **{k: v for k, v in overrides.items() if v is not None})
    setup_runtime(config.dtype)
    models = config.load()
    print(f"target {config.target}\ndraft  {config.draft}", file=sys.stderr)
    rows, records = measure(config, *models)
    title, header, cells, notes = block_efficiency_table(config, rows)
    write_results(out, describe_run(preset), rows, records, markdown(title, header, cells, notes))
    show(title, header, cells, notes)
    figures = draw_all(config, rows, records, out)
    files = ["results.json", "records.jsonl", "table.md", *(figure.name for figure in figures)]
    print(f"wrote {', '.join(files)} to {out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors("block_efficiency"):
        tyro.cli(main)
