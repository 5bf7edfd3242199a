"""Block-efficiency table: rows of views and weightings x sets x turns, next to plain decoding.

    python -m eval.block_efficiency mini --out runs/mini
    python -m eval.block_efficiency mini --limit 10 --gamma 3
    python -m eval.block_efficiency mini_weightings --regret

Writes results.json, records.jsonl, table.md and report.html (and figures, with the `plots` extra)
into --out. With --trace the page shows the writer of each token in the first answers, and more
figures are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from eval.lib.command_line import parse_command
from eval.lib.comparison import compare
from eval.lib.config import EvalConfig
from eval.lib.figures import draw_all
from eval.lib.loading import by_reason, load_models
from eval.lib.page import ASKED, SHOWN, write_html
from eval.lib.regret import measure_regret
from eval.lib.replay import engine_of
from eval.lib.report import Run
from eval.lib.sets import remarks
from eval.lib.tables import (
    Label,
    Record,
    Table,
    failures,
    mean,
    mean_over,
    number,
    percent,
    pivot,
    without_failed,
)
from jaxspec.command import input_errors, script_name
from jaxspec.prompts.placeholders import PLACEHOLDER

TAU = "tokens_per_pass"
TIMES = (
    "speed-up: decode tokens/s over plain decoding of the same requests in the same run; "
    "predicted: Eq. (1) with T_q, T_p and T_p(gamma+1), measured once a row, on the first set; "
)
Cell = Callable[[float | None], str]
Column = Callable[[Sequence[Record]], str]


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/eval/PRESET")
    """Directory for results.json, records.jsonl, table.md, report.html and figures."""
    regret: bool = False
    """Also replay each mixing row's weighting on the target's answers, against the best fixed
    weights in hindsight."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures tokens a pass (block efficiency) of the preset's rows."""
    preset, config, options = parse_command(Options, __doc__, args)
    timed = f"the median of {config.repeats} runs by turns" if config.times else ""
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        models = load_models(config)
        plain = engine_of(models.target, None, config.plain())
        run.restore()
        # --regret measures its rows again.
        run.rows, run.records = (
            [r for r in found if "batch" in r] for found in (run.rows, run.records)
        )
        parts = compare(config, plain, models.engines(config), run.rows)
        run.collect(parts, lambda: [block_efficiency_table(config, run.rows, run.failed)])
        figures = draw_all(config, run.rows, run.records, run.folder)
        page = run.folder / "report.html"
        write_html(page, run.about, run.tables[0], figures, run.records, _asked(config))
        if options.regret:
            table = block_efficiency_table(config, run.rows, run.failed)
            rows, records = measure_regret(config, models)
            run.add(rows, records)
            run.write(table, *regret_tables(config, rows))


def block_efficiency_table(
    config: EvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()
) -> Table:
    """Return a line per row of views and turn, a column per set, and the plain means over sets.

    The line below shows a paper's numbers, if the configuration is the paper's. A set without
    measurements has no column.
    """
    begun = {row["dataset"] for row in (*rows, *failed)}
    sets = [name for name in config.sets if name in begun]
    averages = averaged(config, sets)
    rows = without_failed(rows, failed, "dataset", "turn", "row")
    papers = [
        paper
        for paper in config.published
        if paper.is_of(config) and set(paper.numbers) & set(config.turns)
    ]

    def over(field: str, group: Sequence[str] | None = None, cell: Cell = number) -> Column:
        """Return a column: the mean over sets, by default the sets of the line's turn."""

        def column(line: Sequence[Record]) -> str:
            turns = {row["turn"] for row in line}
            asked = [name for name in sets if turns & set(config.turns_of(name))]
            return cell(mean_over(line, asked if group is None else group, field))

        return column

    def printed(label: Label) -> Iterator[tuple[Label, Mapping[str, float]]]:
        name, turn = label
        for paper in papers:
            if numbers := paper.numbers.get(int(turn), {}).get(name):
                yield (f"{name}, paper", turn), numbers

    lines = [
        ((row.name, str(turn)), [r for r in rows if r["row"] == row.name and r["turn"] == turn])
        for turn in config.turns
        for row in config.rows
    ]
    columns = {name: over(TAU, [name]) for name in sets}
    columns |= {name: over(TAU, group) for name, group in averages.items()}
    if config.times:
        columns["speed-up"] = over("speedup_measured")
        columns["predicted"] = over("speedup_predicted_with_verify")
    columns["identical"] = over("token_identity_rate", cell=partial(percent, places=1))
    title = (
        f"Tokens a pass of the target (block efficiency), gamma {config.gamma}, temperature "
        f"{config.temperature:g}"
    )
    notes = _notes(config, rows, failed, averages) + [f"paper: {paper.source}." for paper in papers]
    return pivot(title, ("views", "turn"), lines, columns, printed, notes)


