"""Does speculation change what the target writes? Token identity of greedy answers, and a test of sampled ones.

    python -m eval.exactness mini --limit 5 --out runs/exactness
    python -m eval.exactness mini --gammas 5 --batches 8 --draws 0

Every answer of the preset's sets is decoded with and without the draft and compared token for token; where they
part, the logit gap in one full forward pass of the target says whether rounding could have chosen. Then many
seeds of one prompt are drawn with and without, and a chi-square test compares how often each beginning occurs.
Writes results.json, records.jsonl and table.md into --out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.command import input_errors, script_name
from jaxspec.errors import InputError
from jaxspec.evaluation.command import load_models, parse_command
from jaxspec.evaluation.exactness import measure_identity, measure_sampling
from jaxspec.evaluation.report import begin, describe_run, finish, markdown, show, write_results
from jaxspec.evaluation.tables import Table, identity_table, sampling_table


@dataclass(frozen=True)
class Options:
    """What this script takes besides the preset's fields."""

    out: Path = Path("runs/exactness")
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
    given = vars(config) | vars(options)
    out = begin(options.out, given)
    models = load_models(config)
    run = describe_run(preset, given)
    rows: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    tables: list[Table] = []
    for its_rows, its_records in measure_identity(config, *models, gammas=options.gammas, batches=options.batches):
        rows += its_rows
        records += its_records
        tables = [identity_table(config, rows)]
        write_results(out, run, rows, records, markdown(*tables[0]))  # a run that is stopped keeps what is done
    if options.draws:
        sampled = measure_sampling(
            config, *models, draws=options.draws, tokens=options.tokens, batch=max(options.batches)
        )
        tables.append(sampling_table(config, sampled))
        rows += sampled
    write_results(out, run, rows, records, "\n".join(markdown(*table) for table in tables))
    finish(out, options.out)
    for table in tables:
        show(*table)
    print(f"wrote results.json, records.jsonl, table.md to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
