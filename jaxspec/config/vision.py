"""Vision towers as frozen dataclasses, read from and written to Hugging Face `config.json` dictionaries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jaxspec.config.text import known_fields
from jaxspec.errors import InputError

_VISION_DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 32,
        "projection_dim": 512,
    },
    "siglip_vision_model": {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "vision_use_head": True,
    },
}
"""`CLIPVisionConfig`'s and `SiglipVisionConfig`'s: what a `vision_config` that is in the file may leave out."""


@dataclass(frozen=True)
class VisionConfig:
    """A CLIP or SigLIP vision tower. Defaults are the ViT-L/14-336 of a `LlavaConfig` without `vision_config`."""

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
    """CLIP's only, and no part of the tower itself."""
    vision_use_head: bool = False
    """SigLIP's only: attention pooling, of which LVLMs use nothing."""

    def __post_init__(self) -> None:
        if self.model_type not in _VISION_DEFAULTS:
            raise InputError(
                f"vision config: model_type {self.model_type!r} is not supported; "
                f"supported: {', '.join(map(repr, _VISION_DEFAULTS))}"
            )
        if self.image_size < self.patch_size or self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"vision config: image_size {self.image_size} must hold a patch of {self.patch_size}, and "
                f"num_attention_heads {self.num_attention_heads} divide hidden_size {self.hidden_size}; fix config.json"
            )
        if self.hidden_act not in ("quick_gelu", "gelu", "gelu_pytorch_tanh"):
            raise InputError(
                f"vision config: hidden_act {self.hidden_act!r} is not supported; "
                "supported: 'quick_gelu', 'gelu', 'gelu_pytorch_tanh'"
            )

    @property
    def side(self) -> int:
        """Patches along one side of the page; what is left over at its right and lower edge is not read."""
        return self.image_size // self.patch_size

    @property
    def class_token(self) -> bool:
        """Whether a class token stands before the patches: CLIP's."""
        return self.model_type == "clip_vision_model"

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> VisionConfig:
        known = known_fields(cls, raw)
        return cls(**_VISION_DEFAULTS.get(known.get("model_type", cls.model_type), {}) | known)

    def to_hf(self) -> dict[str, Any]:
        other = "vision_use_head" if self.class_token else "projection_dim"
        return {name: value for name, value in asdict(self).items() if name != other}
