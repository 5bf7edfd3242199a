"""LLaVA-1.5-13B with a 160M draft, bfloat16 (TABED, Table 13: T_q/T_p 0.137)."""

from __future__ import annotations

from dataclasses import replace

from configs.latency.llava7b_68m import config as base
from configs.latency.llava7b_68m import draft
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

config = replace(base, target=TARGET, draft=draft(768, 3072, 12), shapes=((1, 1024), (8, 1024)))
