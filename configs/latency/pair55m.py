"""A pair of 54M and 3M on pages of 576 image tokens, float32: what a CPU can still answer with at
reading speed.
"""

from __future__ import annotations

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig

TOWER = VisionConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=336,
    patch_size=14,
    projection_dim=64,
)


def lvlm(width: int, mlp: int, layers: int, heads: int) -> LlavaConfig:
    """Return a LLaVA-1.5 of these sizes with a vocabulary of 8,000."""
    text = LlamaConfig(
        vocab_size=8000,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=4096,
    )
    return LlavaConfig(text, TOWER, image_token_index=7999)


config = LatencyConfig(
    lvlm(512, 1792, 12, 8),
    lvlm(128, 352, 2, 4),
    dtype="float32",
    shapes=((1, 128), (1, 768), (1, 2048)),
    gammas=(1, 5, 10),
    views=(1, 2, 4),
    probe_megabytes=256,
    probe_side=1024,
)
