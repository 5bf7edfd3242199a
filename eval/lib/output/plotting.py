"""Draw with matplotlib, which the `plots` extra brings; without it nothing is drawn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import Any

from eval.lib.output.tables import Record
from jaxspec.files import whole

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
"""Paul Tol's bright scheme: colour-blind readers can distinguish them."""
MARKERS = "os^Dv<>P*X"
TITLES = {
    "block_efficiency": "Tokens per pass, with 95 % intervals (dotted: plain decoding)",
    "acceptance_by_position": "How far into a block drafts hold: accepted at each place, given "
    "that all before were",
    "block_times": "Where the time of one block goes: all draft passes, and the target's pass "
    "that verifies them",
    "weight_trajectory": "Weights of the views, and the weights for which the target accepts, of "
    "each row's answer over which its weights move most",
    "overlap": "Which views had the target's token as their likeliest",
    "accepted_over_time": "Accepted drafts along the answers, from first token (0) to last (1)",
    "inference_times": "Where the target's time for an answer goes, by images of the prompt",
    "sweep": "Quality and speed over the grid",
}
"""Title of each figure, by file name."""


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


def bar_style(i: int) -> Record:
    """Return the fill of the i-th bar: hatched once all colours are used."""
    hatch = ("", "///", "...")[i // len(COLOURS) % 3]
    return {"color": COLOURS[i % len(COLOURS)], "hatch": hatch, "edgecolor": "white"}


def line_style(i: int) -> Record:
    """Return the i-th line's style, with its own marker, and dashed once all colours are used."""
    dashes, marker = ("-", "--", ":")[i // len(COLOURS) % 3], MARKERS[i % len(MARKERS)]
    style = {"color": COLOURS[i % len(COLOURS)], "linestyle": dashes, "marker": marker}
    return style | {"markersize": 4, "linewidth": 1}


def put_legend(figure: Any, axis: Any) -> None:
    """Put the legend below the axes, in as many columns as fit."""
    handles, labels = axis.get_legend_handles_labels()
    columns = max(1, int(figure.get_figwidth() / (0.65 + 0.06 * max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.18 * -(-len(labels) // columns))
    figure.legend(
        handles, labels, frameon=False, fontsize=8, ncols=columns, loc="outside lower center"
    )


def pyplot() -> Any:
    """Return matplotlib.pyplot with the file backend; None if it is not installed."""
    if find_spec("matplotlib") is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, folder: Path, name: str, models: str = "") -> Path:
    """Write a figure of `TITLES` as NAME.png and NAME.svg under its title; return the first's path.

    models: Second line of the title.
    """
    figure.set_figheight(figure.get_figheight() + 0.3)
    title = f"{TITLES[name]}\n{models}".strip()
    columns = int(figure.get_figwidth() * 16)  # characters of a line of the title
    lines = [line for part in title.splitlines() for line in wrap(part, columns)]
    figure.set_figheight(figure.get_figheight() + 0.15 * (len(lines) - 1))
    figure.suptitle("\n".join(lines), fontsize=9)
    for kind in ("svg", "png"):
        path = folder / f"{name}.{kind}"
        with whole(path) as fresh:
            figure.savefig(fresh, dpi=150, format=kind)
    pyplot().close(figure)
    return path
