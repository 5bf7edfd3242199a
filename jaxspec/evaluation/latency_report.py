"""Tables and figures of measured latency."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.evaluation.figures import COLOURS, panels, save
from jaxspec.evaluation.limits import Limits
from jaxspec.evaluation.tables import Table

Record = dict[str, Any]


def latency_tables(name: str, rows: Sequence[Record], limits: Limits) -> list[Table]:
    """A table for each kind of rows that there are."""
    makers = {"passes": passes_table, "images": images_table, "forced": forced_table, "mixtures": mixtures_table}
    kinds = dict.fromkeys(row["kind"] for row in rows)
    return [makers[kind](name, [row for row in rows if row["kind"] == kind], limits) for kind in kinds]


def passes_table(name: str, rows: Sequence[Record], limits: Limits) -> Table:
    """A line per shape: T_p, what blocks and drafts cost in T_p, and the share of the limits."""
    gammas, views = (list(rows[0][field]) for field in ("verify_ms", "draft_ms"))
    header = ["B", "S", "T_p ms"]
    header += [f"T_p({int(gamma) + 1})/T_p" for gamma in gammas]
    header += [f"T_q/T_p, {r} view{'s' * (r != '1')}" for r in views]
    header += ["GB/s", "of copy", "of read", "of matmul"]
    cells = [
        [str(row["batch"]), str(row["slots"]), f"{row['target_ms']:.3g}"]
        + [f"{row['verify_ms'][gamma] / row['target_ms']:.2f}" for gamma in gammas]
        + [f"{row['draft_ms'][r] / row['target_ms']:.3f}" for r in views]
        + [f"{row['effective_gbps']:.1f}"]
        + [f"{100 * row[share]:.0f}%" for share in ("copy_share", "read_share", "matmul_share")]
        for row in rows
    ]
    notes = [
        "What the papers' Eq. (1) takes for granted: that a pass over a block costs what one over a token does, that "
        "views in one batch cost what one view does, and that a draft pass costs next to nothing.",
        "Passes inside compiled loops, the least of interleaved runs. GB/s: weights and cache read once a pass over "
        f"one token, beside {limits.copy_gbps:.1f} GB/s copied, {limits.read_gbps:.1f} GB/s read by a vector times a "
        f"matrix, and {limits.matmul_tflops:.3g} Tflop/s of square matrices in the same run.",
    ]
    return f"Passes of {name}", header, cells, notes + _slopes(rows)


def _slopes(rows: Sequence[Record]) -> list[str]:
    """What a slot of the cache costs: straight lines through the times over S, of each B with three S or more."""
    notes = []
    for batch in dict.fromkeys(row["batch"] for row in rows):
        found = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["slots"])
        slots = [row["slots"] for row in found]
        if len(slots) < 3:
            continue
        told = []
        for tokens in (1, *(int(gamma) + 1 for gamma in found[0]["verify_ms"])):
            ms = [row["target_ms"] if tokens == 1 else row["verify_ms"][str(tokens - 1)] for row in found]
            slope, base = np.polyfit(slots, ms, 1)
            off = max(abs(base + slope * s - t) / t for s, t in zip(slots, ms))
            told.append(f"{1e3 * slope:.2g} us in a pass over {tokens} (at most {100 * off:.0f} % off)")
        notes.append(f"A slot of {slots[0]} to {slots[-1]} costs a batch of {batch} {', '.join(told)}.")
    return notes


def images_table(name: str, rows: Sequence[Record], limits: Limits) -> Table:
    """A line per number of images."""
    fields = [field for field in rows[0] if field.endswith("_ms")]
    header = ["images", *(f"{field[:-3].replace('_', ' ')} ms" for field in fields)]
    cells = [
        [str(row["images"]), *("-" if row[field] is None else f"{row[field]:.3g}" for field in fields)] for row in rows
    ]
    return f"Images before the first token, {name}", header, cells, ["Batch 1; towers and prefill apart."]


def forced_table(name: str, rows: Sequence[Record], limits: Limits) -> Table:
    """A line per batch, views and block efficiency."""
    header = ["B", "views", "forced tau", "J", "plain tok/s", "tok/s", "speed-up", "Eq. (1)", "with T_p(J+1)"]
    header += ["efficiency", "block ms", "lost: turns", "rest", "loop"]
    cells = [
        [str(row["batch"]), str(row["views"]), f"{row['forced_block_efficiency']:g}", str(row["gamma"])]
        + [f"{row[field]:.1f}" for field in ("plain_tokens_per_second", "tokens_per_second")]
        + [f"{row[field]:.2f}" for field in ("speedup_measured", "speedup_predicted", "speedup_predicted_with_verify")]
        + [f"{row['loop_efficiency']:.2f}", f"{row['block_ms']:.3g}"]
        + [f"{row[field]:.3g}" for field in ("turns_loss_ms", "rest_loss_ms", "loop_loss_ms")]
        for row in rows
    ]
    notes = [
        "FORCED ACCEPTANCE: random weights; draft and target compute all of a real block, and the number of accepted "
        "tokens is given, not earned. These are times of loops, and say nothing about any draft's quality.",
        "speed-up: over plain decoding in the same run; efficiency: measured over predicted with T_p(J+1). Lost, in ms "
        "a block: what the passes take longer by turns than each in a loop of its own, with its weights at hand; the "
        "block less its passes; the loop less its blocks.",
    ]
    return f"Loops at forced acceptance, {name}", header, cells, notes


def mixtures_table(name: str, rows: Sequence[Record], limits: Limits) -> Table:
    """A line per number of views and weighting."""
    header = ["views, weighting", "B", "block ms", "x one view", "weighting's share", "state bytes a row"]
    cells = [
        [
            f"{row['views']} {row['rule']}",
            str(row["batch"]),
            f"{row['block_ms']:.3g}",
            f"{row['times_one_view']:.2f}",
            "-" if row["rule"] == "static" else f"{100 * row['share']:.1f}%",
            str(row["state_bytes"]),
        ]
        for row in rows
    ]
    notes = [
        "A block is drafting, the target's pass, verification and learning, inside a compiled loop; the least of "
        "interleaved runs. share: over a block of the same views with static weights.",
    ]
    return f"Blocks by views and weighting, {name}", header, cells, notes


def draw_latency(name: str, rows: Sequence[Record], out: Path) -> list[Path]:
    """Figures of passes and of forced loops, as PNG files; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    drawings = {"passes": _draw_passes(name, rows), "stages": _draw_stages(name, rows)}
    return [path for file, figure in drawings.items() if (path := save(figure, out / f"{file}.png"))]


