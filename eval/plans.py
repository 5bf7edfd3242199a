"""Measure the gain of `--gamma auto` over plain decoding, next to its plans and to hindsight.

    python -m eval.plans smollm2 --limit 20 --repeats 3
    python -m eval.plans eyes --turns 1 --limit 10 --temperature 1

An engine of each plan, plain decoding and `auto` answer each question by turns, so that other load
slows all of them equally. `auto, cold` is an engine that is new at each set and in each turn: its
programs are compiled, but it has measured nothing, and learns costs and acceptance as it answers.
`auto, warm` is one engine for the whole table. Beforehand it has answered as many other questions
of each set, the sets in turn. Hindsight is the plan that was fastest on a set, or on a request.

Writes results.json, records.jsonl and table.md into --out; the same command continues a stopped
run after its last finished turn of all engines over a set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import numpy as np

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import prompts_of, requests_of
from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.drafts.loading import Loaded, load_models
from eval.lib.output.intervals import interval
from eval.lib.output.report import Run, progress
from eval.lib.output.tables import Record, Table, grouped, has, mean, number, percent, sample_counts
from eval.lib.times.passes import there_and_back
from jaxspec.command import input_errors, script_name
from jaxspec.decoding.plans import Plan
from jaxspec.decoding.sources.lookup import LOOKUP
from jaxspec.engine.drafts import HEAD
from jaxspec.engine.engine import Engine, Request
from jaxspec.errors import InputError

PLAIN, COLD, WARM = "plain", "auto, cold", "auto, warm"


@dataclass(frozen=True)
class Options:
    unread: ClassVar = ("rows", "gamma", "times", "trace")
    out: Path = Path("runs/plans/PRESET")
    """Directory for the results."""


def main(args: Sequence[str] | None = None) -> None:
    """Measure the gain of `--gamma auto` over plain decoding, next to each of its plans."""
    preset, config, options = parse_command(Options, __doc__, args)
    timed = f"medians of {config.repeats} runs by turns"
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        models = load_models(config)
        run.restore()
        plain = Engine(models.target, None, config.plain())
        settings = replace(config.plain(), views=None, gamma="auto")
        auto = Engine(models.target, models.drafts, settings)
        if not auto.assembly.plans:
            raise InputError("draft: none, so that there is nothing to choose; give one")
        plans = auto.assembly.plans[1:]
        fixed = {plan.name: fixed_engine(plan, auto, models, config) for plan in plans}

        def cold() -> Engine:
            engine = replace(auto)
            assert engine.batcher.policy is not None
            engine.batcher.policy.file, engine.batcher.policy.earlier = None, {}
            return engine

        warm = cold()
        teach(warm, config, plain)
        parts = [part for part in config.parts() if not has(run.rows, **part)]
        with progress(len(parts) * config.repeats, "plans") as bar:
            for part in parts:
                bar.set_postfix_str(part["dataset"], refresh=False)
                prompts = prompts_of(config, plain, part)
                requests = requests_of(config, prompts, config.temperature)
                warm.warmup(requests)
                engines = {PLAIN: plain, **fixed, WARM: warm}
                records = list[Record]()
                first = [replace(request, max_new_tokens=2) for request in requests]
                measured(engines, first, config.batch_size, part)  # loads every program
                for turn in range(config.repeats):
                    turns, where = engines | {COLD: cold()}, part | {"run": turn}
                    answers = partial(measured, turns, requests, config.batch_size, where)
                    records += run.keep(where, answers)
                    bar.update()
                run.add(rows_of(records, part, config), records)
                run.write(*tables(config, run.rows))
        run.write(*tables(config, run.rows))


def teach(engine: Engine, config: EvalConfig, plain: Engine) -> None:
    """Let an engine answer the questions after those of the table, as many of each set."""
    more = replace(config, limit=2 * config.limit)
    prompts = (prompts_of(more, plain, part) for part in config.parts())
    sets = [requests_of(more, each, config.temperature) for each in prompts]
    starts = range(config.limit, 2 * config.limit, config.batch_size)
    batches = [batch for i in starts for each in sets if (batch := each[i : i + config.batch_size])]
    engine.warmup([request for batch in batches for request in batch])
    with progress(len(batches), "other questions") as bar:
        for batch in batches:
            engine.generate(batch)
            bar.update()


def fixed_engine(plan: Plan, auto: Engine, models: Loaded, config: EvalConfig) -> Engine:
    """Return an engine whose own loop drafts as a plan of `auto` does."""
    sources = [plan.whole.sources[i] for i in plan.drafting]
    views = auto.assembly.mixture.views if any(source.forms for source in sources) else ()
    lookup = [source.name for source in sources if source.name == LOOKUP]
    heads = len(sources) - len(lookup) > bool(views)
    row = Variant(plan.name, (*(view.name for view in views), *[HEAD] * heads, *lookup))
    return models.engine(row, replace(config.engine(row), gamma=plan.gamma))


def measured(
    engines: Mapping[str, Engine], requests: Sequence[Request], batch: int, where: Record
) -> list[Record]:
    """Return a record of each answer of each engine; the engines take turns at each batch."""
    records = []
    for turn, start in enumerate(range(0, len(requests), batch)):
        part = requests[start : start + batch]
        order = there_and_back(engines, turn)
        answers = {name: engines[name].generate(part) for name in order}
        for name in engines:
            for i, (result, plain) in enumerate(zip(answers[name], answers[PLAIN], strict=True)):
                fields = {
                    "row": name,
                    "sample": start + i,
                    "identical": result.tokens == plain.tokens,
                    "emitted": int(result.stats.emitted),
                    "steps": int(result.stats.steps),
                    "decode_ms": result.decode_ms / result.batch,
                    "call_ms": (result.decode_ms + result.prefill_ms) / result.batch,
                    "plans": {plan: list(use) for plan, use in result.plans.items()},
                }
                records.append(where | fields)
    return records


def rows_of(records: Sequence[Record], part: Record, config: EvalConfig) -> list[Record]:
    """Return a row of each engine on a part: its speed-ups over plain decoding.

    Questions count whose answers do not end at their first token, which no loop writes.
    """
    rows, by_row = [], grouped(records, itemgetter("row"))
    every = {name: _times(mine) for name, mine in by_row.items()}
    counted = np.all([times[:, 0] > 0 for times in every.values()], axis=0)
    if not counted.any():
        raise InputError(
            f"set {part['dataset']}: each answer ends at its first token, which no loop writes; "
            "give other --sets"
        )
    plain = every[PLAIN][counted]
    for name, mine in by_row.items():
        times = every[name][counted]
        # Of sampled answers, whose lengths differ: what plain decoding takes for as many tokens.
        base = plain * (times[:, :1] / plain[:, :1])
        low, high = interval(np.stack([base[:, 1], times[:, 1]], axis=1))
        identical = None if config.temperature else np.mean([r["identical"] for r in mine])
        rows.append(
            part
            | {"row": name, "samples": len(times), "batch": config.batch_size}
            | {"dtype": config.dtype, "device": config.device, "temperature": config.temperature}
            | {"tokens_per_second": 1e3 * times[:, 0].sum() / times[:, 1].sum()}
            | {"tokens_per_pass": sum(r["emitted"] for r in mine) / sum(r["steps"] for r in mine)}
            | {
                "speedup_measured": float(base[:, 1].sum() / times[:, 1].sum()),
                "low": low,
                "high": high,
            }
            | {"speedup_call": float(base[:, 2].sum() / times[:, 2].sum()), "identical": identical}
            | {"speedups": (base[:, 1] / times[:, 1]).tolist(), "plain_ms": base[:, 1].tolist()}
        )
    return rows


def _times(records: Sequence[Record]) -> np.ndarray:
    """Return tokens of the loop, its milliseconds and the call's [samples, 3]: medians of runs."""
    fields, samples = ("emitted", "decode_ms", "call_ms"), grouped(records, itemgetter("sample"))
    times = [[[run[field] for field in fields] for run in runs] for runs in samples.values()]
    return np.array([np.median(runs, axis=0) for runs in times])


