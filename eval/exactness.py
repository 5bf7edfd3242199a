"""Compare greedy answers with and without the draft token by token, and test sampled answers.

    python -m eval.exactness mini --limit 5 --out runs/exactness
    python -m eval.exactness mini --gammas 5 --batches 8 --draws 0

Every answer of the preset's sets is decoded with and without the draft, and compared token for
token. Where the two differ, one full forward pass of the target gives the logit gap, which shows
whether rounding explains the difference. Then many answers to one prompt are sampled with and
without the draft, and a chi-square test compares how often each beginning occurs. Writes
results.json, records.jsonl and table.md into --out; the same command continues a stopped run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar
from zlib import crc32

import numpy as np
from jax.scipy.special import gammaincc

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import engine_fields, first_prompt, prompts_of
from eval.lib.drafts.config import EvalConfig
from eval.lib.drafts.forward import divergence
from eval.lib.drafts.loading import Loaded, load_models
from eval.lib.output.report import Run, progress
from eval.lib.output.tables import (
    Record,
    Table,
    cell,
    digits,
    grouped,
    has,
    number,
    pivot,
    sample_counts,
)
from eval.lib.standins.replay import engine_of
from jaxspec.command import input_errors, script_name
from jaxspec.engine.engine import Engine, LoadedModel, Request
from jaxspec.engine.metrics import acceptance_metrics
from jaxspec.engine.requests import nth_seed
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import Prompt

LEAST = 5.0
"""Smallest expected count of a cell of the chi-square test."""
SAMPLING = "sampling"
"""The `dataset` of records of `measure_sampling`."""


@dataclass(frozen=True)
class Options:
    unread: ClassVar = ("each_follow_up", "batch_size", "repeats", "times", "trace")
    out: Path = Path("runs/exactness/PRESET")
    """Directory for results.json, records.jsonl and table.md."""
    gammas: tuple[int, ...] = (1, 3, 5, 7)
    """Drafted tokens per block of greedy answers; --gamma gives one, also to sampled answers."""
    batches: tuple[int, ...] = (1, 8)
    """Batch sizes; the reference decodes in batches of the first size."""
    draws: int = 4096
    """Sampled answers of each kind in the sampling test; 0 leaves it out."""
    tokens: int = 4
    """Length of the sampled answers. Prefill gives the first token; the draft takes part in the
    others."""
    full_weights: bool = False
    """Compare greedy answers with those of the target's own weights, not of `target_weights`."""

    def __post_init__(self) -> None:
        if not self.gammas or not self.batches or min(self.batches) < 1:
            raise InputError(
                f"gammas {self.gammas}, batches {self.batches}: give one or more of each, from 1 up"
            )
        if self.draws < 0 or self.tokens < 2:
            raise InputError(
                f"draws {self.draws}, tokens {self.tokens}: give at least 0 draws and 2 tokens"
            )


def main(args: Sequence[str] | None = None) -> None:
    """Measure token identity, and test the distribution of sampled answers."""
    preset, config, options = parse_command(Options, __doc__, args)
    if config.temperature:
        raise InputError(
            f"temperature: {config.temperature:g}; compared answers are greedy, and drawn ones "
            "have temperatures of their own; leave it out"
        )
    with Run(preset, vars(config) | vars(options), options.out) as run:
        batched = replace(config, batch_size=max(options.batches))
        models = load_models(batched)
        full = None
        if options.full_weights:
            full = load_models(replace(batched, target_weights=None, draft=())).target
        run.restore()
        parts = measure_identity(config, models, options.gammas, options.batches, run.rows, full)
        if options.draws:
            sizes = options.draws, options.tokens, max(options.batches)
            sampled = measure_sampling(config, models, *sizes, before=run.rows)
            parts = chain(parts, (([row], []) for row in sampled))
        run.collect(parts, lambda: tables(config, run.rows, options.full_weights))


def tables(config: EvalConfig, rows: Sequence[Record], full: bool = False) -> list[Table]:
    """Return the table of token identity, and the table of sampling if answers were sampled."""
    identity, sampled = (
        [row for row in rows if (row["dataset"] == SAMPLING) is of_samples]
        for of_samples in (False, True)
    )
    return [identity_table(config, identity, full), *([sampling_table(sampled)] if sampled else [])]


