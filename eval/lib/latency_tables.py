"""The tables of `eval.latency`: columns of each kind of rows, and notes below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eval.lib.tables import Record, Table, digits, number, percent

Columns = dict[str, Callable[[Record], str]]
PASSES = (
    "What the papers' Eq. (1) takes for granted: that a pass over a block costs what one over a "
    "token does, that views in one batch cost what one view does, and that a draft pass costs next "
    "to nothing."
)
FORCED = (
    "FORCED ACCEPTANCE: random weights; draft and target compute all of a real block, and the "
    "number of accepted tokens is given, not earned. These are times of loops, and say nothing "
    "about any draft's quality."
)
SPEEDUPS = (
    "speed-up: over plain decoding in the same run; efficiency: measured over predicted with "
    "T_p(gamma+1)."
)
CAPTIONS = (
    "Seconds to caption all n images of a prompt in one batch; the least of the runs. torch runs "
    "BLIP and Florence-2 on the host's CPU. Tower and prefill of the target are in the table of "
    "images."
)
MIXTURES = (
    "A block is drafting, the target's pass, verification and learning, inside a compiled loop; "
    "the least of interleaved runs. share: over a block of the same views with static weights."
)
FLOPS = "Counted from shapes, two a weight and token, embeddings that are looked up left out."
STARTUP = "The shipped pair; medians of so many runs, of warm ones after a cold one."


def latency_tables(
    name: str, rows: Sequence[Record], papers: Mapping[str, str] | None = None
) -> list[Table]:
    """Return a table for each kind of rows, with the papers' numbers below it.

    Args:
      name: The preset's name, for titles.
      rows: Rows of all kinds.
      papers: The papers' numbers, by kind.
    """
    tables = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        here = [row for row in rows if row["kind"] == kind]
        title, columns, *notes = TABLES[kind](here)
        if kind == "captions":  # a line per captioner: its rows differ in the number of images
            here = list({row["captioner"]: row for row in here}.values())
        printed = [f"paper: {papers[kind]}"] if papers and kind in papers else []
        cells = [[cell(row) for cell in columns.values()] for row in here]
        tables.append(Table(title.format(name), list(columns), cells, [*notes, *printed]))
    return tables


def _text(field: str) -> Callable[[Record], str]:
    return lambda row: str(row[field])


def _digits(field: str, count: int = 3) -> Callable[[Record], str]:
    return lambda row: digits(row[field], count)


def _number(field: str, places: int = 2) -> Callable[[Record], str]:
    return lambda row: number(row[field], places)


def _percent(field: str) -> Callable[[Record], str]:
    return lambda row: percent(row[field])


def _over_target(times: str, key: str, places: int) -> Callable[[Record], str]:
    return lambda row: number(row[times][key] / row["target_ms"], places)


def _passes(rows: Sequence[Record]) -> tuple[str, Columns, str, str]:
    """Return T_p, passes of blocks and drafts in T_p, and shares of the roofline."""
    gammas, views = (list(rows[0][field]) for field in ("verify_ms", "draft_ms"))
    columns = {"B": _text("batch"), "S": _text("slots"), "T_p ms": _digits("target_ms")}
    for gamma in gammas:
        columns[f"T_p({int(gamma) + 1})/T_p"] = _over_target("verify_ms", gamma, 2)
    for r in views:
        columns[f"T_q/T_p, {r} view{'s' * (r != '1')}"] = _over_target("draft_ms", r, 3)
    columns |= {"GB/s": _number("effective_gbps", 1), "of copy": _percent("copy_share")}
    columns |= {"of read": _percent("read_share"), "of matmul": _percent("matmul_share")}
    roofline = rows[0]["roofline"]
    note = (
        "Passes inside compiled loops, the least of interleaved runs. GB/s: weights and cache "
        f"read once a pass over one token, beside {roofline['copy_gbps']:.1f} GB/s copied, "
        f"{roofline['read_gbps']:.1f} GB/s read by a vector times a matrix, and "
        f"{roofline['matmul_tflops']:.3g} Tflop/s of square matrices in the same run."
    )
    return "Passes of {}", columns, PASSES, note


def _images(rows: Sequence[Record]) -> tuple[str, Columns, str]:
    columns = {"images": _text("images")}
    for field in (field for field in rows[0] if field.endswith("_ms")):
        columns[f"{field[:-3].replace('_', ' ')} ms"] = _digits(field)
    return "Images before the first token, {}", columns, "Batch 1; towers and prefill apart."


def _captions(rows: Sequence[Record]) -> tuple[str, Columns, str]:
    seconds = {(row["captioner"], row["images"]): row["seconds"] for row in rows}
    columns = {"captioner": _text("captioner")}
    for count in dict.fromkeys(row["images"] for row in rows):
        columns[f"n = {count}, s"] = lambda row, n=count: digits(seconds[row["captioner"], n])
    return "Captions by images", columns, CAPTIONS


def _forced(rows: Sequence[Record]) -> tuple[str, Columns, str, str]:
    columns: Columns = {
        "B": _text("batch"),
        "views": _text("views"),
        "forced tau": lambda row: f"{row['forced_tokens_per_pass']:g}",
        "gamma": _text("gamma"),
        "plain tok/s": _number("plain_tokens_per_second", 1),
        "tok/s": _number("tokens_per_second", 1),
        "speed-up": _number("speedup_measured"),
        "Eq. (1)": _number("speedup_predicted"),
        "with T_p(gamma+1)": _number("speedup_predicted_with_verify"),
        "efficiency": _number("loop_efficiency"),
        "block ms": _digits("block_ms"),
        "its passes": lambda row: digits(row["gamma"] * row["draft_ms"] + row["verify_ms"]),
    }
    return "Loops at forced acceptance, {}", columns, FORCED, SPEEDUPS


def _mixtures(rows: Sequence[Record]) -> tuple[str, Columns, str]:
    columns: Columns = {
        "views, weighting": lambda row: f"{row['views']} {row['rule']}",
        "B": _text("batch"),
        "block ms": _digits("block_ms"),
        "x one view": _number("times_one_view"),
        "weighting's share": lambda row: (
            "-" if row["rule"] == "static" else percent(row["share"], 1)
        ),
        "state bytes a row": _text("state_bytes"),
    }
    return "Blocks by views and weighting, {}", columns, MIXTURES


def _flops(rows: Sequence[Record]) -> tuple[str, Columns, str]:
    columns = {field: _text(field) for field in ("model", "views", "tokens")}
    columns |= {"GFLOPs of weights": _number("weights_gflops"), "with attention": _number("gflops")}
    return "Operations of {}", columns, FLOPS


def _startup(rows: Sequence[Record]) -> tuple[str, Columns, str]:
    columns = {"": _text("what"), "seconds": _digits("seconds", 4)}
    columns |= {"CPU seconds": _digits("cpu_seconds"), "runs": _text("runs")}
    return "Start-up and host time", columns, STARTUP


TABLES: dict[str, Callable[[Sequence[Record]], tuple]] = {
    "passes": _passes,
    "images": _images,
    "captions": _captions,
    "forced": _forced,
    "mixtures": _mixtures,
    "flops": _flops,
    "startup": _startup,
}