def tables(config: EvalConfig, rows: Sequence[Record]) -> list[Table]:
    """Return the table of speed-ups: a line for each engine, then what hindsight would reach."""
    parts = list(dict.fromkeys((r["dataset"], r["turn"], r.get("follow_up")) for r in rows))
    several_turns = len({turn for _, turn, _ in parts}) > 1
    header = [
        name + f", turn {turn}" * several_turns + (f", {follow_up}" if follow_up else "")
        for name, turn, follow_up in parts
    ]
    lines = grouped(rows, itemgetter("row"))
    lines |= {name: lines.pop(name) for name in (COLD, WARM) if name in lines}
    cells = []
    for name, line in lines.items():
        each = [row["speedup_measured"] for row in line]
        calls, low = mean(line, "speedup_call"), min(each)
        same = [row["identical"] for row in line]
        cells.append(
            [
                name,
                *(
                    f"{row['speedup_measured']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
                    for row in line
                ),
                *map(number, (mean(line, "speedup_measured"), low, calls)),
                "-" if None in same else percent(mean(line, "identical"), 1),
            ]
        )
    fixed = zip(*(line for name, line in lines.items() if name not in (COLD, WARM)))
    best = [(max(row["speedup_measured"] for row in part), _wisest(part)) for part in fixed]
    for kind, values in zip(("set", "request"), zip(*best)):
        cells.append([f"hindsight: best a {kind}", *map(number, values), number(fmean(values))])
        cells[-1] += [number(min(values)), "-", "-"]
        for name in (COLD, WARM):
            shares = [row["speedup_measured"] / value for row, value in zip(lines[name], values)]
            cells.append([f"{name}: share of it", *map(percent, shares), percent(fmean(shares))])
            cells[-1] += [percent(min(shares)), "-", "-"]
    notes = [
        f"{config.pair}. Speed-up of decoding over plain decoding, with 95 % intervals over "
        f"questions. {sample_counts(rows)} questions a set, batch {config.batch_size}, "
        f"{config.max_new_tokens} new tokens at most, temperature {config.temperature:g}, "
        f"{config.dtype}.",
        "hindsight: the plan that was fastest on the set, or on each request, plain decoding among "
        "them.",
    ]
    columns = ["engine", *header, "speed-up", "least", "whole calls", "identical"]
    return [Table("Decoding with `auto`, and with each of its plans", columns, cells, notes)]


def _wisest(rows: Sequence[Record]) -> float:
    """Return the speed-up of a part, if the fastest of these engines had answered each request."""
    plain = np.array(rows[0]["plain_ms"])
    return float(plain.sum() / (plain / np.max([row["speedups"] for row in rows], axis=0)).sum())


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
