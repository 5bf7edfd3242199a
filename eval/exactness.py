"""Does speculation change what the target writes? Token identity of greedy answers, and a test of sampled ones.

    python eval/exactness.py mini --limit 5 --out runs/exactness
    python eval/exactness.py mini --gammas 5 --batches 8 --draws 0

Every answer of the preset's sets is decoded with and without the draft and compared token for token; where they
part, the logit gap in one full forward pass of the target says whether rounding could have chosen. Then many
seeds of one prompt are drawn with and without, and a chi-square test compares how often each beginning occurs.
Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from jaxspec.errors import InputError
from jaxspec.evaluation.exactness import measure_identity, measure_sampling
from jaxspec.evaluation.report import describe_run, markdown, show, write_results
from jaxspec.evaluation.tables import identity_table, sampling_table
from jaxspec.presets import load_preset
from jaxspec.runtime import input_errors, setup_runtime


def main(
    preset: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET")],
    out: Path = Path("runs/exactness"),
    gammas: tuple[int, ...] = (1, 3, 5, 7),
    batches: tuple[int, ...] = (1, 8),
    draws: int = 4096,
    tokens: int = 4,
    limit: int | None = None,
    twins: tuple[str, ...] | None = None,
    max_new_tokens: int | None = None,
    target: str | None = None,
    draft: str | None = None,
    captioner: str | None = None,
) -> None:
    """Measures token identity, and tests the distribution of sampled answers.

    Args:
      preset: name of a file in configs/eval, such as `mini`.
      out: directory for results.json, records.jsonl and table.md.
      gammas: drafted tokens a block.
      batches: most requests decoded together; the reference decodes in batches of the first.
      draws: sampled answers of each kind in the sampling test; 0 leaves it out.
      tokens: length of the sampled answers; the first token is prefill's, the draft has a part in the others.
      limit: samples of each set (overrides the preset, as do the options below).
      twins: names of picturebook sets.
      max_new_tokens: most tokens of an answer.
      target: directory or hub id of the target.
      draft: directory or hub id of the draft.
      captioner: for view C: jax:DIR, florence2:ID, blip:ID or file:captions.jsonl.
    """
    if not gammas or not batches or min(batches) < 1:
        raise InputError(f"gammas {gammas} and batches {batches}: give at least one of each, from 1 up")
    if draws < 0 or tokens < 2:
        raise InputError(f"draws {draws}, tokens {tokens}: give 0 draws or more, of 2 tokens or more")
    given = {
        "limit": limit,
        "twins": twins,
        "max_new_tokens": max_new_tokens,
        "target": target,
        "draft": draft,
        "captioner": captioner,
    }
    config = replace(load_preset("eval", preset), **{k: v for k, v in given.items() if v is not None})
    setup_runtime(config.dtype)
    models = config.load()
    print(f"target {config.target}\ndraft  {config.draft}", file=sys.stderr)
    rows, records = measure_identity(config, *models, gammas=gammas, batches=batches)
    tables = [identity_table(config, rows)]
    if draws:
        sampled = measure_sampling(config, *models, draws=draws, tokens=tokens, batch=max(batches))
        tables.append(sampling_table(config, sampled))
        rows += sampled
    write_results(out, describe_run(preset), rows, records, "\n".join(markdown(*table) for table in tables))
    for table in tables:
        show(*table)
    print(f"wrote results.json, records.jsonl, table.md to {out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors("exactness"):
        tyro.cli(main)
