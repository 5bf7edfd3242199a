"""Measure block efficiency and speed-ups of views and weightings, next to plain decoding.

    python -m eval.block_efficiency mini --out runs/mini
    python -m eval.block_efficiency mini --limit 10 --gamma 3
    python -m eval.block_efficiency mini_weightings --regret

Writes results.json, records.jsonl, prompts.jsonl, table.md and report.html (and figures, with the
`plots` extra) into --out. With --trace the page shows the writer of each token in the first
answers, and more figures are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import compare
from eval.lib.drafts.config import EvalConfig
from eval.lib.drafts.figures import draw_all
from eval.lib.drafts.loading import by_reason, load_models
from eval.lib.drafts.page import ASKED, SHOWN, write_html
from eval.lib.drafts.published import papers_of, sources
from eval.lib.drafts.regret import measure_regret
from eval.lib.output.intervals import check_row, interval_table
from eval.lib.output.report import Run
from eval.lib.output.tables import (
    Label,
    Record,
    Table,
    answer_lengths,
    failures,
    grouped,
    has,
    mean,
    mean_over,
    number,
    percent,
    pivot,
    sample_counts,
    without_failed,
)
from eval.lib.questions.sets import remarks
from eval.lib.standins.replay import engine_of
from jaxspec.command import input_errors, script_name
from jaxspec.engine.captioners import runs_torch
from jaxspec.prompts.placeholders import PLACEHOLDER

TAU = "tokens_per_pass"
TIMES = (
    "speed-up: decode tokens/s over plain decoding of the same requests in the same run; "
    "whole calls: the same with prefill; predicted: Eq. (1) with T_q, T_p and T_p(gamma+1), "
    "measured once a row, on the first set; "
)
TORCH_CAPTIONS = " torch makes them in float32, TABED's released code in float16."
Cell = Callable[[float | None], str]
Column = Callable[[Sequence[Record]], str]


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/eval/PRESET")
    """Directory for the results, table.md, report.html and figures."""
    against: str = ""
    """A row, such as M, against which the table of intervals compares the others."""
    regret: bool = False
    """Also replay each mixing row's weighting on the target's answers, against the best fixed
    weights in hindsight."""


def main(args: Sequence[str] | None = None) -> None:
    """Measure tokens per pass (block efficiency, tau) and speed-ups of the preset's rows."""
    preset, config, options = parse_command(Options, __doc__, args)
    check_row(options.against, [row.name for row in config.rows])
    timed = f"the median of {config.repeats} runs by turns" if config.times else ""
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        models = load_models(config)
        plain = engine_of(models.target, None, config.plain())
        run.restore()
        # --regret measures its rows again.
        run.rows, run.records = (
            [r for r in records if "batch" in r] for records in (run.rows, run.records)
        )
        parts = compare(config, plain, models.engines(config), run.rows, run.keep)
        run.collect(parts, lambda: tables(config, run, options.against))
        figures = draw_all(config, run.rows, run.records, run.folder)
        page = run.folder / "report.html"
        write_html(page, run.about, run.tables[0], figures, run.records, _questions(config))
        if options.regret:
            measured = tables(config, run, options.against)
            rows, records = measure_regret(config, models)
            run.add(rows, records)
            run.write(*measured, *regret_tables(config, rows))


def tables(config: EvalConfig, run: Run, against: str = "") -> list[Table]:
    """Return the table of block efficiency, and the table of its means with intervals."""
    whole = block_efficiency_table(config, run.rows, run.failed)
    if not run.rows:
        return [whole]
    sets = [name for name in config.sets if has(run.rows, dataset=name)]
    labels = {"views": "row", "turn": "turn"}
    return [whole, interval_table(run.records, labels, averaged(config, sets), against)]


def block_efficiency_table(
    config: EvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()
) -> Table:
    """Return a line per row of views and turn, a column per set, and the plain means over sets.

    The line below shows a paper's numbers, if the configuration is the paper's. A set without
    measurements has no column.
    """
    measured = {row["dataset"] for row in (*rows, *failed)}
    sets = [name for name in config.sets if name in measured]
    averages = averaged(config, sets)
    rows = without_failed(rows, failed, "dataset", "turn", "row")
    papers = [
        paper
        for paper in papers_of(config, config.published)
        if any(
            row in paper.rows and row.name in paper.numbers.get(turn, {})
            for row in config.rows
            for turn in config.turns
        )
    ]
    forms = {row.name: row for row in config.rows}

    def over(field: str, group: Sequence[str] | None = None, cell: Cell = number) -> Column:
        """Return a column: the mean over sets, by default the sets of the line's turn."""

        def column(line: Sequence[Record]) -> str:
            turns = {row["turn"] for row in line}
            open_sets = [name for name in sets if turns & set(config.turns_of(name))]
            return cell(mean_over(line, open_sets if group is None else group, field))

        return column

    def printed(label: Label) -> Iterator[tuple[Label, Mapping[str, float]]]:
        name, turn = label
        for paper in papers:
            numbers = paper.numbers.get(int(turn), {}).get(name)
            if numbers and forms[name] in paper.rows:
                yield (f"{name}, {paper.suffix}", turn), numbers

    lines = [
        ((row.name, str(turn)), [r for r in rows if r["row"] == row.name and r["turn"] == turn])
        for turn in config.turns
        for row in config.rows
    ]
    columns = {name: over(TAU, [name]) for name in sets}
    columns |= {name: over(TAU, group) for name, group in averages.items()}
    if config.times:
        columns["speed-up"] = over("speedup_measured")
        columns["whole calls"] = over("speedup_call")
        columns["predicted"] = over("speedup_predicted_with_verify")
    columns["identical"] = over("token_identity_rate", cell=partial(percent, places=1))
    title = (
        f"Tokens per pass of the target (block efficiency), gamma {config.gamma}, temperature "
        f"{config.temperature:g}"
    )
    notes = _notes(config, rows, failed, averages) + sources(config, papers)
    return pivot(title, ("views", "turn"), lines, columns, printed, notes)


