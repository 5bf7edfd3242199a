"""The shipped mini models: how many verified tokens MT* looks back on, as in TABED's Table 5."""

from __future__ import annotations

from dataclasses import replace

from configs.eval import mini
from eval.lib.drafts.config import Variant

config = replace(
    mini.config,
    rows=tuple(
        Variant(f"MT*, h = {h}", ("M", "T"), weighting=f"grid:window={h}")
        for h in (1, 4, 16, "all")
    ),
)
