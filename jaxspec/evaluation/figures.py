"""Figures of measured rows (need the `plots` extra; without it nothing is drawn)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.evaluation.config import EvalConfig

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: told apart by colour-blind readers too."""


def draw_block_efficiency(config: EvalConfig, rows: Sequence[dict[str, Any]], path: Path) -> Path | None:
    """Grouped bars: tokens per target pass of every row, by set, a panel a turn. None without matplotlib."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    width = max(6.0, 0.9 * len(config.twins) + 1)
    figure, axes = plt.subplots(
        len(config.turns), 1, figsize=(width, 2.6 * len(config.turns)), sharex=True, sharey=True, squeeze=False
    )
    bar = 0.8 / len(config.rows)
    for axis, turn in zip(axes[:, 0], config.turns, strict=True):
        for i, row in enumerate(config.rows):
            lengths = {
                r["dataset"]: r["mean_acceptance_length"] for r in rows if r["row"] == row.name and r["turn"] == turn
            }
            places = [x - 0.4 + bar * (i + 0.5) for x in range(len(config.twins))]
            heights = [lengths[name] or 0.0 for name in config.twins]
            axis.bar(places, heights, 0.92 * bar, label=row.name, color=COLOURS[i % len(COLOURS)])
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_ylabel("tokens per target pass")
        axis.set_title(f"turn {turn}", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xticks(range(len(config.twins)), config.twins)
    axes[0, 0].legend(frameon=False, ncols=len(config.rows), loc="lower right", bbox_to_anchor=(1, 1.0))
    figure.tight_layout()
    fresh = path.with_name(f".{path.name}.tmp")
    figure.savefig(fresh, dpi=150, format="png")
    plt.close(figure)
    fresh.replace(path)
    return path
