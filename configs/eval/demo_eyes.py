"""The table of `make demo`: tokens a pass of lookup and of `smollm2-eyes`' shipped KV head, on three of picturebook's sets.

It takes no times: `jaxspec demo` has shown them.
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
