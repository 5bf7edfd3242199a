"""Architectures as frozen dataclasses, to and from Hugging Face `config.json` dictionaries.

Field names and default values are Hugging Face's: published files leave out values that equal the
default of their transformers class (`llava-hf/llava-1.5-7b-hf` names neither width nor depth).
"""

from __future__ import annotations

from jaxspec.config.eagle import EagleConfig
from jaxspec.config.kv_head import KVHeadConfig
from jaxspec.config.lvlm import (
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Qwen3VLConfig,
    QwenVLConfig,
)
from jaxspec.config.rope import RopeScaling
from jaxspec.config.text import (
    LlamaConfig,
    MistralConfig,
    OptConfig,
    Qwen2Config,
    Qwen3Config,
    RotaryConfig,
    TextConfig,
)
from jaxspec.config.vision import Qwen3VisionConfig, QwenTowerConfig, QwenVisionConfig, VisionConfig

__all__ = [
    "EagleConfig",
    "KVHeadConfig",
    "LlamaConfig",
    "LlavaConfig",
    "LlavaNextConfig",
    "LlavaOnevisionConfig",
    "LvlmConfig",
    "MistralConfig",
    "ModelConfig",
    "OptConfig",
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
]

LvlmConfig = LlavaConfig | QwenVLConfig
ModelConfig = TextConfig | LvlmConfig


def text_config(config: ModelConfig) -> TextConfig:
    """Return the decoder's part of a language model's or an LVLM's configuration."""
    return config if isinstance(config, TextConfig) else config.text_config
