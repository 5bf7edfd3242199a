"""LLaVA-1.5-7B with a 160M draft, bfloat16."""

from __future__ import annotations

from dataclasses import replace

from configs.latency.llava7b_68m import config as base
from configs.latency.llava7b_68m import draft

config = replace(
    base,
    draft=draft(768, 3072, 12),
    shapes=((1, 1024), (8, 1024)),
    papers={
        "passes": "TABED, Table 13: T_q/T_p 0.206; it has an A100 and float16 in Figures 5, 6."
    },
)