def identity_table(config: EvalConfig, rows: Sequence[Record], full: bool = False) -> Table:
    """Return a line per row of views, gamma and batch, pooled over sets and turns."""
    header = ["views", "gamma", "batch", "answers", "identical"]
    header += ["first divergence", "largest logit gap"]
    cells = []
    for key, group in grouped(rows, itemgetter("row", "gamma", "batch")).items():
        answers = [row["samples"] for row in group]
        rate = np.average([row["token_identity_rate"] for row in group], weights=answers)
        first = [row["first_divergence"] for row in group if row["first_divergence"] is not None]
        gaps = [row["largest_logit_gap"] for row in group if row["largest_logit_gap"] is not None]
        least, widest = number(min(first, default=None), 0), digits(max(gaps, default=None), 2)
        cells.append([*map(str, key), str(sum(answers)), f"{100 * rate:.2f} %", least, widest])
    weights = f" ({config.target_weights} target)" if config.target_weights else ""
    notes = [
        f"{sample_counts(rows)} samples of a set and turn, {', '.join(config.sets)}, "
        f"{config.dtype}{weights}, {rows[0]['device']}, temperature 0, against plain decoding"
        f"{f' in {config.dtype}' if full else ''}. "
        f"Width of a pass: {config.width or 'as many tokens as it has'}.",
        "first divergence: the fewest tokens that an answer shares with its reference before they "
        "part. largest logit gap: the reference's token over the other one there, in one full "
        "forward pass of the target.",
    ]
    return Table("Token identity with plain decoding", header, cells, notes)


def sampling_table(rows: Sequence[Record]) -> Table:
    """Return a line per row of views and sampling options."""
    columns = {
        "views": cell("row"),
        "gamma": cell("gamma"),
        "temp.": cell("temperature", digits),
        "top-p": cell("top_p", digits),
        "draws": cell("samples"),
        "cells": lambda row: str(row["degrees"] + 1),
        "chi-square": cell("statistic", number, 1),
        "p-value": cell("p_value", number, 3),
    }
    notes = [
        f"Beginnings of {rows[0]['tokens']} tokens, drawn with the draft and by plain decoding "
        "with other seeds; p-value of the two-sample chi-square test that both are distributed "
        "alike.",
    ]
    lines = [((), row) for row in rows]
    return pivot("Sampled answers against plain decoding", (), lines, columns, notes=notes)


