"""Hold vision tower configurations, to and from Hugging Face `config.json` dictionaries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from jaxspec.config.schema import Part, check_choice, check_positive, known_fields
from jaxspec.errors import InputError

_SHARED_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
}
_SIGLIP_ACT = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": _SHARED_DEFAULTS | {"patch_size": 32, "projection_dim": 512},
    "siglip_vision_model": _SHARED_DEFAULTS | {"patch_size": 16} | _SIGLIP_ACT,
}
"""Defaults of `CLIPVisionConfig` and `SiglipVisionConfig`, for entries that a file leaves out."""


@dataclass(frozen=True)
class VisionConfig(Part):
    """Describe a CLIP or SigLIP tower; by default the ViT-L/14-336 of a file that names none."""

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
    """CLIP's only, and not a part of the tower itself."""

    def __post_init__(self) -> None:
        check_choice("vision config", self, "model_type", *_VISION_DEFAULTS)
        check_choice("vision config", self, "hidden_act", "quick_gelu", "gelu", "gelu_pytorch_tanh")
        check_positive("vision config", self, "image_size", "patch_size", "num_attention_heads")

    @property
    def side(self) -> int:
        """Return the patches along a side; a rest at the right and lower edge is not read."""
        return self.image_size // self.patch_size

    @property
    def class_token(self) -> bool:
        """Return whether a class token precedes the patches, as in CLIP."""
        return self.model_type == "clip_vision_model"

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        entries = known_fields(cls, raw)
        return cls(**_VISION_DEFAULTS.get(entries.get("model_type", cls.model_type), {}) | entries)

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        if not self.class_token:
            del out["projection_dim"]
            out["vision_use_head"] = False  # the pooling head, which no LVLM reads
        return out


@dataclass(frozen=True)
class QwenTowerConfig(Part):
    """Hold the fields that Qwen's towers share. A tile is a square of merge groups."""

    depth: int = 32
    hidden_size: int = 3584
    intermediate_size: int = 3420
    num_heads: int = 16
    hidden_act: str = "silu"
    in_channels: int = 3
    patch_size: int = 14
    temporal_patch_size: int = 2
    """Frames of a patch; a still image is repeated."""
    spatial_merge_size: int = 2
    """Patches along one side of a merge group, which becomes one token."""
    out_hidden_size: int = 3584

    model_type: ClassVar[str]
    """The entry of the file; transformers 5 reads these as well as its own."""
    activation: ClassVar[str] = "silu"
    window_groups: ClassVar[int] = 4
    """Merge groups along one side of a tile."""

    def __post_init__(self) -> None:
        check_choice("vision config", self, "hidden_act", self.activation)
        check_positive("vision config", self, "patch_size", "spatial_merge_size", "num_heads")

    @property
    def window_patches(self) -> int:
        """Return the number of patches of a tile."""
        return (self.window_groups * self.spatial_merge_size) ** 2

    @property
    def patch_values(self) -> int:
        """Return the number of pixel values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        theta = (raw.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        if theta != 10000.0:
            raise InputError(f"vision config: rope_theta {theta} is not supported; give 10000")
        return super().from_hf(raw)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"model_type": self.model_type}


@dataclass(frozen=True)
class QwenVisionConfig(QwenTowerConfig):
    """Describe Qwen2.5-VL's tower, with the defaults of transformers' class."""

    window_size: int = 112
    """Pixels along one side of an attention window, which is a tile."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Layers that attend to the whole image."""
    tokens_per_second: int = 4
    """The rate of videos, which are not read here."""

    model_type = "qwen2_5_vl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.window_groups <= 64:
            raise InputError(
                f"vision config: window_size {self.window_size} must hold 1 to 64 merge groups of "
                f"{self.spatial_merge_size} x {self.patch_size} pixels; fix config.json"
            )

    @property
    def window_groups(self) -> int:
        """Merge groups along one side of an attention window."""
        return self.window_size // self.spatial_merge_size // self.patch_size


@dataclass(frozen=True)
class Qwen3VisionConfig(QwenTowerConfig):
    """Describe Qwen3-VL's tower, with the defaults of transformers' class."""

    depth: int = 27
    hidden_size: int = 1152
    intermediate_size: int = 4304
    hidden_act: str = "gelu_pytorch_tanh"
    patch_size: int = 16
    num_position_embeddings: int = 2304
    """Learned positions: a square, which is stretched over an image."""
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    """Layers whose features are added after the decoder's first layers."""

    model_type = "qwen3_vl_vision"
    activation = "gelu_pytorch_tanh"

    @property
    def position_side(self) -> int:
        """Return the number of positions along one side of the square."""
        return math.isqrt(self.num_position_embeddings)
