"""Qwen3-VL-8B with a draft of Qwen3-VL-2B's decoder and the target's tower, bfloat16."""

from __future__ import annotations

from eval.lib.random_pair import LatencyConfig
from jaxspec.config import Qwen3Config, Qwen3VisionConfig, Qwen3VLConfig, RopeScaling

ROPE = RopeScaling(mrope_section=(24, 20, 20), mrope_interleaved=True)


def model(width: int, mlp: int, layers: int, heads: int, tied: bool, tower: Qwen3VisionConfig) -> Qwen3VLConfig:
    """A Qwen3-VL around a decoder of these sizes."""
    text = Qwen3Config(
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=262144,
        tie_word_embeddings=tied,
        rope_theta=5e6,
        rope_scaling=ROPE,
    )
    return Qwen3VLConfig(text, tower)


config = LatencyConfig(
    model(4096, 12288, 36, 32, False, Qwen3VisionConfig(out_hidden_size=4096)),
    model(2048, 6144, 28, 16, True, Qwen3VisionConfig(out_hidden_size=2048)),
    dtype="bfloat16",
    shapes=((1, 1024), (1, 4096)),
    images=(),
)