def measure_identity(
    config: EvalConfig,
    models: Loaded,
    gammas: Sequence[int],
    batches: Sequence[int],
    before: Sequence[Record] = (),
    full: LoadedModel | None = None,
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Compare greedy answers of every row, draft length and batch size with plain decoding's.

    The reference is the target, or `full`. In float32 it decodes in batches of `batches[0]`. In 16
    bits each batch size has a reference of its own, because sums round differently in each.
    Yields (rows, records) for each combination of preset row, gamma and batch size that `before`
    lacks. A row pools a set and turn; a record is one answer, with its `divergence`.
    """
    target = models.target
    reference = full or target
    references = {
        batch: engine_of(reference, None, replace(config.plain(), batch_size=batch))
        for batch in (batches[:1] if config.dtype == "float32" else batches)
    }
    plain = references[batches[0]]
    variants = [
        (row, gamma, batch)
        for row, gamma, batch in product(config.rows, gammas, batches)
        if not has(before, row=row.name, gamma=gamma, batch=batch, temperature=0.0)
    ]
    answered: list[tuple[Record, list[Prompt], list[Request], dict[int, list[Any]]]] = []
    parts = list(replace(config, each_follow_up=False).parts()) if variants else []
    with progress(len(parts) * (1 + len(variants)), "identity") as bar:
        for part in parts:
            bar.set_postfix_str(f"plain {part['dataset']}", refresh=False)
            with config.named(part["dataset"]):
                prompts = prompts_of(config, plain, part)
                requests = [Request(prompt, config.max_new_tokens) for prompt in prompts]
                answers = {
                    batch: [result.tokens for result in engine.generate(requests)]
                    for batch, engine in references.items()
                }
            answered.append((part | {"temperature": 0.0}, prompts, requests, answers))
            bar.update()
        for row, gamma, batch in variants:
            bar.set_postfix_str(f"{row.name} gamma {gamma} batch {batch}", refresh=False)
            settings = replace(config.engine(row), gamma=gamma, batch_size=batch)
            engine = models.engine(row, settings)
            rows: list[Record] = []
            records: list[Record] = []
            for part, prompts, requests, answers in answered:
                with config.named(part["dataset"]):
                    results = engine.generate(requests)
                expected = answers.get(batch, answers[batches[0]])
                apart = [
                    divergence(reference, prompt, answer, result.tokens)
                    for prompt, answer, result in zip(prompts, expected, results, strict=True)
                ]
                parted = [each for each in apart if each]
                gaps = [each.logit_gap for each in parted if each.logit_gap is not None]
                where = engine_fields(row.name, engine, config) | part
                identity = {
                    "samples": len(results),
                    "token_identity_rate": 1 - len(parted) / len(apart),
                    "first_divergence": min((each.index for each in parted), default=None),
                    "largest_logit_gap": max(gaps, default=None),
                    "target_bytes": target.report and target.report.nbytes,
                }
                rows.append(where | identity | acceptance_metrics([r.stats for r in results]))
                records += [
                    where
                    | {"sample": prompt.sample, "tokens": len(result.tokens)}
                    | {"divergence": difference and vars(difference)}
                    for prompt, result, difference in zip(prompts, results, apart, strict=True)
                ]
                bar.update()
            yield rows, records


def measure_sampling(
    config: EvalConfig,
    models: Loaded,
    draws: int,
    tokens: int,
    batch: int,
    options: Sequence[tuple[float, float]] = ((1.0, 1.0), (2.0, 1.0), (2.0, 0.9)),
    before: Sequence[Record] = (),
) -> Iterator[Record]:
    """Test by chi-square that tokens drawn with and without the draft have one distribution.

    The prompt is the first sample of the first set. Each row of the preset and plain decoding draw
    `draws` answers, with different seeds. `options` are pairs (temperature, top-p). Yields a record
    for each row and option that `before` lacks.
    """
    plain = engine_of(models.target, None, replace(config.plain(), batch_size=batch))
    prompt = first_prompt(plain.encoder, config.samples(config.sets[0])[0])
    bar = progress(len(options) * (1 + len(config.rows)), "sampling")

    def drawn(engine: Engine, temperature: float, top_p: float, seed: int) -> list[tuple[int, ...]]:
        requests = [
            Request(prompt, tokens, temperature, top_p=top_p, seed=nth_seed(config.seed, seed + i))
            for i in range(draws)
        ]
        bar.update()
        return [result.tokens for result in engine.generate(requests)]

    references: dict[tuple[float, float], list[tuple[int, ...]]] = {}
    for row in config.rows:
        engine = models.engine(row, replace(config.engine(row), batch_size=batch))
        for option in options:
            part = {"dataset": SAMPLING, "turn": 1, "temperature": option[0], "top_p": option[1]}
            if has(before, row=row.name, **part):
                continue
            if option not in references:
                references[option] = drawn(plain, *option, seed=draws)
            test = chi_square(drawn(engine, *option, seed=0), references[option])
            part |= {"samples": draws, "tokens": tokens}
            yield engine_fields(row.name, engine, config) | part | vars(test)
    bar.close()


@dataclass(frozen=True)
class ChiSquare:
    """Test whether two samples come from one distribution."""

    statistic: float
    degrees: int
    """Number of compared cells minus one."""
    p_value: float
    """Chance of a statistic at least as large if both samples come from one distribution."""


def chi_square(first: Sequence[Hashable], second: Sequence[Hashable]) -> ChiSquare:
    """Compare how often each outcome occurs in either sample: Pearson's test of homogeneity.

    An outcome with an expected count of at least LEAST in both samples is a cell of its own. The
    others are hashed into as many shared cells as can be filled, so that the test also works where
    every outcome is rare.
    """
    counts = np.asarray([len(first), len(second)], np.float64)
    share = counts / counts.sum()
    totals = Counter(first) + Counter(second)
    common = {o: i for i, (o, n) in enumerate(totals.most_common()) if n * share.min() >= LEAST}
    rare = sum(n for o, n in totals.items() if o not in common) * share.min()
    bins = int(rare / (2 * LEAST))
    if rare and not bins:  # too few for a cell of their own: they join the least common one
        bins = int(not common)

    def place(outcome: Hashable) -> int:
        if outcome in common:
            return common[outcome]
        return len(common) + crc32(repr(outcome).encode()) % bins if bins else len(common) - 1

    cells = np.zeros((2, len(common) + bins))
    for sample, outcomes in enumerate((first, second)):
        np.add.at(cells[sample], [place(outcome) for outcome in outcomes], 1)
    cells = cells[:, cells.sum(0) > 0]
    expected = cells.sum(0) * share[:, None]
    statistic = float((np.square(cells - expected) / expected).sum())
    degrees = cells.shape[1] - 1
    p_value = float(gammaincc(degrees / 2, statistic / 2)) if degrees else 1.0
    return ChiSquare(statistic, degrees, p_value)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
