"""The table of `make demo`: the shipped mini models at batch 1, on four of picturebook's sets,
first questions.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini

ROWS = ("M", "T", "MT static", "MT*", "KV head")

config = replace(
    mini,
    rows=tuple(row for row in mini.rows if row.name in ROWS),
    sets=("describe", "read", "edit", "saga"),
    turns=(1,),
    limit=4,
    batch_size=1,
)
