"""Figures of a run, as PNG files. They need the `plots` extra; without it nothing is drawn.

`stage_times` divides a block into drafting and verification, which no paper draws: TABED's Figure 9
and IbED's Figure 3 divide an answer into tower, prefill and decoding, by images.
`weight_trajectory` has the weights of TABED's Figures 3 and 4, and whether the drafts that they
gave were accepted, where the papers shade all weights that would have been. `overlap` is IbED's
Figure 5 and `accepted_over_time` its Figure 11, each of all sets of the run together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from eval.lib.drafts.config import EvalConfig
from eval.lib.output.tables import Record, mean
from jaxspec.files import whole

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: colour-blind readers can distinguish them."""
MARKERS = "os^Dv<>P*X"
WIDTH = 11.0
"""Largest width in inches of a row of bars; more sets go into another panel."""
TITLES = {
    "block_efficiency": "Tokens a pass of the target (dotted: plain decoding)",
    "acceptance_by_position": "How far into a block drafts hold: accepted at each place, given "
    "that all before were",
    "stage_times": "Where the time of one block goes: all draft passes, and the target's pass "
    "that verifies them",
    "weight_trajectory": "Weights of the views, each row along the answer over which its weights "
    "move most",
    "overlap": "Which views had the target's token as their likeliest",
    "accepted_over_time": "Accepted drafts along the answers, from first token (0) to last (1)",
}
"""Title of each figure, by file name."""


def draw_all(
    config: EvalConfig, rows: Sequence[Record], records: Sequence[Record], out: Path
) -> list[Path]:
    """Draw each figure that has data as a PNG file; draw nothing without matplotlib."""
    if not rows or pyplot() is None:
        return []
    drawn = {
        "block_efficiency": block_efficiency(config, rows),
        "acceptance_by_position": acceptance_by_position(rows),
        "stage_times": stage_times(rows),
        "weight_trajectory": weight_trajectory(records),
        "overlap": overlap(records),
        "accepted_over_time": accepted_over_time(records),
    }
    written = []
    for name, figure in drawn.items():
        if figure is not None:
            figure.set_figheight(figure.get_figheight() + 0.3)
            figure.suptitle(f"{TITLES[name]}\n{config.pair}", fontsize=9)
            written.append(save(figure, out / f"{name}.png"))
    return written


