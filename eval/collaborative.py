"""Collaborative decoding: every method on every set, measured and predicted, and the sweep of quality and speed.

    python -m eval.collaborative gsm8k --data gsm8k=path/to/test.jsonl --out runs/collaborative
    python -m eval.collaborative visual --limit 8
    python -m eval.collaborative cos --pairings "Llama-3, T=0" --sets humaneval --sweep gamma:1,2,3,4,5

Answers are judged by accuracy (GSM8K, MMLU), ROUGE-L (CNN/DM), and pass@1 (HumanEval, with --run-code). Writes
results.json, records.jsonl and table.md (and sweep.png, with the `plots` extra) into --out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eval.lib.command_line import parse_command
from eval.lib.config import CollaborativeEvalConfig, data_places
from eval.lib.page import COLOURS, pyplot, save, stacked_axes
from eval.lib.pairings import GROUP, SWEEP, measure
from eval.lib.quality import MEASURES, quality, rouge_scorer
from eval.lib.report import Record, Run, Table, failures, number, percent
from jaxspec.command import input_errors, script_name


@dataclass(frozen=True)
class Options:
    out: Path = Path("runs/collaborative/PRESET")
    """Directory for results.json, records.jsonl, table.md and the figure."""
    run_code: bool = False
    """Run the programs that the models write for HumanEval against its tests. That is code that nobody has read: it has
    5 seconds, a gigabyte, and no network where Linux allows that, but otherwise your rights. Do so in a container."""


def main(args: Sequence[str] | None = None) -> None:
    """Measures collaborative decoding of the preset's pairings of models."""
    preset, config, options = parse_command(
        Options, __doc__, args, CollaborativeEvalConfig, "gsm8k"
    )
    for name in set(config.sets) & set(data_places(config.data)):
        config.samples(name, config.limit)  # what cannot be read is told before models load
    if "ROUGE-L" in map(MEASURES.get, config.sets):
        rouge_scorer()  # likewise, where it is not installed
    with Run(preset, vars(config) | vars(options), options.out) as run:
        run.restore(GROUP)
        for group in measure(config, partial(quality, run_code=options.run_code), run.rows):
            run.add(*group)
            run.write(*tables(config, run))
        run.write(*tables(config, run))
        draw_sweep([row for row in run.rows if row["row"] == SWEEP], run.folder)


def tables(config: CollaborativeEvalConfig, run: Run) -> list[Table]:
    """Return the table of methods, and where there is one that of the sweep."""
    rows, sweep = (
        [row for row in run.rows if (row["row"] == SWEEP) == swept] for swept in (False, True)
    )
    return [methods_table(config, rows, run.failed), *([sweep_table(sweep)] if sweep else [])]


def methods_table(
    config: CollaborativeEvalConfig, rows: Sequence[Record], failed: Sequence[Record] = ()
) -> Table:
    """Return a line per pairing, set and method."""
    columns = {
        "models": lambda row: row["pairing"],
        "set": lambda row: row["dataset"],
        "method": lambda row: row["row"],
        "gammas": _gammas,
        "alpha": lambda row: _list(row["alpha"]),
        "tokens/cycle": lambda row: number(row["tokens_per_cycle"]),
        "calls/token": lambda row: _list(row["calls_per_token"]),
        "predicted": lambda row: _list(row["calls_per_token_predicted"]),
        "tokens/s": lambda row: number(row["decode_tokens_per_second"], 1),
        "speed-up": lambda row: number(row["speedup_measured"]),
        "Thm.": lambda row: number(row["speedup_predicted"]),
        "with times": lambda row: number(row["speedup_predicted_with_verify"]),
        "nats": lambda row: number(row["held_out_nats"], 3),
        "quality": lambda row: percent(row["quality"]),
        "same": lambda row: percent(row["token_identity_rate"]),
    }
    papers = [paper for paper in config.published if paper.is_of(config)]
    judged = dict.fromkeys(row["dataset"] for row in rows if row["quality"] is not None)
    measures = (
        ", ".join(f"{MEASURES.get(name, 'accuracy')} on {name}" for name in judged)
        or "which nothing judges"
    )
    alone = {(row["pairing"], row["dataset"]): row for row in rows}
    device = rows[0]["device"] if rows else "no device"
    notes = [
        f"One request at a time, {config.max_new_tokens} new tokens, {config.dtype}, {device}. Times are of "
        f"{min(config.timed, config.limit)} samples a set, the fastest of {config.repeats} interleaved runs. Lists are "
        "of models, in their order.",
        "speed-up: decode tokens/s over standard collaborative decoding of the same requests. predicted, Thm.: calls "
        "and speed-up of the exact law at the mean alphas; with times: with those of scoring passes too.",
        "nats: of the reference answers' tokens under the combination, at temperature 1. quality: of the answers to "
        f"{config.limit} samples a set, decoded once, {measures}. same: answers equal to standard "
        "collaborative decoding's, at temperature 0.",
    ]
    notes += [f"paper: {paper.source}." for paper in papers]
    notes += [
        f"{name} on {dataset}: alone {_list(row['held_out_nats_alone'], 3)} nats; standard decoding with each model on "
        f"a device of its own would be {row['speedup_parallel_at_most']:.2f} times as fast at most."
        + (
            f" Prompts left out, as longer than a model's context: {row['left_out']}."
            if row["left_out"]
            else ""
        )
        for (name, dataset), row in alone.items()
    ]
    cells = []
    for row in rows:
        cells.append([cell(row) for cell in columns.values()])
        for paper in papers:
            if (
                printed := paper.numbers[1]
                .get(f"{row['pairing']}, {row['row']}", {})
                .get(row["dataset"])
            ):
                told = {
                    "models": row["pairing"],
                    "set": row["dataset"],
                    "method": f"{row['row']}, paper",
                }
                told["speed-up"] = number(printed)
                cells.append([told.get(column, "-") for column in columns])
    return Table("Collaborative decoding", list(columns), cells, [*notes, *failures(failed)])


