"""Tables and the figure of collaborative decoding, in the paper's form: methods by sets."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.evaluation.config import CollaborativeEvalConfig
from jaxspec.evaluation.figures import COLOURS, panels, save
from jaxspec.evaluation.tables import Table

Record = dict[str, Any]


def methods_table(config: CollaborativeEvalConfig, rows: Sequence[Record]) -> Table:
    """A line per pairing, set and method."""
    header = [
        *("models", "set", "method", "gammas", "alpha", "tokens/cycle", "calls/token", "predicted"),
        *("speed-up", "Thm.", "with times", "nats", "right", "same"),
    ]
    cells = []
    for row in rows:
        cells.append(
            [
                row["pairing"],
                row["dataset"],
                row["row"],
                _gammas(row),
                _list(row["alpha"]),
                _number(row["tokens_per_cycle"]),
                _list(row["calls_per_token"]),
                _list(row["calls_per_token_predicted"]),
                _number(row["speedup_measured"]),
                _number(row["speedup_predicted"]),
                _number(row["speedup_predicted_with_verify"]),
                _number(row["held_out_nats"], 3),
                _percent(row["accuracy"]),
                _percent(row["token_identity_rate"]),
            ]
        )
    alone = dict.fromkeys(
        (row["pairing"], row["dataset"], tuple(row["held_out_nats_alone"]), row["speedup_parallel_at_most"])
        for row in rows
    )
    notes = [
        f"{config.limit} samples a set one by one, {config.max_new_tokens} new tokens, {config.dtype}, "
        f"{rows[0]['device']}; the fastest of {config.repeats} interleaved runs. Lists are of models, in their order.",
        "speed-up: decode tokens/s over standard collaborative decoding of the same requests. predicted, Thm.: calls "
        "and speed-up of the exact law at the mean alphas; with times: with those of scoring passes too.",
        "nats: of the reference answers' tokens under the combination, at temperature 1. right: final numbers that are "
        "the accepted one. same: answers equal to standard collaborative decoding's, at temperature 0.",
    ]
    notes += [
        f"{name} on {dataset}: alone {_list(nats, 3)} nats; standard decoding with each model on a device of its own "
        f"would be {most:.2f} times as fast at most."
        for name, dataset, nats, most in alone
    ]
    return "Collaborative decoding", header, cells, notes


def dial_table(config: CollaborativeEvalConfig, dial: Sequence[Record]) -> Table:
    """A line per combination of the grid."""
    header = ["models", "set", "combination", "alpha", "nats", "right", "speed-up", "Thm.", "with times"]
    cells = [
        [
            row["pairing"],
            row["dataset"],
            row["combine"],
            _list(row["held_out_alpha"]),
            _number(row["held_out_nats"], 3),
            _percent(row["accuracy"]),
            _number(row["speedup_measured"]),
            _number(row["speedup_predicted"]),
            _number(row["speedup_predicted_with_verify"]),
        ]
        for row in dial
    ]
    slowest = min(dial, key=lambda row: row["speedup_measured"])
    calls = min(dial, key=lambda row: row["speedup_predicted"])
    notes = [
        "CoS with 1 proposal each against standard collaborative decoding. alpha: on the reference answers.",
        f"Never slower? Slowest measured: {slowest['speedup_measured']:.2f} ({slowest['combine']}, "
        f"{slowest['pairing']}); "
        f"least by the theorem: {calls['speedup_predicted']:.2f} ({calls['combine']}, {calls['pairing']}).",
    ]
    return "Quality and speed over the grid", header, cells, notes


def draw_dial(dial: Sequence[Record], out: Path) -> Path | None:
    """Lines over lambda or mu: nats of held-out answers above, speed-up below; None without matplotlib."""
    if find_spec("matplotlib") is None or not dial:
        return None
    import matplotlib

    matplotlib.use("Agg")
    names = list(dict.fromkeys((row["pairing"], row["dataset"]) for row in dial))
    figure, axes = panels(2 * len(names), 6.0, 2.0, alike=False)
    for (pairing, dataset), quality, speed in zip(names, axes[::2], axes[1::2], strict=True):
        found = [row for row in dial if (row["pairing"], row["dataset"]) == (pairing, dataset)]
        values = [row["value"] for row in found]
        quality.plot(values, [row["held_out_nats"] for row in found], marker="o", color=COLOURS[0])
        quality.set_ylabel("nats a token")
        quality.set_title(f"{pairing}, {dataset}", loc="left", fontsize=10)
        for i, (field, label) in enumerate(
            [
                ("speedup_measured", "measured"),
                ("speedup_predicted", "exact law"),
                ("speedup_predicted_with_verify", "with times"),
            ]
        ):
            speed.plot(values, [row[field] for row in found], marker="o", color=COLOURS[i], label=label)
        speed.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        speed.set_ylabel("speed-up")
        speed.set_xlabel("weight of the first model" if "weighted" in found[0]["combine"] else "mu")
        speed.legend(frameon=False, fontsize=8, ncols=3)
    return save(figure, out / "dial.png")


def _gammas(row: Record) -> str:
    if row["method"] == "alternating":
        return ",".join(map(str, row["gammas"]))
    return "-" if row["method"] == "standard" else str(row["gammas"][row["proposer"]])


def _list(values: Sequence[float | None], places: int = 2) -> str:
    return ", ".join(_number(value, places) for value in values)


def _number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:.{places}f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