def _notes(
    config: EvalConfig,
    rows: Sequence[Record],
    failed: Sequence[Record],
    averages: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the sentences below the table, without the papers'."""
    counts = [row["samples"] for row in rows] or [0]
    samples = " to ".join(map(str, sorted({min(counts), max(counts)})))
    devices = ", ".join(dict.fromkeys(row["device"] for row in (*rows, *failed)))
    groups = [
        f"{name} over {', '.join(group) if config.averages else 'sets'}"
        for name, group in averages.items()
    ]
    learned = {
        row.name: row.weighting for row in config.rows if row.weighting not in ("static", row.name)
    }
    notes = [
        f"{config.pair}. {samples} samples a set, batch {config.batch_size}, {config.dtype}, "
        f"{devices}. Plain means: {'; '.join(groups)}.",
        f"{TIMES if config.times else ''}identical: share of answers equal to plain decoding "
        "token for token.",
        *remarks(config.sets),
    ]
    if config.each_follow_up and 2 in config.turns:
        kinds = ", ".join(config.follow_ups)
        notes.append(f"Turn 2 is the mean over what follows the first answer: {kinds}.")
    if learned:
        rules = ", ".join(f"{name} by {rule}" for name, rule in learned.items())
        notes.append(f"Weights: {rules}.")
    if (caption_ms := mean(rows, "caption_ms_per_image")) is not None:
        notes.append(
            f"Captions: {caption_ms:.3g} ms an image, made once for all rows; not in the speed-ups."
        )
    return [
        *notes,
        *(f"Left out: {line}." for line in by_reason(config.left_out)),
        *failures(failed),
    ]


def averaged(config: EvalConfig, sets: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of means and the sets of each; by default one over all sets."""
    groups = {
        name: [one for one in sets if one in group] for name, group in config.averages.items()
    }
    kept = {name: group for name, group in groups.items() if group}
    return (
        kept
        if set(sets) <= {one for group in kept.values() for one in group}
        else {"avg": list(sets)}
    )


def regret_tables(config: EvalConfig, rows: Sequence[Record]) -> list[Table]:
    """Return a table per mixture of views, a line per rule and turn, sorted by tokens a pass."""

    def tau(found: Sequence[Record]) -> float:
        return sum(row["tokens"] for row in found) / sum(row["num_spec_steps"] for row in found)

    def loss(field: str) -> Column:
        return lambda found: number(
            float(np.average([r[field] for r in found], weights=[r["tokens"] for r in found])), 3
        )

    columns = {"tau": lambda found: number(tau(found), 3)}
    columns |= {"KL": loss("kl"), "rejected": loss("rejections"), "missed": loss("misses")}
    columns |= {"R(KL)": loss("regret_kl"), "R(rej.)": loss("regret_rejections")}
    columns["R(miss.)"] = loss("regret_misses")
    notes = [
        f"{config.limit} samples of each of {len(config.sets)} sets; rules replayed on the "
        "target's greedy answers. tau: tokens a pass. KL: KL(p, mixture) a token in nats; "
        "rejected: 1 - sum min(p, mixture), both at temperature 1; missed: share of tokens where "
        "the likeliest differ.",
        "R: the same less that of each answer's best fixed weights, chosen with hindsight for that "
        "loss on a grid.",
    ]
    found: dict[tuple[str, ...], dict[Label, list[Record]]] = {}
    for row in rows:
        lines = found.setdefault(tuple(row["views"]), {})
        lines.setdefault((row["row"], str(row["turn"])), []).append(row)
    return [
        pivot(
            f"Weightings of views {','.join(views)}: losses a token and regret, gamma "
            f"{config.gamma}",
            ("weighting", "turn"),
            sorted(lines.items(), key=lambda line: (line[0][1], -tau(line[1]), line[0][0])),
            columns,
            notes=notes,
        )
        for views, lines in found.items()
    ]


def _asked(config: EvalConfig) -> dict[tuple[Any, ...], tuple[str, Sequence[Any]]]:
    """Return the page's questions and images, keyed by the fields `ASKED` of their records."""
    asked = {}
    for place in config.parts():
        for sample in islice(config.samples(**place), SHOWN):
            key = tuple((place | {"sample": sample.id}).get(field) for field in ASKED)
            questions = [question for question, _ in sample.turns[: place["turn"]]]
            shown = sum(question.count(PLACEHOLDER) for question in questions)
            asked[key] = questions[-1], sample.images[:shown]
    return asked


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
