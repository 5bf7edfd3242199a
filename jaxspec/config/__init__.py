"""Hold architectures as frozen dataclasses, to and from Hugging Face `config.json`.

Field names and default values are Hugging Face's: published files leave out values that equal the
default of their transformers class (`llava-hf/llava-1.5-7b-hf` names neither width nor depth).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxspec.config.gemma import Gemma3TextConfig
from jaxspec.config.gemma4 import Gemma4TextConfig, Gemma4UnifiedTextConfig
from jaxspec.config.gemma4_images import (
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4VisionConfig,
    PixelConfig,
)
from jaxspec.config.lvlm import (
    Gemma3Config,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Qwen3VLConfig,
    QwenVLConfig,
)
from jaxspec.config.rope import RopeScaling
from jaxspec.config.text import (
    LlamaConfig,
    MimoConfig,
    MistralConfig,
    OptConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    TextConfig,
)
from jaxspec.config.vision import Qwen3VisionConfig, QwenTowerConfig, QwenVisionConfig, VisionConfig

__all__ = [
    "Gemma3Config",
    "Gemma3TextConfig",
    "Gemma4Config",
    "Gemma4TextConfig",
    "Gemma4UnifiedConfig",
    "Gemma4UnifiedTextConfig",
    "Gemma4VisionConfig",
    "LlamaConfig",
    "LlavaConfig",
    "LlavaNextConfig",
    "LlavaOnevisionConfig",
    "LvlmConfig",
    "MimoConfig",
    "MistralConfig",
    "ModelConfig",
    "OptConfig",
    "PixelConfig",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3VLConfig",
    "Qwen3VisionConfig",
    "QwenTowerConfig",
    "QwenVLConfig",
    "QwenVisionConfig",
    "RopeScaling",
    "RotaryConfig",
    "TextConfig",
    "VisionConfig",
    "text_config",
    "untied",
    "with_text",
]

LvlmConfig = LlavaConfig | Gemma3Config | Gemma4Config | QwenVLConfig
ModelConfig = TextConfig | LvlmConfig


def text_config(config: ModelConfig) -> TextConfig:
    """Return the decoder's part of a language model's or an LVLM's configuration."""
    return config if isinstance(config, TextConfig) else config.text_config


def with_text(config: ModelConfig, **text_fields: Any) -> ModelConfig:
    """Return the configuration with changes of the decoder's part."""
    text = replace(text_config(config), **text_fields)
    return text if isinstance(config, TextConfig) else replace(config, text_config=text)


def untied(config: ModelConfig, **text_fields: Any) -> ModelConfig:
    """Return the configuration with an output matrix of its own, apart from the embedding.

    text_fields: Changes of the decoder's part.
    """
    text = replace(text_config(config), tie_word_embeddings=False, **text_fields)
    if isinstance(config, TextConfig):
        return text
    return replace(config, text_config=text, tie_word_embeddings=False)
