"""Draw the figures of a run, as PNG files. They need the `plots` extra; without it nothing is
drawn.

`weight_trajectory` is TABED's Figures 3 and 4, `overlap` IbED's Figure 5 with bars in place of
circles, and `accepted_over_time` its Figure 11. `block_times` divides a block into drafting and
verification, which no paper draws; TABED's Figure 9 is drawn by `eval.latency`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from eval.lib.drafts.config import EvalConfig
from eval.lib.output.intervals import set_interval
from eval.lib.output.plotting import (
    COLOURS,
    bar_style,
    line_style,
    put_legend,
    pyplot,
    save,
    stacked_axes,
)
from eval.lib.output.tables import Record, mean

WIDTH = 11.0
"""Largest width in inches of a row of bars; more sets go into another panel."""
ACCEPTED, SILENT = "#99cc99", "#dddddd"
"""Grounds of a trajectory: weights that the target accepts, and tokens that no view drafted."""


def draw_all(
    config: EvalConfig, rows: Sequence[Record], records: Sequence[Record], out: Path
) -> list[Path]:
    """Draw each figure that has data as a PNG file; draw nothing without matplotlib."""
    if not rows or pyplot() is None:
        return []
    figures = {
        "block_efficiency": block_efficiency(config, rows, records),
        "acceptance_by_position": acceptance_by_position(rows),
        "block_times": block_times(rows),
        "weight_trajectory": weight_trajectory(records),
        "overlap": overlap(records),
        "accepted_over_time": accepted_over_time(records),
    }
    return [save(figure, out, name, config.pair) for name, figure in figures.items() if figure]


def block_efficiency(config: EvalConfig, rows: Sequence[Record], records: Sequence[Record]) -> Any:
    """Draw bars of tokens per pass with 95 % intervals, by set, with a panel for each turn."""
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    names = [row.name for row in config.rows]
    wide = max(0.75, 0.17 * len(names) + 0.1)  # inches that a set takes
    fitting = min(len(sets), max(1, int(WIDTH / wide)))
    fitting = -(-len(sets) // -(-len(sets) // fitting))  # panels of about as many sets each
    groups = [
        (turn, sets[first : first + fitting])
        for turn, first in product(config.turns, range(0, len(sets), fitting))
    ]
    figure, axes = stacked_axes(len(groups), max(6.0, wide * fitting + 1.2), 2.6)
    bar = 0.8 / len(names)
    for axis, (turn, group) in zip(axes, groups):
        for i, name in enumerate(names):
            line, answers = (
                [each for each in measured if each["row"] == name and each["turn"] == turn]
                for measured in (rows, records)
            )
            centres = [x - 0.4 + bar * (i + 0.5) for x in range(len(group))]
            cells = ([row for row in line if row["dataset"] == dataset] for dataset in group)
            heights = [mean(cell, "tokens_per_pass") or 0.0 for cell in cells]
            spans = [
                (height - low, high - height)
                for dataset, height in zip(group, heights)
                for low, high in [set_interval(answers, dataset) if height else (0.0, 0.0)]
            ]
            axis.bar(centres, heights, 0.92 * bar, yerr=np.abs(spans).T, label=name, **bar_style(i))
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_xlim(-0.5, fitting - 0.5)
        axis.set_ylabel("tokens per pass")
        if group[0] == sets[0]:
            axis.set_title(f"turn {turn}", loc="left", fontsize=10)
        axis.set_xticks(range(len(group)), group)
    put_legend(figure, axes[0])
    return figure


def acceptance_by_position(rows: Sequence[Record]) -> Any:
    """Draw the acceptance at each place of the block, given acceptance of all places before."""
    figure, (axis,) = stacked_axes(1, 6.0, 3.2)
    names = list(dict.fromkeys(row["row"] for row in rows))
    for i, name in enumerate(names):
        by_place = zip(
            *(r["conditional_acceptance_rate_per_position"] for r in rows if r["row"] == name)
        )
        measured = ([rate for rate in rates if rate is not None] for rates in by_place)
        means = [float(np.mean(rates)) if rates else np.nan for rates in measured]
        x = np.arange(1, len(means) + 1) + _shift(i, len(names))
        axis.plot(x, means, label=name, **line_style(i))
    axis.set_xlabel("place in the block")
    axis.set_ylabel("accepted, given all before were")
    axis.xaxis.get_major_locator().set_params(integer=True)
    put_legend(figure, axis)
    return figure


def block_times(rows: Sequence[Record]) -> Any:
    """Draw the milliseconds of a block, its draft passes and target pass, and of a plain pass."""
    timed = [row for row in rows if row.get("draft_ms") is not None]
    if not timed:
        return None
    names = list(dict.fromkeys(row["row"] for row in timed))
    figure, (axis,) = stacked_axes(1, 6.0, 0.32 * len(names) + 1.2)
    for y, name in enumerate(names):
        first = next(row for row in timed if row["row"] == name)
        drafting = first["gamma"] * first["draft_ms"]
        labels = ("draft", "verify") if y == 0 else (None, None)
        axis.barh(y, drafting, color=COLOURS[0], label=labels[0])
        axis.barh(y, first["verify_ms"], left=drafting, color=COLOURS[2], label=labels[1])
    axis.axvline(timed[0]["target_ms"], color="black", linestyle=":", label="one plain target pass")
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds of one block")
    put_legend(figure, axis)
    return figure


def weight_trajectory(records: Sequence[Record]) -> Any:
    """Draw each view's weight along one answer, on the first view's weights that are accepted.

    Each learned weighting gets a panel, with the answer over which its weights move most. Of two
    views the second has the rest, so only the first is drawn. A token is accepted where the line of
    the first view is within the shaded range.
    """
    learning = [record for record in _traced(records) if movement(record) > 1e-6]
    names = list(dict.fromkeys(record["row"] for record in learning))[:6]
    if not names:
        return None
    answers = [
        max((record for record in learning if record["row"] == name), key=movement)
        for name in names
    ]
    views = list(dict.fromkeys(view for record in answers for view in record["views"]))
    labelled: set[str] = set()
    figure, axes = stacked_axes(len(answers), 8.0, 1.7)
    for axis, record in zip(axes, answers):
        trace = record["trace"]
        for x, (agree, shares) in enumerate(zip(trace["agree"], trace["shares"])):
            if shares is not None:
                low, high = shares
                axis.bar(x, high - low, 1, bottom=low, color=ACCEPTED, linewidth=0)
            elif agree is None:
                axis.axvspan(x - 0.5, x + 0.5, color=SILENT, linewidth=0)
        lines = dict(zip(record["views"], np.asarray(trace["weights"]).T))
        for view in record["views"][: 1 if len(lines) == 2 else None]:
            labelled.add(view)
            style = _band(views.index(view), len(views))
            axis.step(range(len(lines[view])), lines[view], where="mid", **style)
        axis.set_title(
            f"{record['row']}, {record['sample']}, turn {record['turn']}; range of "
            f"{record['views'][0]}",
            loc="left",
            fontsize=9,
        )
        axis.set_xlim(-0.5, len(trace["place"]) - 0.5)
        axis.set_ylim(-0.06, 1.06)
        axis.set_ylabel("weight")
    for i, view in enumerate(views):
        if view in labelled:
            axes[0].plot([], [], label=view, **_band(i, len(views)))
    for label, colour in (
        ("weights of the first view that the target accepts", ACCEPTED),
        ("no view drafted this token", SILENT),
    ):
        axes[0].fill_between([], [], color=colour, linewidth=0, label=label)
    axes[-1].set_xlabel("token of the answer")
    put_legend(figure, axes[0])
    return figure


def movement(record: Record) -> float:
    """Return the sum of the standard deviations of all views' weights over an answer."""
    return float(np.std(np.asarray(record["trace"]["weights"]), axis=0).sum())