def _draw_passes(name: str, rows: Sequence[Record]) -> Any:
    """What a block costs against its length, a line per shape; in passes over one token."""
    found = [row for row in rows if row["kind"] == "passes"]
    if not found:
        return None
    figure, (axis,) = panels(1, 6.0, 3.0)
    for i, row in enumerate(found):
        tokens = [1, *(int(gamma) + 1 for gamma in row["verify_ms"])]
        cost = [1.0, *(ms / row["target_ms"] for ms in row["verify_ms"].values())]
        axis.plot(tokens, cost, "o-", color=COLOURS[i % len(COLOURS)], label=f"B={row['batch']} S={row['slots']}")
    axis.set(xlabel="tokens in the pass", ylabel="T_p(tokens) / T_p(1)", title=name, ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return figure


def _draw_stages(name: str, rows: Sequence[Record]) -> Any:
    """Where a block's time goes, a bar per forced loop."""
    found = [row for row in rows if row["kind"] == "forced"]
    if not found:
        return None
    figure, (axis,) = panels(1, 6.0, 0.5 * len(found) + 1.5)
    labels = [f"B={row['batch']} views={row['views']} tau={row['forced_block_efficiency']:g}" for row in found]
    left = [0.0] * len(found)
    stages = {
        "draft passes": lambda row: row["gamma"] * row["draft_ms"],
        "target pass": lambda row: row["verify_ms"],
        "passes by turns": lambda row: max(row["turns_loss_ms"], 0.0),
        "the rest of a block": lambda row: max(row["rest_loss_ms"], 0.0),
        "loop": lambda row: max(row["loop_loss_ms"], 0.0),
    }
    for colour, (stage, width) in zip(COLOURS, stages.items()):
        widths = [width(row) for row in found]
        axis.barh(labels, widths, left=left, label=stage, color=colour)
        left = [a + b for a, b in zip(left, widths)]
    axis.set(xlabel="ms a block (forced acceptance)", title=name)
    axis.legend(frameon=False, fontsize=8)
    return figure
