"""Make the tables of `eval.latency`: columns of each kind of rows, and notes below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from eval.lib.output.tables import Record, Table, cell, digits, number, percent, pivot

Columns = dict[str, Callable[[Record], str]]


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
        table = TABLES[kind](name, [row for row in rows if row["kind"] == kind])
        printed = [f"paper: {papers[kind]}"] if papers and kind in papers else []
        tables.append(table._replace(notes=[*table.notes, *printed]))
    return tables


def _table(title: str, rows: Sequence[Record], columns: Columns, *notes: str) -> Table:
    return pivot(title, (), (((), row) for row in rows), columns, notes=notes)


def _over_target(times: str, key: str, places: int) -> Callable[[Record], str]:
    return lambda row: number(row[times][key] / row["target_ms"], places)


def _passes(name: str, rows: Sequence[Record]) -> Table:
    """Return T_p, passes of blocks and drafts in T_p, and shares of the roofline."""
    gammas, views = (list(rows[0][field]) for field in ("verify_ms", "draft_ms"))
    columns = {"B": cell("batch"), "S": cell("slots"), "T_p ms": cell("target_ms", digits)}
    for gamma in gammas:
        columns[f"T_p({int(gamma) + 1})/T_p"] = _over_target("verify_ms", gamma, 2)
    for r in views:
        columns[f"T_q/T_p, {r} view{'s' * (r != '1')}"] = _over_target("draft_ms", r, 3)
    columns |= {"GB/s": cell("effective_gbps", number, 1), "of copy": cell("copy_share", percent)}
    columns |= {"of read": cell("read_share", percent), "of matmul": cell("matmul_share", percent)}
    roofline = rows[0]["roofline"]
    assumed = (
        "What the papers' Eq. (1) takes for granted: that a pass over a block costs what one over "
        "a token does, that views in one batch cost what one view does, and that a draft pass "
        "costs next to nothing."
    )
    note = (
        "Passes inside compiled loops, the least of interleaved runs. GB/s: weights and cache "
        f"read once a pass over one token, beside {roofline['copy_gbps']:.1f} GB/s copied, "
        f"{roofline['read_gbps']:.1f} GB/s read by a vector times a matrix, and "
        f"{roofline['matmul_tflops']:.3g} Tflop/s of square matrices in the same run."
    )
    return _table(f"Passes of {name}", rows, columns, assumed, note)


def _images(name: str, rows: Sequence[Record]) -> Table:
    columns = {"images": cell("images"), "new tokens": cell("answer")}
    for field in (field for field in rows[0] if field.endswith("_ms")):
        columns[f"{field[:-3].replace('_', ' ')} ms"] = cell(field, digits)
    note = (
        "Batch 1; towers and prefill apart. decoding: of all new tokens but the first, each a pass "
        "over the slots that are filled halfway."
    )
    return _table(f"Answers by images of the prompt, {name}", rows, columns, note)


def _captions(name: str, rows: Sequence[Record]) -> Table:
    """Return the table of captioners by the images of a prompt."""
    seconds = {(row["captioner"], row["images"]): row["seconds"] for row in rows}
    columns = {"captioner": cell("captioner")}
    for count in dict.fromkeys(row["images"] for row in rows):
        columns[f"n = {count}, s"] = lambda row, n=count: digits(seconds[row["captioner"], n])
    captioners = {row["captioner"]: row for row in rows}.values()
    note = (
        "Seconds to caption all n images of a prompt in one batch; the least of the runs. torch "
        "runs BLIP and Florence-2 on the host's CPU. Tower and prefill of the target are in the "
        "table of images."
    )
    return _table("Captions by images", list(captioners), columns, note)


def _forced(name: str, rows: Sequence[Record]) -> Table:
    """Return the table of loops whose number of accepted tokens is given."""
    columns: Columns = {
        "B": cell("batch"),
        "views": cell("views"),
        "forced tau": lambda row: f"{row['forced_tokens_per_pass']:g}",
        "gamma": cell("gamma"),
        "plain tok/s": cell("plain_tokens_per_second", number, 1),
        "tok/s": cell("tokens_per_second", number, 1),
        "speed-up": cell("speedup_measured", number),
        "Eq. (1)": cell("speedup_predicted", number),
        "with T_p(gamma+1)": cell("speedup_predicted_with_verify", number),
        "efficiency": cell("loop_efficiency", number),
        "block ms": cell("block_ms", digits),
        "its passes": lambda row: digits(row["gamma"] * row["draft_ms"] + row["verify_ms"]),
    }
    forced = (
        "FORCED ACCEPTANCE: random weights; draft and target compute all of a real block, and the "
        "number of accepted tokens is given, not earned. These are times of loops, and say nothing "
        "about any draft's quality."
    )
    note = (
        "speed-up: over plain decoding in the same run; efficiency: measured over predicted with "
        "T_p(gamma+1)."
    )
    return _table(f"Loops at forced acceptance, {name}", rows, columns, forced, note)


def _mixtures(name: str, rows: Sequence[Record]) -> Table:
    """Return the table of blocks by views and weighting."""
    columns: Columns = {
        "views, weighting": lambda row: f"{row['views']} {row['rule']}",
        "B": cell("batch"),
        "block ms": cell("block_ms", digits),
        "x one view": cell("times_one_view", number),
        "weighting's share": lambda row: (
            "-" if row["rule"] == "static" else percent(row["share"], 1)
        ),
        "state bytes a row": cell("state_bytes"),
    }
    note = (
        "A block is drafting, the target's pass, verification and learning, inside a compiled "
        "loop; the least of interleaved runs. share: over a block of the same views with static "
        "weights."
    )
    return _table(f"Blocks by views and weighting, {name}", rows, columns, note)


def _flops(name: str, rows: Sequence[Record]) -> Table:
    columns = {field: cell(field) for field in ("model", "views", "tokens")}
    columns |= {
        "GFLOPs of weights": cell("weights_gflops", number),
        "with attention": cell("gflops", number),
    }
    note = "Counted from shapes, two a weight and token, embeddings that are looked up left out."
    return _table(f"Operations of {name}", rows, columns, note)


def _startup(name: str, rows: Sequence[Record]) -> Table:
    columns = {"": cell("what"), "seconds": cell("seconds", digits, 4)}
    columns |= {"CPU seconds": cell("cpu_seconds", digits), "runs": cell("runs")}
    note = "The shipped pair; medians of so many runs, of warm ones after a cold one."
    return _table("Start-up and host time", rows, columns, note)


TABLES: dict[str, Callable[[str, Sequence[Record]], Table]] = {
    "passes": _passes,
    "images": _images,
    "captions": _captions,
    "forced": _forced,
    "mixtures": _mixtures,
    "flops": _flops,
    "startup": _startup,
}
