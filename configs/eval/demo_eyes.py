"""The table of `make demo`: tokens per pass of lookup and of the shipped KV head of `smollm2-eyes`.

Three of picturebook's sets, first questions. It takes no times: `jaxspec demo` has shown them.
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.eyes import config as eyes

config = replace(
    eyes,
    rows=tuple(row for row in eyes.rows if row.name in ("lookup", "KV head")),
    sets=("describe", "read", "chart"),
    turns=(1,),
    limit=2,
    times=False,
)