def block_efficiency(config: EvalConfig, rows: Sequence[Record]) -> Any:
    """Draw bars of tokens a pass, grouped by set, with a panel for each turn."""
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    names = [row.name for row in config.rows]
    wide = max(0.75, 0.17 * len(names) + 0.1)  # inches that a set takes
    shown = min(len(sets), max(1, int(WIDTH / wide)))
    shown = -(-len(sets) // -(-len(sets) // shown))  # panels of about as many sets each
    groups = [
        (turn, sets[at : at + shown]) for turn in config.turns for at in range(0, len(sets), shown)
    ]
    figure, axes = stacked_axes(len(groups), max(6.0, wide * shown + 1.2), 2.6)
    bar = 0.8 / len(names)
    for axis, (turn, group) in zip(axes, groups):
        for i, name in enumerate(names):
            found = [row for row in rows if row["row"] == name and row["turn"] == turn]
            places = [x - 0.4 + bar * (i + 0.5) for x in range(len(group))]
            cells = ([row for row in found if row["dataset"] == dataset] for dataset in group)
            heights = [mean(cell, "tokens_per_pass") or 0.0 for cell in cells]
            axis.bar(places, heights, 0.92 * bar, label=name, **_style(i))
        axis.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_xlim(-0.5, shown - 0.5)
        axis.set_ylabel("tokens a pass")
        if group[0] == sets[0]:
            axis.set_title(f"turn {turn}", loc="left", fontsize=10)
        axis.set_xticks(range(len(group)), group)
    _legend(figure, axes[0])
    return figure


def acceptance_by_position(rows: Sequence[Record]) -> Any:
    """Draw the acceptance at each place of the block, given acceptance of all places before."""
    figure, (axis,) = stacked_axes(1, 6.0, 3.2)
    names = list(dict.fromkeys(row["row"] for row in rows))
    for i, name in enumerate(names):
        by_place = zip(
            *(r["conditional_acceptance_rate_per_position"] for r in rows if r["row"] == name)
        )
        known = [[rate for rate in place if rate is not None] for place in by_place]
        means = [float(np.mean(place)) if place else np.nan for place in known]
        axis.plot(
            np.arange(1, len(means) + 1) + _aside(i, len(names)), means, label=name, **_line(i)
        )
    axis.set_xlabel("place in the block")
    axis.set_ylabel("accepted, given all before were")
    axis.xaxis.get_major_locator().set_params(integer=True)
    _legend(figure, axis)
    return figure


def stage_times(rows: Sequence[Record]) -> Any:
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
    _legend(figure, axis)
    return figure


def weight_trajectory(records: Sequence[Record]) -> Any:
    """Draw each view's weight along one answer, on green for accepted drafts, red for others.

    Each learned weighting gets a panel, with the answer over which its weights move most.
    """
    learning = [record for record in _traced(records) if movement(record) > 1e-6]
    names = list(dict.fromkeys(record["row"] for record in learning))[:6]
    if not names:
        return None
    shown = [
        max((record for record in learning if record["row"] == name), key=movement)
        for name in names
    ]
    views = list(dict.fromkeys(view for record in shown for view in record["views"]))
    figure, axes = stacked_axes(len(shown), 8.0, 1.7)
    grounds = {"accepted draft": COLOURS[2], "the target's own token": COLOURS[1]}
    for axis, record in zip(axes, shown):
        places = record["trace"]["place"]
        for x, place in enumerate(places):
            axis.axvspan(
                x - 0.5, x + 0.5, color=list(grounds.values())[place < 0], alpha=0.15, linewidth=0
            )
        for view, weights in zip(record["views"], np.asarray(record["trace"]["weights"]).T):
            axis.step(
                range(len(weights)), weights, where="mid", **_band(views.index(view), len(views))
            )
        axis.set_title(
            f"{record['row']}, {record['sample']}, turn {record['turn']}", loc="left", fontsize=9
        )
        axis.set_xlim(-0.5, len(places) - 0.5)
        axis.set_ylim(-0.06, 1.06)
        axis.set_ylabel("weight")
    for i, view in enumerate(views):
        axes[0].plot([], [], label=view, **_band(i, len(views)))
    for words, colour in grounds.items():
        axes[0].fill_between([], [], color=colour, alpha=0.3, linewidth=0, label=words)
    axes[-1].set_xlabel("token of the answer")
    _legend(figure, axes[0])
    return figure


def movement(record: Record) -> float:
    """Return the sum of the standard deviations of all views' weights over an answer."""
    return float(np.std(np.asarray(record["trace"]["weights"]), axis=0).sum())


def overlap(records: Sequence[Record]) -> Any:
    """Draw how many verified tokens each set of views predicted."""
    traced = _traced(records)
    if not traced:
        return None
    widest = max(traced, key=lambda record: len(record["views"]))
    views = widest["views"]
    if len(views) < 2:
        return None
    counts: Counter[tuple[bool, ...]] = Counter()
    for record in traced:
        if record["row"] == widest["row"]:
            trace = record["trace"]
            drafted = [a for a, place in zip(trace["agree"], trace["place"]) if a is not None]
            counts.update(tuple(map(bool, agree)) for agree in drafted)
    total = sum(counts.values())
    if not total:
        return None
    ranked = counts.most_common()
    figure, (axis,) = stacked_axes(1, max(5.0, 0.5 * len(ranked) + 1), 3.0)
    axis.bar(range(len(ranked)), [100 * n / total for _, n in ranked], color=COLOURS[0])
    labels = ["".join(v[0] for v, right in zip(views, who) if right) or "none" for who, _ in ranked]
    axis.set_xticks(range(len(ranked)), labels)
    axis.set_xlabel("views whose likeliest token was the target's")
    axis.set_ylabel("% of verified tokens")
    axis.set_title(f"row {widest['row']}", loc="left", fontsize=9)
    return figure


def accepted_over_time(records: Sequence[Record], bins: int = 10) -> Any:
    """Draw the share of accepted drafts along the answers' normalised length."""
    traced = _traced(records)
    if not traced:
        return None
    figure, (axis,) = stacked_axes(1, 6.0, 3.0)
    names = list(dict.fromkeys(record["row"] for record in traced))
    for i, name in enumerate(names):
        accepted, all_tokens = np.zeros(bins), np.zeros(bins)
        for record in traced:
            places = np.asarray(record["trace"]["place"])
            if record["row"] == name and len(places):
                at = np.arange(len(places)) * bins // len(places)
                np.add.at(accepted, at, places >= 0)
                np.add.at(all_tokens, at, 1)
        share = accepted / np.maximum(all_tokens, 1)
        axis.plot(
            (np.arange(bins) + 0.5 + _aside(i, len(names))) / bins, share, label=name, **_line(i)
        )
    axis.set_xlabel("place in the answer")
    axis.set_ylabel("share of accepted drafts")
    _legend(figure, axis)
    return figure


def _traced(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.get("trace") and record["trace"]["place"]]


def _style(i: int) -> Record:
    """Return the fill of the i-th bar: hatched once all colours are used."""
    hatch = ("", "///", "...")[i // len(COLOURS) % 3]
    return {"color": COLOURS[i % len(COLOURS)], "hatch": hatch, "edgecolor": "white"}


def _line(i: int) -> Record:
    """Return the i-th line's style, with its own marker, and dashed once all colours are used."""
    dashes, marker = ("-", "--", ":")[i // len(COLOURS) % 3], MARKERS[i % len(MARKERS)]
    return {
        "color": COLOURS[i % len(COLOURS)],
        "linestyle": dashes,
        "marker": marker,
        "markersize": 4,
        "linewidth": 1,
    }


def _aside(i: int, count: int) -> float:
    """Return the shift of the i-th line, so that lines of equal values stay visible."""
    return 0.4 * ((i + 0.5) / count - 0.5)


def _band(i: int, count: int) -> Record:
    """Return the i-th line's style; earlier lines are thicker and show below later ones."""
    return {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.2 + 1.1 * (count - 1 - i)}


def _legend(figure: Any, axis: Any) -> None:
    """Put the legend below the axes, in as many columns as fit."""
    handles, labels = axis.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (0.65 + 0.06 * max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(labels) // columns))
    figure.legend(
        handles, labels, frameon=False, fontsize=8, ncols=columns, loc="outside lower center"
    )


def stacked_axes(
    count: int, width: float, height: float, alike: bool = True
) -> tuple[Any, list[Any]]:
    """Return a figure and a column of axes of this height; `alike` shares the y range."""
    figure, axes = pyplot().subplots(
        count,
        1,
        figsize=(width, height * count + 0.3),
        sharey=alike,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes[:, 0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[:, 0])


def pyplot() -> Any:
    """Return matplotlib.pyplot with the file backend; None if it is not installed."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, path: Path) -> Path:
    """Write the figure as a PNG file and return its path."""
    with whole(path) as fresh:
        figure.savefig(fresh, dpi=150, format="png")
    pyplot().close(figure)
    return path
