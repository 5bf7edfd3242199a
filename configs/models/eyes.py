"""SmolLM2-135M with eyes: a tower for 48x48 pages whose 144 image tokens lie over patches of 4
pixels.
"""

from __future__ import annotations

from jaxspec.config import VisionConfig

TOWER = VisionConfig(
    hidden_size=128,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    image_size=48,
    patch_size=4,
    projection_dim=128,
)