def sweep_table(sweep: Sequence[Record]) -> Table:
    """Return a line per combination of the grid."""
    columns = {
        "models": lambda row: row["pairing"],
        "set": lambda row: row["dataset"],
        "combination": lambda row: row["combine"],
        "gammas": lambda row: ",".join(map(str, row["gammas"])),
        "alpha": lambda row: _list(row["held_out_alpha"]),
        "nats": lambda row: number(row["held_out_nats"], 3),
        "quality": lambda row: percent(row["quality"]),
        "speed-up": lambda row: number(row["speedup_measured"]),
        "Thm.": lambda row: number(row["speedup_predicted"]),
        "with times": lambda row: number(row["speedup_predicted_with_verify"]),
    }
    slowest = min(sweep, key=lambda row: row["speedup_measured"])
    calls = min(sweep, key=lambda row: row["speedup_predicted"])
    notes = [
        "CoS against standard collaborative decoding. alpha: on the reference answers. quality: once a combination.",
        f"Never slower? Slowest measured: {slowest['speedup_measured']:.2f} ({_point(slowest)}); "
        f"least by the exact law: {calls['speedup_predicted']:.2f} ({_point(calls)}).",
    ]
    cells = [[cell(row) for cell in columns.values()] for row in sweep]
    return Table("Quality and speed over the grid", list(columns), cells, notes)


def _point(row: Record) -> str:
    return f"{row['pairing']}, {row['combine']}, gammas {','.join(map(str, row['gammas']))}"


def draw_sweep(sweep: Sequence[Record], out: Path) -> None:
    """Draw lines over the dial: nats of held-out answers above, speed-up below; nothing without matplotlib."""
    if not sweep or pyplot() is None:
        return
    names = list(dict.fromkeys((row["pairing"], row["dataset"]) for row in sweep))
    figure, axes = stacked_axes(2 * len(names), 6.0, 2.0, alike=False)
    fields = (
        ("speedup_measured", "measured", "-"),
        ("speedup_predicted_with_verify", "exact law with times", "--"),
    )
    for (pairing, dataset), likely, speed in zip(names, axes[::2], axes[1::2], strict=True):
        found = [row for row in sweep if (row["pairing"], row["dataset"]) == (pairing, dataset)]
        dial = found[0]["dial"]
        nats = {row["value"]: row["held_out_nats"] for row in found}
        likely.plot(*zip(*nats.items()), marker="o", color=COLOURS[0])
        likely.set_ylabel("nats a token")
        likely.set_title(f"{pairing}, {dataset}", loc="left", fontsize=10)
        lines: dict[str, list[Record]] = {}
        for row in found:
            lines.setdefault("" if dial == "gamma" else f"gammas {row['gammas']}, ", []).append(row)
        for (name, line), colour in zip(lines.items(), COLOURS):
            for field, label, style in fields:
                values = [row["value"] for row in line], [row[field] for row in line]
                speed.plot(*values, style, marker="o", color=colour, label=name + label)
        speed.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        speed.set_ylabel("speed-up")
        speed.set_xlabel("weight of the proposer" if dial == "lambda" else dial)
        speed.legend(frameon=False, fontsize=8, ncols=2)
    save(figure, out / "sweep.png")


def _gammas(row: Record) -> str:
    if row["method"] == "alternating":
        return ",".join(map(str, row["gammas"]))
    return "-" if row["method"] == "standard" else str(row["gammas"][row["proposer"]])


def _list(values: Sequence[float | None], places: int = 2) -> str:
    return ", ".join(number(value, places) for value in values)


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
