"""Does speculation change what the target writes? Token identity of greedy answers, and a test of sampled ones.

    python -m eval.exactness mini --limit 5 --out runs/exactness
    python -m eval.exactness mini --gammas 5 --batches 8 --draws 0

Every answer of the preset's sets is decoded with and without the draft and compared token for token; where they
part, the logit gap in one full forward pass of the target says whether rounding could have chosen. Then many
seeds of one prompt are drawn with and without, and a chi-square test compares how often each beginning occurs.
Writes results.json, records.jsonl and table.md into --out; the same command goes on where one was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.command import input_errors, script_name
from jaxspec.errors import InputError
from jaxspec.evaluation.command_line import parse_command
from jaxspec.evaluation.config import EvalConfig, load_models
from jaxspec.evaluation.exactness import GROUP, SAMPLING, measure_identity, measure_sampling
from jaxspec.evaluation.report import Record, Run, Table


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/exactness/PRESET")
    """Directory for results.json, records.jsonl and table.md."""
    gammas: tuple[int, ...] = (1, 3, 5, 7)
    """Drafted tokens a block."""
    batches: tuple[int, ...] = (1, 8)
    """Most requests decoded together; the reference decodes in batches of the first."""
    draws: int = 4096
    """Sampled answers of each kind in the sampling test; 0 leaves it out."""
    tokens: int = 4
    """Length of the sampled answers; the first token is prefill's, the draft has a part in the others."""

    def __post_init__(self) -> None:
        if not self.gammas or not self.batches or min(self.batches) < 1:
            raise InputError(f"gammas {self.gammas} and batches {self.batches}: give at least one of each, from 1 up")
        if self.draws < 0 or self.tokens < 2:
            raise InputError(f"draws {self.draws}, tokens {self.tokens}: give 0 draws or more, of 2 tokens or more")


def main(args: Sequence[str] | None = None) -> None:
    """Measures token identity, and tests the distribution of sampled answers."""
    preset, config, options = parse_command(Options, __doc__, args)
    with Run(preset, vars(config) | vars(options), options.out) as run:
        models = load_models(config)
        run.restore(GROUP)
        for rows, records in measure_identity(config, *models, options.gammas, options.batches, run.rows):
            run.add(rows, records)
            run.write(*tables(config, run.rows))
        if options.draws:
            how = options.draws, options.tokens, max(options.batches)
            for row in measure_sampling(config, *models, *how, before=run.rows):
                run.add([row], [])
                run.write(*tables(config, run.rows))
        run.write(*tables(config, run.rows))


def tables(config: EvalConfig, rows: Sequence[Record]) -> list[Table]:
    """Return the table of token identity, and where answers were sampled that of their test."""
    identity, sampled = ([row for row in rows if (row["dataset"] == SAMPLING) is drawn] for drawn in (False, True))
    return [identity_table(config, identity), *([sampling_table(sampled)] if sampled else [])]


def identity_table(config: EvalConfig, rows: Sequence[Record]) -> Table:
    """Return a line per row of views, gamma and batch, pooled over sets and turns."""
    header = ["views", "gamma", "batch", "answers", "identical", "first divergence", "largest logit gap"]
    cells = []
    for key in dict.fromkeys((row["row"], row["gamma"], row["batch"]) for row in rows):
        found = [row for row in rows if (row["row"], row["gamma"], row["batch"]) == key]
        answers = [row["samples"] for row in found]
        rate = np.average([row["token_identity_rate"] for row in found], weights=answers)
        first = [row["first_divergence"] for row in found if row["first_divergence"] is not None]
        gaps = [row["largest_logit_gap"] for row in found if row["largest_logit_gap"] is not None]
        told = [f"{100 * rate:.2f} %", str(min(first)) if first else "-", f"{max(gaps):.2g}" if gaps else "-"]
        cells.append([*map(str, key), str(sum(answers)), *told])
    notes = [
        f"{config.limit} samples of each of {len(config.sets)} sets and {len(config.turns)} turns, "
        f"{config.dtype}, {rows[0]['device']}, temperature 0, against plain decoding.",
        "first divergence: the fewest tokens that an answer shares with its reference before they part. "
        "largest logit gap: the reference's token over the other one there, in one full forward pass of the target.",
    ]
    return Table("Token identity with plain decoding", header, cells, notes)


def sampling_table(rows: Sequence[Record]) -> Table:
    """Return a line per row of views and sampling options."""
    header = ["views", "gamma", "temp.", "top-p", "draws", "cells", "chi-square", "p-value"]
    cells = [
        [
            *(row["row"], str(row["gamma"]), f"{row['temperature']:g}", f"{row['top_p']:g}", str(row["samples"])),
            *(str(row["degrees"] + 1), f"{row['statistic']:.1f}", f"{row['p_value']:.3f}"),
        ]
        for row in rows
    ]
    notes = [
        f"Beginnings of {rows[0]['tokens']} tokens, drawn with the draft and by plain decoding with other seeds; "
        "p-value of the two-sample chi-square test that both are distributed alike.",
    ]
    return Table("Sampled answers against plain decoding", header, cells, notes)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
