"""Choose a decoder of Llama's shape by the `model_type` of a part of config.json."""

from __future__ import annotations

from typing import Any

from jaxspec.config.gemma import Gemma3TextConfig
from jaxspec.config.gemma4 import Gemma4TextConfig, Gemma4UnifiedTextConfig
from jaxspec.config.text import (
    LlamaConfig,
    MimoConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
)
from jaxspec.errors import InputError


def decoder_config(raw: dict[str, Any], default: str = LlamaConfig.model_type) -> RotaryConfig:
    """Return an LVLM's decoder by its `text_config`'s model_type.

    Raises InputError for a decoder that is not of Llama's shape.
    """
    llamas = (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, MimoConfig)
    gemmas = (Gemma3TextConfig, Gemma4TextConfig, Gemma4UnifiedTextConfig)
    kinds: dict[str, type[RotaryConfig]] = {kind.model_type: kind for kind in (*llamas, *gemmas)}
    model_type = raw.get("model_type") or default
    if model_type not in kinds:
        raise InputError(f"text config: model_type {model_type!r} is not one of {list(kinds)}")
    return kinds[model_type].from_hf(raw)
