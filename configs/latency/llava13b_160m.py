"""LLaVA-1.5-13B with a 160M draft, bfloat16."""

from __future__ import annotations

from dataclasses import replace

from configs.latency.llava7b_68m import draft
from configs.latency.llava13b_68m import config as base

config = replace(
    base,
    draft=draft(768, 3072, 12),
    papers={
        "passes": "TABED, Table 13: T_q/T_p 0.137; it has an A100 and float16 in Figures 5, 6."
    },
)
