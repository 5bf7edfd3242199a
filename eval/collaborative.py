"""Measure collaborative decoding: every method on every set, and sweeps of quality and speed.

    python -m eval.collaborative gsm8k --data gsm8k=path/to/test.jsonl --out runs/collaborative
    python -m eval.collaborative visual --limit 8
    python -m eval.collaborative cos --pairings "Llama-3, T=0" --sets humaneval --sweep gamma:1,3,5

Methods are standard, naive (without alternate proposals, APF), speculative (SD) and CoS. Answers
are judged by accuracy (GSM8K, MMLU), ROUGE-L (CNN/DM), and pass@1 (HumanEval, with
--run-code). Writes results.json, records.jsonl, prompts.jsonl and table.md (and sweep.png, with the
`plots` extra) into --out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval.lib.collaborative.config import CollaborativeEvalConfig
from eval.lib.collaborative.figures import draw_sweep
from eval.lib.collaborative.pairings import JUDGED, METHODS, SWEEP, measure
from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.published import papers_of, sources
from eval.lib.output.intervals import CYCLES, check_row, interval_table
from eval.lib.output.report import Run
from eval.lib.output.tables import (
    Label,
    Record,
    Table,
    cell,
    failures,
    number,
    percent,
    pivot,
    sample_counts,
)
from eval.lib.questions.cos_release import read_clone
from eval.lib.questions.quality import MEASURES, quality, rouge_scorer
from eval.lib.questions.run_code import RunsCode
from jaxspec.command import input_errors, script_name


@dataclass(frozen=True)
class Options(RunsCode):
    out: Path = Path("runs/collaborative/PRESET")
    """Directory for the results, table.md and the figure."""
    against: str = ""
    """A method, such as naive, against which the table of intervals compares the others."""


FORMS = {True: "in the chat form of the model that leads", False: "in raw text"}


RELEASED = (
    "Prompts, worked examples and the order of the questions are those of CoS's released code "
    "(Kamichanw/CoS)."
)

SPEEDS: dict[str, Callable[[Record], str]] = {
    "whole calls": cell("speedup_call", number),
    "95 %": lambda row: (
        f"{row['speedup_call_low']:.2f} to {row['speedup_call_high']:.2f}"
        if "speedup_call_low" in row  # of a run that an earlier release began
        else "-"
    ),
    "speed-up": cell("speedup_measured", number),
    "law": cell("speedup_predicted", number),
    "with times": cell("speedup_predicted_with_verify", number),
    "Thm. 3.1, 3.6": cell("speedup_theorem", number),
    "Cor. 3.4": cell("speedup_corollary_3_4", number),
    "Cor. 3.5": cell("speedup_corollary_3_5", number),
}


def main(args: Sequence[str] | None = None) -> None:
    """Measure ensembles (WE) and contrasts (CD) of the preset's pairings of models."""
    preset, config, options = parse_command(
        Options, __doc__, args, CollaborativeEvalConfig, "gsm8k"
    )
    check_row(options.against, list(METHODS))
    # Sets that cannot be read and a missing package fail here, before models load.
    if config.released is not None:
        for name in config.sets:
            read_clone(name, config.released)
    for name in set(config.sets) & set(config.places):
        config.samples(name, config.limit)
    if "ROUGE-L" in map(MEASURES.get, config.sets):
        rouge_scorer()
    timed = f"the least of {config.repeats} runs by turns"
    with Run(preset, vars(config) | vars(options), options.out, timed) as run:
        run.restore()
        judge = partial(quality, run_code=options.run_code)
        parts = measure(config, judge, run.rows, run.keep)
        run.collect(parts, lambda: tables(config, run, options.against))
        draw_sweep([row for row in run.rows if row["row"] == SWEEP], run.folder)


def tables(config: CollaborativeEvalConfig, run: Run, against: str = "") -> list[Table]:
    """Return the table of methods with its intervals, and the sweep's if there is a sweep."""
    rows, sweep = (
        [row for row in run.rows if (row["row"] == SWEEP) == swept] for swept in (False, True)
    )
    labels, each = {"method": "row", "models": "pairing"}, {name: (name,) for name in config.sets}
    intervals = interval_table(run.records, labels, each, against, CYCLES)
    whole = methods_table(config, rows, run.failed)
    return [whole, intervals, *([sweep_table(sweep)] if sweep else [])]


