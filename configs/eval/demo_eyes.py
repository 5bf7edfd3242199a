"""The table of `make demo`: `smollm2-eyes` with its shipped KV head, on four of picturebook's sets, first questions."""

from __future__ import annotations

from dataclasses import replace

from configs.eval.eyes import config as eyes

config = replace(
    eyes,
    rows=tuple(row for row in eyes.rows if row.name in ("lookup", "KV head")),
    sets=("describe", "read", "exist", "chart"),
    turns=(1,),
    limit=4,
)
