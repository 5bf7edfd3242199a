"""Draw the figure of `eval.latency`: TABED's Figure 9 and IbED's Figure 3."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.lib.output.plotting import COLOURS, put_legend, pyplot, save, stacked_axes
from eval.lib.output.tables import Record

STAGES = {"tower": "vision tower", "prefill": "prefill", "decoding": "decoding"}


def draw_inference_times(rows: Sequence[Record], folder: Path, name: str) -> None:
    """Draw the target's times of an answer by images; skip it without images or matplotlib."""
    bars = [row for row in rows if row["kind"] == "images" and row.get("target_tower_ms")]
    if bars and pyplot() is not None:
        save(inference_times(bars), folder, "inference_times", name)


def inference_times(bars: Sequence[Record]) -> Any:
    """Draw a bar for each number of images, of tower, prefill and decoding."""
    figure, (axis,) = stacked_axes(1, 6.0, 3.0)
    bottoms = [0.0] * len(bars)
    for (stage, label), colour in zip(STAGES.items(), (COLOURS[1], COLOURS[0], COLOURS[2])):
        seconds = [row[f"target_{stage}_ms"] / 1e3 for row in bars]
        axis.bar(range(len(bars)), seconds, 0.6, bottom=bottoms, label=label, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, seconds)]
    labels = (
        f"{row['images']} image{'s' * (row['images'] > 1)}\n{row['answer']} new tokens"
        for row in bars
    )
    axis.set_xticks(range(len(bars)), labels)
    axis.set_ylabel("seconds")
    put_legend(figure, axis)
    return figure
