"""Qwen2.5-VL's configuration. Field names and default values are Hugging Face's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from jaxspec.config.text import Qwen2Config, known_fields
from jaxspec.errors import InputError

MROPE_SECTION = (16, 24, 24)
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
"""`Qwen2_5_VLTextConfig`'s, where they are not `Qwen2Config`'s."""


@dataclass(frozen=True)
class QwenVisionConfig:
    """Qwen2.5-VL's tower. Defaults are those of transformers' `Qwen2_5_VLVisionConfig`."""

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
    window_size: int = 112
    """Pixels along one side of an attention window."""
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)
    """Layers that attend to the whole image."""
    out_hidden_size: int = 3584
    tokens_per_second: int = 4
    """The rate of videos, which are not read here."""

    def __post_init__(self) -> None:
        if self.hidden_act != "silu":
            raise InputError(f"vision config: hidden_act {self.hidden_act!r} is not supported; supported: 'silu'")
        if self.window_groups < 1:
            raise InputError(
                f"vision config: window_size {self.window_size} is smaller than a merge group of "
                f"{self.spatial_merge_size} x {self.patch_size} pixels; fix config.json"
            )
        if self.hidden_size % (4 * self.num_heads):
            raise InputError(
                f"vision config: num_heads {self.num_heads} does not cut hidden_size {self.hidden_size} into heads "
                "of a multiple of 4; fix config.json"
            )

    @property
    def window_groups(self) -> int:
        """Merge groups along one side of an attention window."""
        return self.window_size // self.spatial_merge_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches of an attention window."""
        return (self.window_groups * self.spatial_merge_size) ** 2

    @property
    def patch_values(self) -> int:
        """Pixel values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> QwenVisionConfig:
        known = known_fields(cls, raw)
        theta = (raw.get("rope_parameters") or {}).get("rope_theta", 10000.0)
        if theta != 10000.0:
            raise InputError(f"vision config: rope_theta {theta} is not supported; Qwen2.5-VL's tower has 10000")
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        # transformers 5 reads this model_type as well as its own.
        return asdict(self) | {"model_type": "qwen2_5_vl", "fullatt_block_indexes": list(self.fullatt_block_indexes)}


@dataclass(frozen=True)
class QwenVLConfig:
    """Qwen2.5-VL: a tower of windowed attention, merger, Qwen2 decoder with M-RoPE.

    Defaults are those of transformers' `Qwen2_5_VLConfig` (whose own tower and decoder do not fit each other).
    """

    text_config: Qwen2Config
    vision_config: QwenVisionConfig
    model_type: str = "qwen2_5_vl"
    image_token_index: int = 151655
    """`image_token_id` in the file."""
    video_token_id: int = 151656
    """Not read here, as no video is."""
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if not self.text_config.rope_scaling.mrope_section:
            raise InputError("qwen2_5_vl config: rope_scaling has no mrope_section; fix config.json")
        if self.vision_config.out_hidden_size != self.text_config.hidden_size:
            raise InputError(
                f"qwen2_5_vl config: the tower's out_hidden_size {self.vision_config.out_hidden_size} is not the "
                f"decoder's hidden_size {self.text_config.hidden_size}; fix config.json"
            )
        # Flat files have one flag, nested ones two: transformers 4 obeys the decoder's, transformers 5 either.
        tied = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        object.__setattr__(self, "tie_word_embeddings", tied)
        object.__setattr__(self, "text_config", replace(self.text_config, tie_word_embeddings=tied))

    @property
    def image_marks(self) -> tuple[int, int]:
        """The tokens before and after an image's placeholder."""
        return self.vision_start_token_id, self.vision_end_token_id

    @property
    def tower(self) -> Any:
        """All that the features of an image depend on, but for the weights."""
        return replace(self.vision_config, out_hidden_size=0, tokens_per_second=0)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> QwenVLConfig:
        """Reads the hub's flat files, whose decoder's fields stand beside `vision_config`, and the nested ones that
        transformers writes since 4.52."""
        known = known_fields(cls, raw, leave_out=("text_config", "vision_config", "image_token_index"))
        known["text_config"] = _decoder(raw.get("text_config") or raw)
        known["vision_config"] = QwenVisionConfig.from_hf(raw.get("vision_config") or {})
        if raw.get("image_token_id") is not None:
            known["image_token_index"] = raw["image_token_id"]
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        """The nested dictionary, which transformers reads since 4.52."""
        out = asdict(self) | {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "text_config": self.text_config.to_hf() | {"model_type": "qwen2_5_vl_text"},
            "vision_config": self.vision_config.to_hf(),
            "image_token_id": self.image_token_index,
        }
        del out["image_token_index"], out["text_config"]["architectures"]
        return out


def _decoder(raw: dict[str, Any]) -> Qwen2Config:
    config = Qwen2Config.from_hf(_TEXT_DEFAULTS | raw | {"model_type": Qwen2Config.model_type})
    if config.rope_scaling.mrope_section:
        return config
    return replace(config, rope_scaling=replace(config.rope_scaling, mrope_section=MROPE_SECTION))
