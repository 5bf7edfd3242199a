"""Describe Gemma 4 with images, read by a vision tower or (the 12B) without one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from jaxspec.config.gemma4 import Gemma4TextConfig, Gemma4UnifiedTextConfig
from jaxspec.config.lvlm import BaseLvlmConfig
from jaxspec.config.schema import Part, check_choice, check_positive
from jaxspec.errors import InputError


@dataclass(frozen=True)
class SquaresConfig(Part):
    """Hold the fields of images that are read as squares of patches, each of them a token."""

    model_type: str
    patch_size: int = 16
    pooling_kernel_size: int = 3
    """Patches along a square."""
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_positive("gemma4 vision config", self, "patch_size", "pooling_kernel_size")

    @property
    def side(self) -> int:
        """Return the pixels along a square."""
        return self.patch_size * self.pooling_kernel_size


@dataclass(frozen=True)
class Gemma4VisionConfig(SquaresConfig):
    """Describe Gemma 4's vision tower, by default E2B's and E4B's without clipping."""

    model_type: str = "gemma4_vision"
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    attention_bias: bool = False
    rope_theta: float = 100.0
    """Base of the rotary positions; `rope_parameters` holds it in the file."""
    position_embedding_size: int = 10240
    """Rows and columns of patches that have a learned position."""
    use_clipped_linears: bool = False
    """Whether bounds clip what matrices of layers read and return, as in E2B and E4B."""
    standardize: bool = False
    """Whether a learned shift and scale follow the tower, as in 26B-A4B and 31B."""

    def __post_init__(self) -> None:
        super().__post_init__()
        part = "gemma4 vision config"
        check_choice(part, self, "hidden_activation", "gelu_pytorch_tanh")
        check_positive(part, self, "num_attention_heads", "position_embedding_size", "rope_theta")
        heads = self.num_attention_heads, self.num_key_value_heads
        if self.attention_bias or heads[0] != heads[1] or self.head_dim % 4:
            raise InputError(
                f"{part}: attention_bias {self.attention_bias}, {heads[0]} heads of "
                f"{self.head_dim} and {heads[1]} of keys; give no bias, equal numbers of heads, "
                "and a multiple of 4"
            )

    @property
    def longest(self) -> int:
        """Return the most squares along an image that have learned positions."""
        return self.position_embedding_size // self.pooling_kernel_size

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        theta = (raw.get("rope_parameters") or {}).get("rope_theta")
        return super().from_hf({**raw, "rope_theta": theta})

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        rotary = {"rope_type": "default", "rope_theta": out.pop("rope_theta")}
        return out | {"rope_parameters": rotary}


@dataclass(frozen=True)
class PixelConfig(SquaresConfig):
    """Describe how squares of pixels become rows of the decoder's width."""

    model_type: str = "gemma4_unified_vision"
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    """Rows and columns of squares that have a learned position."""
    output_proj_dims: int = 3840

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("gemma4_unified vision config", self, "mm_embed_dim", "mm_posemb_size")
        if self.output_proj_dims != self.mm_embed_dim:
            raise InputError(
                f"gemma4_unified vision config: output_proj_dims {self.output_proj_dims} and "
                f"mm_embed_dim {self.mm_embed_dim}; give equal ones"
            )

    @property
    def longest(self) -> int:
        """Return the most squares along an image."""
        return self.mm_posemb_size

    @property
    def hidden_size(self) -> int:
        return self.mm_embed_dim


@dataclass(frozen=True)
class Gemma4Config(BaseLvlmConfig):
    """Describe a Gemma 4 with a vision tower: 31B, E4B and E2B."""

    text_config: Gemma4TextConfig = field(default_factory=Gemma4TextConfig)
    vision_config: Gemma4VisionConfig = field(default_factory=Gemma4VisionConfig)
    model_type: str = "gemma4"
    image_token_index: int = 258880
    """Id of an image's tokens; the file calls it `image_token_id`."""
    boi_token_id: int = 255999
    eoi_token_id: int = 258882
    tie_word_embeddings: bool = True

    architecture = "Gemma4ForConditionalGeneration"
    _decoder = Gemma4TextConfig
    _tower = Gemma4VisionConfig

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        if raw.get("vision_config", {}) is None:
            part = f"{cls.model_type} config"
            raise InputError(f"{part}: vision_config is null; give a model with one")
        return super().from_hf(raw)

    @property
    def image_marks(self) -> tuple[int, int]:
        return self.boi_token_id, self.eoi_token_id

    @property
    def image_sign(self) -> int:
        return self.image_token_index

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary, without audio, which is not read."""
        out: dict[str, Any] = super().to_hf() | {"audio_config": None}
        del out["image_token_index"], out["text_config"]["architectures"]
        return out


@dataclass(frozen=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """Describe Gemma 4 12B: rows of pixels, projected, in the place of image tokens."""

    text_config: Gemma4UnifiedTextConfig = field(default_factory=Gemma4UnifiedTextConfig)
    vision_config: PixelConfig = field(default_factory=PixelConfig)  # pyright: ignore
    model_type: str = "gemma4_unified"

    architecture = "Gemma4UnifiedForConditionalGeneration"
    _decoder = Gemma4UnifiedTextConfig
    _tower = PixelConfig
