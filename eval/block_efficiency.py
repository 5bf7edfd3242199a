"""Block-efficiency table: rows of views and weightings x sets x turns, beside plain decoding.

    python -m eval.block_efficiency mini --out runs/mini
    python -m eval.block_efficiency mini --limit 10 --gamma 3
    python -m eval.block_efficiency mini_weightings --regret

Writes results.json, records.jsonl, table.md and report.html (and figures, with the `plots` extra) into --out. With
--trace the page shows who wrote each token of the first answers, and more figures are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eval.lib.command_line import parse_command
from eval.lib.comparison import GROUP, compare, row_engines
from eval.lib.config import EvalConfig, by_reason, load_models
from eval.lib.page import ASKED, SHOWN, draw_all, write_html
from eval.lib.replay import engine_of
from eval.lib.report import Record, Run, Table, failures, mean, number, percent
from eval.lib.simulation import measure_regret
from jaxspec.command import input_errors, script_name


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/eval/PRESET")
    """Directory for results.json, records.jsonl, table.md, report.html and figures."""
    regret: bool = False
    """Also replay each mixing row's weighting on the target's answers, against the best fixed weights in hindsight."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures block efficiency of the preset's rows."""
    preset, config, options = parse_command(Options, __doc__, args)
    with Run(preset, vars(config) | vars(options), options.out) as run:
        target, draft, captioner = load_models(config)
        plain, engines = (
            engine_of(target, None, config.plain()),
            row_engines(config, target, draft, captioner),
        )
        run.restore(GROUP)
        # What --regret added is measured again.
        run.rows, run.records = (
            [r for r in found if "batch" in r] for found in (run.rows, run.records)
        )
        for group in compare(config, plain, engines, run.rows):
            run.add(*group)
            run.write(block_efficiency_table(config, run.rows, run.failed))
        table = block_efficiency_table(config, run.rows, run.failed)
        run.write(table)
        figures = draw_all(config, run.rows, run.records, run.folder)
        write_html(
            run.folder / "report.html", run.about, table, figures, run.records, _asked(config)
        )
        if options.regret:
            rows, records = measure_regret(config, target, draft, captioner)
            run.rows += rows
            run.records += records
            run.write(table, *regret_tables(config, rows))


def block_efficiency_table(
    config: EvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()
) -> Table:
    """Return a line per row of views and turn, a column per set, and the plain means over sets.

    Below a line stands what a paper prints, where the configuration is the paper's. Sets of which nothing is measured
    yet have no column.
    """
    begun = {row["dataset"] for row in (*rows, *failed)}
    sets = [name for name in config.sets if name in begun]
    averages = averaged(config, sets)
    papers = [
        paper
        for paper in config.published
        if paper.is_of(config) and set(paper.numbers) & set(config.turns)
    ]
    title = f"Block efficiency: tokens per target pass, gamma {config.gamma}, temperature {config.temperature:g}"
    header = ["views", "turn", *sets, *averages, "speed-up", "predicted", "identical"]
    cells = []
    lost = {(row["dataset"], row["turn"], row["row"]) for row in failed}
    rows = [row for row in rows if (row["dataset"], row["turn"], row["row"]) not in lost]
    for turn in config.turns:
        asked = [name for name in sets if turn in config.turns_of(name)]
        for row in config.rows:
            line = [r for r in rows if r["row"] == row.name and r["turn"] == turn]
            groups = [[name] for name in sets] + list(averages.values())
            numbers = [
                number(_mean_over(line, group, "mean_acceptance_length")) for group in groups
            ]
            speeds = [
                number(_mean_over(line, asked, f))
                for f in ("speedup_measured", "speedup_predicted_with_verify")
            ]
            same = percent(_mean_over(line, asked, "token_identity_rate"), 1)
            cells.append([row.name, str(turn), *numbers, *speeds, same])
            for paper in papers:
                if printed := paper.numbers.get(turn, {}).get(row.name):
                    beside = [number(printed.get(name)) for name in (*sets, *averages)]
                    cells.append([f"{row.name}, paper", str(turn), *beside, "-", "-", "-"])
    counts = sorted({row["samples"] for row in rows}) or [0]
    samples = " to ".join(map(str, sorted({counts[0], counts[-1]})))
    devices = ", ".join(dict.fromkeys(row["device"] for row in (*rows, *failed)))
    groups = [
        f"{name} over {', '.join(group) if config.averages else 'sets'}"
        for name, group in averages.items()
    ]
    notes = [
        f"{config.pair}. {samples} samples a set, batch {config.batch_size}, {config.dtype}, {devices}. "
        f"Plain means: {'; '.join(groups)}.",
        "speed-up: decode tokens/s over plain decoding of the same requests in the same run; predicted: Eq. (1) with "
        "T_q, T_p and T_p(J+1) as measured once a row, on the first set; identical: share of answers equal to plain "
        "decoding token for token.",
    ]
    if config.each_follow_up and 2 in config.turns:
        notes.append(
            f"Turn 2 is the mean over what follows the first answer: {', '.join(config.follow_ups)}."
        )
    notes += [f"paper: {paper.source}." for paper in papers]
    learned = {
        row.name: row.weighting for row in config.rows if row.weighting not in ("static", row.name)
    }
    if learned:
        notes.append(
            "Weights: " + ", ".join(f"{name} by {rule}" for name, rule in learned.items()) + "."
        )
    if (caption_ms := mean(rows, "caption_ms_per_image")) is not None:
        notes.append(
            f"Captions: {caption_ms:.3g} ms an image, made once for all rows; not in the speed-ups."
        )
    notes += [f"Left out: {line}." for line in by_reason(config.left_out)]
    return Table(title, header, cells, [*notes, *failures(failed)])


