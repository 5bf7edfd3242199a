"""The shipped mini KV head next to the draft's views, by itself and mixed with them (AASD, the
baselines of Table 1).
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
