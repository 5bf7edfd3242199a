"""The shipped mini models: a tower for 48x48 pages (16 image tokens) and what looks through it: a
target, a draft a tenth of its cost, and a captioner.
"""

from __future__ import annotations

from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig

VOCABULARY = 1024
IMAGE_TOKEN = 4

TOWER = VisionConfig(
    hidden_size=160,
    intermediate_size=640,
    num_hidden_layers=5,
    num_attention_heads=5,
    image_size=48,
    patch_size=12,
    projection_dim=160,
)

TARGET = LlavaConfig(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        pad_token_id=3,
    ),
    TOWER,
    image_token_index=IMAGE_TOKEN,
)

DRAFT = LlavaConfig(
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        rms_norm_eps=1e-5,
        pad_token_id=3,
    ),
    TOWER,
    image_token_index=IMAGE_TOKEN,
)
"""Its 96 trained positions hold one or two images and their text, not five: as 2048 positions
against 5 * 576.
"""

CAPTIONER = DRAFT
"""One page, a fixed question and at most 45 tokens of caption: the draft's size is enough."""
