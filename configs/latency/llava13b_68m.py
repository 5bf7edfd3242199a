"""LLaVA-1.5-13B with IbED's 68M draft, bfloat16."""

from __future__ import annotations

from dataclasses import replace

from configs.latency.llava7b_68m import config as base
from jaxspec.config import LlamaConfig, LlavaConfig

TARGET = LlavaConfig(
    LlamaConfig(
        vocab_size=32064,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=4096,
    )
)

config = replace(
    base,
    target=TARGET,
    shapes=((1, 1024), (8, 1024)),
    papers={
        "passes": "TABED, Table 13: T_q/T_p 0.042; it has an A100 and float16 in Figures 5, 6."
    },
)
