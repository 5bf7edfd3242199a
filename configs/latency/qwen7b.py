"""Qwen2.5-VL-7B with a draft as wide and deep as IbED's 68M, bfloat16: images of any size, in windows."""

from __future__ import annotations

from eval.lib.random_pair import LatencyConfig
from jaxspec.config import Qwen2Config, QwenVisionConfig, QwenVLConfig, RopeScaling


def model(width: int, mlp: int, layers: int, heads: int, kv_heads: int) -> QwenVLConfig:
    """A Qwen2.5-VL around a decoder of these sizes, with the published tower and vocabulary."""
    text = Qwen2Config(
        vocab_size=152064,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128000,
        rope_theta=1e6,
        rope_scaling=RopeScaling(mrope_section=(16, 24, 24) if width // heads == 128 else (8, 12, 12)),
    )
    return QwenVLConfig(text, QwenVisionConfig(hidden_size=1280, out_hidden_size=width))


config = LatencyConfig(
    model(3584, 18944, 28, 28, 4),
    model(768, 3072, 2, 12, 12),
    dtype="bfloat16",
    shapes=((1, 1024), (1, 4096), (1, 16384)),
    images=(),
)