def averaged(config: EvalConfig, sets: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of means, and the sets of each: the configuration's, or one over all sets."""
    groups = {
        name: [one for one in sets if one in group] for name, group in config.averages.items()
    }
    told = {name: group for name, group in groups.items() if group}
    return (
        told
        if set(sets) <= {one for group in told.values() for one in group}
        else {"avg": list(sets)}
    )


def _mean_over(line: Sequence[Record], sets: Sequence[str], field: str) -> float | None:
    """Return the mean of a field over sets, and within a set over follow-ups; None where a set is missing."""
    means = [mean([row for row in line if row["dataset"] == name], field) for name in sets]
    found = [one for one in means if one is not None]
    return sum(found) / len(found) if found and len(found) == len(means) else None


def regret_tables(config: EvalConfig, rows: Sequence[Record]) -> list[Table]:
    """Return a table per mixture of views: a line per rule and turn, pooled over all sets, most tokens a pass first."""
    fields = [
        f"{prefix}{loss}" for prefix in ("", "regret_") for loss in ("kl", "rejections", "misses")
    ]
    header = [
        "weighting",
        "turn",
        "tau",
        "KL",
        "rejected",
        "missed",
        "R(KL)",
        "R(rej.)",
        "R(miss.)",
    ]
    notes = [
        f"{config.limit} samples of each of {len(config.sets)} sets; rules replayed on the target's greedy answers. "
        "tau: tokens a pass. KL: KL(p, mixture) a token in nats; rejected: 1 - sum min(p, mixture), both at "
        "temperature 1; missed: share of tokens where the likeliest differ.",
        "R: the same less that of each answer's best fixed weights, chosen with hindsight for that loss on a grid.",
    ]
    tables = []
    for views in dict.fromkeys(tuple(row["views"]) for row in rows):
        mixed = [row for row in rows if tuple(row["views"]) == views]
        lines = []
        for name, turn in dict.fromkeys((row["row"], row["turn"]) for row in mixed):
            found = [row for row in mixed if (row["row"], row["turn"]) == (name, turn)]
            tokens = [row["tokens"] for row in found]
            tau = sum(tokens) / sum(row["num_spec_steps"] for row in found)
            lines.append(
                (
                    turn,
                    -tau,
                    name,
                    [np.average([row[f] for row in found], weights=tokens) for f in fields],
                )
            )
        cells = [
            [name, str(turn), f"{-tau:.3f}", *(f"{x:.3f}" for x in means)]
            for turn, tau, name, means in sorted(lines)
        ]
        title = f"Weightings of views {','.join(views)}: losses a token and regret, gamma {config.gamma}"
        tables.append(Table(title, header, cells, notes))
    return tables


def _asked(config: EvalConfig) -> dict[tuple[Any, ...], tuple[str, Sequence[Any]]]:
    """Return the question and the images of the samples that the page shows, by what their records have in `ASKED`."""
    return {
        tuple((place | {"sample": sample.id}).get(field) for field in ASKED): (
            sample.turns[turn - 1][0],
            sample.images,
        )
        for place, part in config.parts()
        for turn in part.turns
        for sample in islice(part.samples(place["dataset"], turns=turn), SHOWN)
    }


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