def _notes(
    config: EvalConfig,
    rows: Sequence[Record],
    failed: Sequence[Record],
    averages: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the sentences below the table, without the papers'."""
    devices = ", ".join(dict.fromkeys(row["device"] for row in (*rows, *failed)))
    groups = [
        f"{name} over {', '.join(group) if config.averages else 'sets'}"
        for name, group in averages.items()
    ]
    learned = {
        row.name: row.weighting for row in config.rows if row.weighting not in ("static", row.name)
    }
    notes = [
        f"{config.pair}. {sample_counts(rows)} samples a set, batch {config.batch_size}, "
        f"{config.dtype}, {devices}. Plain means: {'; '.join(groups)}.",
        f"{TIMES if config.times else ''}identical: share of answers equal to plain decoding "
        "token for token.",
        *answer_lengths(rows, config.sets),
        *remarks(config.sets, config.turns),
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
            + (TORCH_CAPTIONS if config.captioner and runs_torch(config.captioner) else "")
        )
    left_out = [f"Left out: {line}." for line in by_reason(config.left_out)]
    return [*notes, *left_out, *failures(failed)]


def averaged(config: EvalConfig, sets: Sequence[str]) -> dict[str, list[str]]:
    """Return the columns of means and the sets of each; by default one over all sets."""
    groups = {
        name: [each for each in sets if each in group] for name, group in config.averages.items()
    }
    averaged_sets = {each for group in groups.values() for each in group}
    if set(sets) <= averaged_sets:
        return {name: group for name, group in groups.items() if group}
    return {"avg": list(sets)}


def regret_tables(config: EvalConfig, rows: Sequence[Record]) -> list[Table]:
    """Return a table per mixture of views, a line per rule and turn, sorted by tokens per pass."""

    def tau(line: Sequence[Record]) -> float:
        steps = sum(row["num_spec_steps"] for row in line)
        return sum(row["tokens"] for row in line) / max(steps, 1)

    def loss(field: str) -> Column:
        """Return the column of a loss a token; answers may end at their first one, prefill's."""

        def column(line: Sequence[Record]) -> str:
            tokens = sum(row["tokens"] for row in line)
            return number(sum(row[field] * row["tokens"] for row in line) / max(tokens, 1), 3)

        return column

    columns = {"tau": lambda line: number(tau(line), 3)}
    columns |= {"KL": loss("kl"), "rejected": loss("rejections"), "missed": loss("misses")}
    columns |= {"R(KL)": loss("regret_kl"), "R(rej.)": loss("regret_rejections")}
    columns["R(miss.)"] = loss("regret_misses")
    notes = [
        f"{sample_counts(rows)} samples of each of {len(config.sets)} sets; rules replayed on the "
        "target's greedy answers. tau: tokens per pass. KL: KL(p, mixture) a token in nats; "
        "rejected: 1 - sum min(p, mixture), both at temperature 1; missed: share of tokens where "
        "the likeliest differ.",
        "R: the same less that of each answer's best fixed weights, chosen with hindsight for that "
        "loss on a grid.",
    ]
    return [
        pivot(
            f"Weightings of views {','.join(views)}: losses a token and regret, gamma "
            f"{config.gamma}",
            ("weighting", "turn"),
            sorted(lines.items(), key=lambda line: (line[0][1], -tau(line[1]), line[0][0])),
            columns,
            notes=notes,
        )
        for views, mixed in grouped(rows, lambda row: tuple(row["views"])).items()
        for lines in [grouped(mixed, lambda row: (row["row"], str(row["turn"])))]
    ]


def _questions(config: EvalConfig) -> dict[tuple[Any, ...], tuple[str, Sequence[Any]]]:
    """Return the page's questions and images, keyed by the fields `ASKED` of their records."""
    questions = {}
    for part in config.parts():
        for sample in islice(config.samples(**part), SHOWN):
            key = tuple((part | {"sample": sample.id}).get(field) for field in ASKED)
            turns = [question for question, _ in sample.turns[: part["turn"]]]
            images = sum(question.count(PLACEHOLDER) for question in turns)
            questions[key] = turns[-1], sample.images[:images]
    return questions


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
