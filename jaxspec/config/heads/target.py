"""Recognise the target that a head was made for by a hash of its configuration."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from jaxspec.config.rope import RopeScaling
from jaxspec.config.text import TextConfig

_DEPENDS_ON = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "tie_word_embeddings"),
)
"""Fields of a decoder that a head relies on."""


def target_hash(target: Any) -> str:
    """Return 16 hexadecimal digits of SHA-256 over the target's fields that a head relies on."""
    text: TextConfig = getattr(target, "text_config", target)
    fields: dict[str, Any] = {name: getattr(text, name, None) for name in _DEPENDS_ON}
    if isinstance(fields["rope_scaling"], RopeScaling):
        rope = asdict(fields["rope_scaling"])
        # Fields that older heads' targets did not have.
        for name in ("mrope_interleaved", "partial_rotary_factor"):
            if rope[name] == getattr(RopeScaling(), name):
                del rope[name]
        fields["rope_scaling"] = rope
    for name in ("global_head_dim", "num_global_key_value_heads"):
        if hasattr(text, name):
            fields[name] = getattr(text, name)
    if text is not target:
        vision = target.vision_config  # of an LVLM
        fields["images"] = [
            target.model_type,
            target.image_token_index,
            vision.hidden_size,
            vision.patch_size,
        ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
