"""Gemma 4 12B with its assistant, which drafts three tokens, bfloat16.

The 12B has no small sibling of its form: the draft model of `chain` has four of its layers.
"""

from __future__ import annotations

from eval.lib.times.random_pair import LatencyConfig
from jaxspec.config import Gemma4UnifiedConfig, Gemma4UnifiedTextConfig, with_text

TARGET = Gemma4UnifiedConfig(
    Gemma4UnifiedTextConfig(
        hidden_size=3840,
        intermediate_size=15360,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=30.0,
    )
)
DRAFT = with_text(TARGET, num_hidden_layers=4, layer_types=TARGET.text_config.layer_types[2:6])

config = LatencyConfig(TARGET, DRAFT, dtype="bfloat16", shapes=((1, 1024),), gamma=3)
