"""Qwen3-VL-4B with the 2B as its draft, bfloat16.

AngelSlim's EAGLE-3 head scores 32,000 tokens.
"""

from __future__ import annotations

from dataclasses import replace

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import Qwen3VLConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.text import Qwen3Config
from jaxspec.config.vision import Qwen3VisionConfig

TARGET = Qwen3VLConfig(
    Qwen3Config(
        vocab_size=151936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        rope_theta=5e6,
        rope_scaling=RopeScaling(mrope_section=(24, 20, 20), mrope_interleaved=True),
        tie_word_embeddings=True,
    ),
    Qwen3VisionConfig(
        depth=24,
        hidden_size=1024,
        intermediate_size=4096,
        out_hidden_size=2560,
        deepstack_visual_indexes=(5, 11, 17),
    ),
)
DRAFT = replace(
    TARGET,
    text_config=replace(
        TARGET.text_config,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
    ),
    vision_config=replace(TARGET.vision_config, out_hidden_size=2048),
)

config = LatencyConfig(TARGET, DRAFT, dtype="bfloat16", shapes=((1, 1024),), head_vocabulary=32_000)
