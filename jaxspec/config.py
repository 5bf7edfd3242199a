"""Architectures as frozen dataclasses, read from and written to Hugging Face `config.json` dictionaries.

Field names and default values are Hugging Face's, because published files leave out whatever equals the
default of the transformers class that wrote them (`llava-hf/llava-1.5-7b-hf` names neither width nor depth).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from jaxspec.errors import InputError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the trained context (`linear`, `llama3`)."""

    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def to_hf(self) -> dict[str, Any]:
        keys = {"default": (), "linear": ("factor",)}.get(self.rope_type, tuple(f.name for f in fields(self)))
        return {"rope_type": self.rope_type} | {k: getattr(self, k) for k in keys}


@dataclass(frozen=True)
class TextConfig:
    """A Llama decoder. Defaults are those of transformers' `LlamaConfig`."""

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    """0 means: as many as query heads."""
    head_dim: int = 0
    """0 means: hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"text config: num_key_value_heads {self.num_key_value_heads} does not divide "
                f"num_attention_heads {self.num_attention_heads}; fix config.json"
            )
        if self.hidden_act != "silu":
            raise InputError(f"text config: hidden_act {self.hidden_act!r} is not supported; Llama uses 'silu'")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> TextConfig:
        """Reads a `LlamaConfig` dictionary, with the rotary keys of transformers 4 or of transformers 5."""
        if raw.get("model_type", "llama") != "llama":
            raise InputError(f"text config: model_type {raw['model_type']!r} is not supported; supported: 'llama'")
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        rope.setdefault("rope_type", rope.get("type", "default"))
        if rope["rope_type"] not in ("default", "linear", "llama3"):
            raise InputError(
                f"text config: rope_type {rope['rope_type']!r} is not supported; "
                "supported: 'default', 'linear', 'llama3'"
            )
        known = _known(cls, raw, leave_out=("rope_scaling",))
        if rope.get("rope_theta") is not None:
            known["rope_theta"] = rope["rope_theta"]
        if rope["rope_type"] == "llama3":
            trained = known.get("max_position_embeddings", cls.max_position_embeddings)
            rope.setdefault("original_max_position_embeddings", trained)
        if isinstance(known.get("eos_token_id"), list):
            known["eos_token_id"] = tuple(known["eos_token_id"])
        return cls(**known, rope_scaling=RopeScaling(**_known(RopeScaling, rope)))

    def to_hf(self) -> dict[str, Any]:
        """The `LlamaConfig` dictionary, with the rotary keys of transformers 4 and of transformers 5."""
        out = asdict(self) | {"architectures": ["LlamaForCausalLM"]}
        scaling = self.rope_scaling.to_hf()
        out["rope_scaling"] = None if self.rope_scaling.rope_type == "default" else scaling
        out["rope_parameters"] = {"rope_theta": self.rope_theta} | scaling
        if isinstance(self.eos_token_id, tuple):
            out["eos_token_id"] = list(self.eos_token_id)
        return out


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
        return cls(**_CLIP_DEFAULTS | _known(cls, raw))

    def to_hf(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LlavaConfig:
    """LLaVA-1.5: CLIP tower, two-layer projector, Llama decoder. Defaults are transformers' `LlavaConfig`'s."""

    text_config: TextConfig = field(default_factory=TextConfig)
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
        known = _known(cls, raw, leave_out=("text_config", "vision_config"))
        known["image_token_index"] = raw.get("image_token_index", raw.get("image_token_id", 32000))
        if raw.get("text_config") is not None:
            known["text_config"] = TextConfig.from_hf(raw["text_config"])
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


def _known(cls: type, raw: dict[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entries of `raw` that are fields; null means the default, except where a field may be None."""
    nullable = {f.name: "None" in str(f.type) for f in fields(cls) if f.name not in leave_out}
    return {k: v for k, v in raw.items() if k in nullable and (v is not None or nullable[k])}
