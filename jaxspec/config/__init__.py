"""Architectures as frozen dataclasses, read from and written to Hugging Face `config.json` dictionaries.

Decoders are in `config/text.py`; here are the towers and the LVLMs.

Field names and default values are Hugging Face's, because published files leave out whatever equals the
default of the transformers class that wrote them (`llava-hf/llava-1.5-7b-hf` names neither width nor depth).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxspec.config.text import (
    LlamaConfig,
    MistralConfig,
    OptConfig,
    Qwen2Config,
    RopeScaling,
    RotaryConfig,
    TextConfig,
    decoder_config,
    known_fields,
)
from jaxspec.errors import InputError

__all__ = [
    "LlamaConfig",
    "LlavaConfig",
    "MistralConfig",
    "ModelConfig",
    "OptConfig",
    "Qwen2Config",
    "RopeScaling",
    "RotaryConfig",
    "TextConfig",
    "VisionConfig",
    "text_config",
]


_CLIP_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "projection_dim": 512,
}
"""`CLIPVisionConfig`'s: what a `vision_config` that is in the file may leave out."""


@dataclass(frozen=True)
class VisionConfig:
    """A CLIP vision tower. Defaults are the ViT-L/14-336 of a `LlavaConfig` without `vision_config`."""

    model_type: str = "clip_vision_model"
    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_channels: int = 3
    image_size: int = 336
    patch_size: int = 14
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: int = 768

    def __post_init__(self) -> None:
        if self.hidden_act not in ("quick_gelu", "gelu"):
            raise InputError(
                f"vision config: hidden_act {self.hidden_act!r} is not supported; supported: 'quick_gelu', 'gelu'"
            )

    @property
    def side(self) -> int:
        """Patches along one side of the page."""
        return self.image_size // self.patch_size

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> VisionConfig:
        if raw.get("model_type", cls.model_type) != "clip_vision_model":
            raise InputError(
                f"vision config: model_type {raw['model_type']!r} is not supported; supported: 'clip_vision_model'"
            )
        return cls(**_CLIP_DEFAULTS | known_fields(cls, raw))

    def to_hf(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LlavaConfig:
    """LLaVA-1.5: CLIP tower, two-layer projector, rotary decoder. Defaults are transformers' `LlavaConfig`'s."""

    text_config: RotaryConfig = field(default_factory=LlamaConfig)
    vision_config: VisionConfig = field(default_factory=VisionConfig)
    model_type: str = "llava"
    image_token_index: int = 32000
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int = -2
    vision_feature_select_strategy: str = "default"
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.vision_feature_layer, int):
            raise InputError(
                f"llava config: vision_feature_layer {self.vision_feature_layer!r} is not supported; "
                "give one layer, such as -2"
            )
        layers = self.vision_config.num_hidden_layers
        if self.vision_feature_layer not in range(-layers - 1, layers + 1):
            raise InputError(
                f"llava config: a tower of {layers} layers has no vision_feature_layer "
                f"{self.vision_feature_layer}; fix config.json"
            )
        if self.vision_feature_select_strategy not in ("default", "full"):
            raise InputError(
                "llava config: vision_feature_select_strategy "
                f"{self.vision_feature_select_strategy!r} is unknown; use 'default' or 'full'"
            )
        if self.projector_hidden_act != "gelu":
            raise InputError(
                f"llava config: projector_hidden_act {self.projector_hidden_act!r} is not supported; use 'gelu'"
            )
        # The file has two flags: transformers 4 obeys the decoder's, transformers 5 either.
        tied = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        object.__setattr__(self, "tie_word_embeddings", tied)
        object.__setattr__(self, "text_config", replace(self.text_config, tie_word_embeddings=tied))

    @property
    def image_tokens(self) -> int:
        """P: placeholder tokens that one image takes in the prompt."""
        return self.vision_config.side**2 + (self.vision_feature_select_strategy == "full")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> LlavaConfig:
        known = known_fields(cls, raw, leave_out=("text_config", "vision_config"))
        known["image_token_index"] = raw.get("image_token_index", raw.get("image_token_id", 32000))
        if raw.get("text_config") is not None:
            known["text_config"] = decoder_config(raw["text_config"])
        if raw.get("vision_config") is not None:
            known["vision_config"] = VisionConfig.from_hf(raw["vision_config"])
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        return asdict(self) | {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": self.text_config.to_hf(),
            "vision_config": self.vision_config.to_hf(),
            "image_token_id": self.image_token_index,
            "image_seq_length": self.image_tokens,
        }


ModelConfig = TextConfig | LlavaConfig


def text_config(config: ModelConfig) -> TextConfig:
    """The decoder's part of a language model's or an LVLM's configuration."""
    return config if isinstance(config, TextConfig) else config.text_config
