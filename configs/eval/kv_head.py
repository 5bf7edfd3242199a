"""The shipped mini KV head beside the draft's views, alone and mixed with them (AASD, Table 1's
baselines).
"""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini
from eval.lib.drafts.config import Variant

config = replace(
    mini,
    rows=(
        Variant("M", ("M",)),
        Variant("T", ("T",)),
        Variant("MT static", ("M", "T")),
        Variant("KV head", ("head",)),
        Variant("MT + KV head static", ("M", "T", "head")),
        Variant("MT* + KV head", ("M", "T", "head"), weighting="mt-paper"),
    ),
)
