"""The shipped mini KV head beside the draft's views, alone and mixed with them (AASD, Table 1's baselines)."""

from __future__ import annotations

from dataclasses import replace

from configs.eval.mini import config as mini
from jaxspec.evaluation.config import Row

config = replace(
    mini,
    rows=(
        Row("M", ("M",)),
        Row("T", ("T",)),
        Row("MT static", ("M", "T")),
        Row("KV head", ("kv",)),
        Row("MT + KV head static", ("M", "T", "kv")),
        Row("MT* + KV head", ("M", "T", "kv"), weighting="mt-paper"),
    ),
)
