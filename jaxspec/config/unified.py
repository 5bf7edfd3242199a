"""Gemma 4 12B, which reads images without a vision tower, to and from `config.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Self

from jaxspec.config.gemma4 import Gemma4UnifiedTextConfig
from jaxspec.config.lvlm import BaseLvlmConfig
from jaxspec.config.schema import check_positive, known_fields
from jaxspec.errors import InputError


@dataclass(frozen=True)
class PixelConfig:
    """Describe how squares of pixels become rows of the decoder's width."""

    model_type: str = "gemma4_unified_vision"
    patch_size: int = 16
    pooling_kernel_size: int = 3
    """Patches along a square."""
    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120
    """Rows and columns of squares that have a learned position."""
    rms_norm_eps: float = 1e-6
    output_proj_dims: int = 3840

    def __post_init__(self) -> None:
        names = ("patch_size", "pooling_kernel_size", "mm_embed_dim", "mm_posemb_size")
        check_positive("gemma4_unified vision config", self, *names)
        if self.output_proj_dims != self.mm_embed_dim:
            raise InputError(
                f"gemma4_unified vision config: output_proj_dims {self.output_proj_dims} and "
                f"mm_embed_dim {self.mm_embed_dim}; give equal ones"
            )

    @property
    def side(self) -> int:
        """Return the pixels along a square."""
        return self.patch_size * self.pooling_kernel_size

    @property
    def hidden_size(self) -> int:
        return self.mm_embed_dim

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        return cls(**known_fields(cls, raw))

    def to_hf(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Gemma4UnifiedConfig(BaseLvlmConfig):
    """Describe Gemma 4 12B: rows of pixels, projected, in the place of image tokens."""

    text_config: Gemma4UnifiedTextConfig = field(default_factory=Gemma4UnifiedTextConfig)
    vision_config: PixelConfig = field(default_factory=PixelConfig)
    model_type: str = "gemma4_unified"
    image_token_index: int = 258880
    """`image_token_id` in the file."""
    boi_token_id: int = 255999
    eoi_token_id: int = 258882
    tie_word_embeddings: bool = True

    architecture = "Gemma4UnifiedForConditionalGeneration"

    @property
    def image_marks(self) -> tuple[int, int]:
        return self.boi_token_id, self.eoi_token_id

    @property
    def image_sign(self) -> int:
        return self.image_token_index

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        if raw.get("vision_config", {}) is None:
            raise InputError("gemma4_unified config: vision_config is null; give a model with one")
        text, kind = raw.get("text_config") or {}, Gemma4UnifiedTextConfig
        return cls(
            text_config=kind.from_hf(text | {"model_type": kind.model_type}),
            vision_config=PixelConfig.from_hf(raw.get("vision_config") or {}),
            **cls.own_fields(raw),
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary, without audio, which is not read."""
        out: dict[str, Any] = super().to_hf() | {"audio_config": None}
        del out["image_token_index"], out["text_config"]["architectures"]
        return out