def overlap(records: Sequence[Record]) -> Any:
    """Draw how many verified tokens each group of views predicted, with a panel for each set."""
    traced = _traced(records)
    widest = max(traced, key=lambda record: len(record["views"]), default=None)
    if widest is None or len(widest["views"]) < 2:
        return None
    views = widest["views"]
    counts: dict[str, Counter[tuple[bool, ...]]] = {}
    for record in traced:
        if record["row"] == widest["row"]:
            agree = (tuple(map(bool, each)) for each in record["trace"]["agree"] if each)
            counts.setdefault(record["dataset"], Counter()).update(agree)
    counts = {name: count for name, count in counts.items() if count}
    if not counts:
        return None
    groups = [group for group, _ in sum(counts.values(), Counter()).most_common()]
    figure, axes = stacked_axes(len(counts), max(5.0, 0.5 * len(groups) + 1), 1.9)
    for axis, (name, count) in zip(axes, counts.items()):
        shares = [100 * count[group] / count.total() for group in groups]
        axis.bar(range(len(groups)), shares, color=COLOURS[0])
        labels = (
            "".join(view[0] for view, right in zip(views, group) if right) for group in groups
        )
        axis.set_xticks(range(len(groups)), [label or "none" for label in labels])
        axis.set_ylabel("% of verified tokens", fontsize=8)
        axis.set_title(f"{name}, row {widest['row']}", loc="left", fontsize=9)
    axes[-1].set_xlabel("views whose likeliest token was the target's")
    return figure


def accepted_over_time(records: Sequence[Record]) -> Any:
    """Draw how many drafts are accepted in each tenth of the answers, with a panel for each set."""
    traced = _traced(records)
    if not traced:
        return None
    sets, names = (list(dict.fromkeys(r[field] for r in traced)) for field in ("dataset", "row"))
    figure, axes = stacked_axes(len(sets), 6.0, 1.9, alike=False)
    bins, edges = 10, np.linspace(0, 1, 11)
    for axis, dataset in zip(axes, sets):
        for i, name in enumerate(names):
            counts = np.zeros(bins)
            for record in traced:
                if (record["dataset"], record["row"]) == (dataset, name):
                    places = np.asarray(record["trace"]["place"])
                    at = np.arange(len(places)) * bins // len(places)
                    np.add.at(counts, at, places >= 0)
            style = {key: line_style(i)[key] for key in ("color", "linestyle")}
            axis.stairs(counts, edges + _shift(i, len(names)) / bins / 4, label=name, **style)
        axis.set_title(dataset, loc="left", fontsize=9)
        axis.set_ylabel("accepted drafts", fontsize=8)
    axes[-1].set_xlabel("place in the answer")
    put_legend(figure, axes[0])
    return figure


def _traced(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.get("trace") and record["trace"]["place"]]


def _shift(i: int, count: int) -> float:
    """Return how far the i-th line moves, so that lines of equal values stay visible."""
    return 0.4 * ((i + 0.5) / count - 0.5)


def _band(i: int, count: int) -> Record:
    """Return the i-th line's style; earlier lines are thicker and show below later ones."""
    return {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.2 + 1.1 * (count - 1 - i)}
