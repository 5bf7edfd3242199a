"""LLaVA-NeXT on Mistral-7B with a draft of IbED's 68M, bfloat16: five tiles an image, 32k of context."""

from __future__ import annotations

from eval.lib.random_pair import LatencyConfig
from jaxspec.config import LlavaNextConfig, MistralConfig

from configs.latency import llava7b_68m

config = LatencyConfig(
    LlavaNextConfig(MistralConfig(vocab_size=32064, max_position_embeddings=32768, rope_theta=1e6)),
    LlavaNextConfig(llava7b_68m.config.draft.text_config),  # type: ignore[union-attr]
    dtype="bfloat16",
    shapes=((1, 1024), (1, 4096), (1, 16384)),
    images=(),
)