def methods_table(
    config: CollaborativeEvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()
) -> Table:
    """Return a line per pairing, set and method."""
    papers = [
        paper
        for paper in papers_of(config, config.published)
        if set(paper.rows) & set(config.pairings)
    ]
    forms = {pairing.name: pairing for pairing in config.pairings}

    def printed(label: Label) -> Iterator[tuple[Label, Mapping[str, float]]]:
        pairing, dataset, method = label
        for paper in papers:
            numbers = paper.numbers[1].get(f"{pairing}, {method}, {dataset}")
            if numbers and forms[pairing] in paper.rows:
                yield (pairing, dataset, f"{method}, {paper.suffix}"), numbers

    columns = {
        "gammas": _gammas,
        "alpha": cell("alpha", _list),
        "tokens/cycle": cell("tokens_per_cycle", number),
        "calls/token": cell("calls_per_token", _list),
        "predicted": cell("calls_per_token_predicted", _list),
        "tokens/s": cell("decode_tokens_per_second", number, 1),
        "tokens/s, whole calls": cell("call_tokens_per_second", number, 1),
        **SPEEDS,
        "nats": cell("held_out_nats", number, 3),
        "quality": cell("quality", percent),
        "same": cell("token_identity_rate", percent),
    }
    lines = [((row["pairing"], row["dataset"], row["row"]), row) for row in rows]
    notes = [*_methods_notes(config, rows), *sources(config, papers), *failures(failed)]
    labels = "models", "set", "method"
    return pivot("Collaborative decoding", labels, lines, columns, printed, notes)


def _methods_notes(config: CollaborativeEvalConfig, rows: Sequence[Record]) -> list[str]:
    """Return the sentences below the table of methods, without the papers'."""
    judged = dict.fromkeys(row["dataset"] for row in rows if row["quality"] is not None)
    measures = ", ".join(f"{MEASURES.get(name, 'accuracy')} on {name}" for name in judged)
    all_samples, timed = (
        sample_counts([row for row in rows if (row["row"] in JUDGED) is answers_all])
        for answers_all in (True, False)
    )
    device = rows[0]["device"] if rows else "no device"
    forms: dict[str, list[str]] = {}
    for pairing in config.pairings:
        forms.setdefault(FORMS[config.in_chat_form(pairing)], []).append(pairing.name)
    notes = [
        f"One request at a time, {config.max_new_tokens} new tokens, {config.dtype}, {device}. "
        f"standard and CoS answer {all_samples} samples a set, the other methods the first "
        f"{timed}, and speeds are of those. Lists are of models, in their order.",
        "speed-up: decode tokens/s over standard collaborative decoding of the same requests; "
        "whole calls: the same with prefill, as the paper's code counts; 95 %: of these, bootstrap "
        "over samples, in the last run. speculative: naive with "
        "the bonus token, our reading of the paper's SD. predicted, law: calls and speed-up of "
        "the exact law at the mean alphas of all methods; with times: with those of scoring "
        "passes too.",
        "Of two models, by the paper's formulas. Thm. 3.1, 3.6: speed-up of naive and of CoS at "
        "the proposer's alpha. Cor. 3.4, 3.5: least speed-up of naive at its best draft length, "
        "with this proposer, and with the better of the two.",
        "nats: of the reference answers' tokens under the combination, at temperature 1. quality: "
        f"of the answers to {all_samples} samples a set, decoded once, "
        f"{measures or 'which nothing judges'}. same: answers equal to standard collaborative "
        "decoding's, at temperature 0.",
        *(f"Asked {form}: {'; '.join(names)}." for form, names in forms.items()),
        *([RELEASED] if config.released else []),
    ]
    for (name, dataset), row in {(row["pairing"], row["dataset"]): row for row in rows}.items():
        note = (
            f"{name} on {dataset}: alone {_list(row['held_out_nats_alone'], 3)} nats; standard "
            "decoding with each model on a device of its own would be "
            f"{row['speedup_parallel_at_most']:.2f} times as fast at most."
        )
        if left_out := row["left_out"]:
            note += f" Prompts left out, as longer than a model's context: {left_out}."
        notes.append(note)
    return notes


def sweep_table(sweep: Sequence[Record]) -> Table:
    """Return a line per combination of the sweep."""
    columns = {
        "alpha": cell("held_out_alpha", _list),
        "nats": cell("held_out_nats", number, 3),
        "quality": cell("quality", percent),
        **SPEEDS,
    }
    slowest = min(sweep, key=lambda row: row["speedup_call"])
    calls = min(sweep, key=lambda row: row["speedup_predicted"])
    notes = [
        "CoS against standard collaborative decoding. alpha: on the reference answers. quality: "
        "once a combination.",
        f"Never slower? Slowest whole calls: {slowest['speedup_call']:.2f} ({_point(slowest)}); "
        f"least by the exact law: {calls['speedup_predicted']:.2f} ({_point(calls)}).",
    ]
    lines = [
        ((row["pairing"], row["dataset"], row["combination"], _lengths(row)), row) for row in sweep
    ]
    labels = "models", "set", "combination", "gammas"
    return pivot("Quality and speed over the grid", labels, lines, columns, notes=notes)


def _point(row: Record) -> str:
    return f"{row['pairing']}, {row['combination']}, gammas {_lengths(row)}"


def _lengths(row: Record) -> str:
    return ",".join(map(str, row["gammas"]))


def _gammas(row: Record) -> str:
    if row["method"] == "alternating":
        return _lengths(row)
    return "-" if row["method"] == "standard" else str(row["gammas"][row["default_proposer"]])


def _list(values: Sequence[float | None], places: int = 2) -> str:
    return ", ".join(number(value, places) for value in values)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
