"""Gemma 4 E4B with its assistant, which drafts three tokens, bfloat16.

The draft model of `chain` has the first of its layers, up to a full one.
"""

from __future__ import annotations

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import Gemma4Config, Gemma4TextConfig, Gemma4VisionConfig, with_text

TARGET = Gemma4Config(
    Gemma4TextConfig(
        hidden_size=2560,
        intermediate_size=10240,
        num_hidden_layers=42,
        num_attention_heads=8,
        num_key_value_heads=2,
        num_kv_shared_layers=18,
        final_logit_softcapping=30.0,
    ),
    Gemma4VisionConfig(use_clipped_linears=True),
)
DRAFT = with_text(
    TARGET,
    num_hidden_layers=6,
    num_kv_shared_layers=0,
    layer_types=TARGET.text_config.layer_types[:6],
)

config = LatencyConfig(TARGET, DRAFT, dtype="bfloat16", shapes=((1, 1024),), gamma=3)
