"""Draw the sweep of `eval.collaborative`; of an ensemble's weight it is CoS's Figure 8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eval.lib.output.plotting import COLOURS, pyplot, save, stacked_axes
from eval.lib.output.tables import Record, grouped

SPEEDS = (
    ("speedup_call", "whole calls", "-"),
    ("speedup_measured", "decoding", "--"),
    ("speedup_predicted_with_verify", "exact law with times", ":"),
)
"""Field, label and dashes of each line of speed-ups."""


def draw_sweep(sweep: Sequence[Record], folder: Path) -> None:
    """Draw two panels for each pairing and set: quality of the answers, and speed-up.

    Answers that nothing judges have nats of the reference answers in place of quality. Without a
    sweep or matplotlib nothing is drawn.
    """
    if not sweep or pyplot() is None:
        return
    names = list(dict.fromkeys((row["pairing"], row["dataset"]) for row in sweep))
    figure, axes = stacked_axes(2 * len(names), 6.0, 2.0, alike=False)
    for (pairing, dataset), quality, speed in zip(names, axes[::2], axes[1::2], strict=True):
        rows = [row for row in sweep if (row["pairing"], row["dataset"]) == (pairing, dataset)]
        dial, judged = rows[0]["dial"], rows[0]["quality"] is not None
        scores = {
            row["value"]: 100 * row["quality"] if judged else row["held_out_nats"] for row in rows
        }
        quality.plot(*zip(*scores.items()), marker="o", color=COLOURS[0])
        quality.set_ylabel("quality, %" if judged else "nats a token of references")
        quality.set_title(f"{pairing}, {dataset}", loc="left", fontsize=10)
        lines = grouped(
            rows, lambda row: "" if row["dial"] == "gamma" else f"gammas {row['gammas']}, "
        )
        for (name, line), colour in zip(lines.items(), COLOURS):
            for field, label, style in SPEEDS:
                values = [row["value"] for row in line], [row[field] for row in line]
                speed.plot(*values, style, marker="o", color=colour, label=name + label)
        speed.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        speed.set_ylabel("speed-up")
        speed.set_xlabel("weight, lambda" if dial == "lambda" else dial)
        speed.legend(frameon=False, fontsize=8, ncols=2)
    save(figure, folder, "sweep")
