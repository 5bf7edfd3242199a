"""Qwen3-8B, which reads text only, with the 0.6B as its draft, bfloat16."""

from __future__ import annotations

from dataclasses import replace

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config.text import Qwen3Config

TARGET = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=40960,
    rope_theta=1e6,
)
DRAFT = replace(
    TARGET,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    tie_word_embeddings=True,
)

config = LatencyConfig(TARGET, DRAFT, dtype="bfloat16", shapes=((1, 1024),), images=())
