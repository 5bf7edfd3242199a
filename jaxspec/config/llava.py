"""The LLaVA families as frozen dataclasses, read from and written to Hugging Face `config.json` dictionaries."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from jaxspec.config.text import LlamaConfig, Qwen2Config, RotaryConfig, decoder_config, known_fields
from jaxspec.config.vision import VisionConfig
from jaxspec.errors import InputError

_MOST_TILES = 100
"""The most tiles of an image. The released models take 36 at most."""


@dataclass(frozen=True)
class LlavaConfig:
    """LLaVA-1.5: tower, two-layer projector, rotary decoder. Defaults are transformers' `LlavaConfig`'s."""

    text_config: RotaryConfig = field(default_factory=LlamaConfig)
    vision_config: VisionConfig = field(default_factory=VisionConfig)
    model_type: str = "llava"
    image_token_index: int = 32000
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int = -2
    vision_feature_select_strategy: str = "default"
    tie_word_embeddings: bool = False

    _decoder: ClassVar = "llama"
    """What a `text_config` without a model_type is."""
    _tower: ClassVar = "clip_vision_model"
    """What a `vision_config` without one is."""

    def __post_init__(self) -> None:
        layers = self.vision_config.num_hidden_layers
        if self.vision_feature_layer not in range(-layers - 1, layers + 1):
            raise InputError(
                f"{self.model_type} config: a tower of {layers} layers has no vision_feature_layer "
                f"{self.vision_feature_layer}; fix config.json"
            )
        if self.vision_feature_select_strategy not in ("default", "full"):
            raise InputError(
                f"{self.model_type} config: vision_feature_select_strategy "
                f"{self.vision_feature_select_strategy!r} is unknown; use 'default' or 'full'"
            )
        if self.projector_hidden_act != "gelu":
            raise InputError(
                f"{self.model_type} config: projector_hidden_act {self.projector_hidden_act!r} is not supported; "
                "use 'gelu'"
            )
        # The file has two flags: transformers 4 obeys the decoder's, transformers 5 either.
        tied = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        object.__setattr__(self, "tie_word_embeddings", tied)
        object.__setattr__(self, "text_config", replace(self.text_config, tie_word_embeddings=tied))

    @property
    def image_marks(self) -> None:
        """No tokens stand around an image's placeholder."""

    @property
    def tower(self) -> Any:
        """All that the features of an image depend on, but for the weights."""
        pinpoints = getattr(self, "image_grid_pinpoints", None)
        return self.vision_config, self.vision_feature_layer, self.vision_feature_select_strategy, pinpoints

    @property
    def image_tokens(self) -> int:
        """P: features that the tower gives of one unit, which is a whole image of LLaVA-1.5."""
        vision = self.vision_config
        return vision.side**2 + vision.class_token - (self.vision_feature_select_strategy == "default")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        known = known_fields(cls, raw, leave_out=("text_config", "vision_config"))
        if raw.get("image_token_id") is not None:
            known.setdefault("image_token_index", raw["image_token_id"])
        if raw.get("text_config") is not None:
            known["text_config"] = decoder_config({"model_type": cls._decoder} | raw["text_config"])
        if raw.get("vision_config") is not None:
            known["vision_config"] = VisionConfig.from_hf({"model_type": cls._tower} | raw["vision_config"])
        return cls(**known)

    def to_hf(self) -> dict[str, Any]:
        return asdict(self) | {
            "architectures": [type(self).__name__.removesuffix("Config") + "ForConditionalGeneration"],
            "text_config": self.text_config.to_hf(),
            "vision_config": self.vision_config.to_hf(),
            "image_token_id": self.image_token_index,
            "image_seq_length": self.image_tokens,
        }


@dataclass(frozen=True)
class LlavaNextConfig(LlavaConfig):
    """LLaVA-NeXT: an image is a base tile and the tiles of the best grid. Defaults are `LlavaNextConfig`'s."""

    model_type: str = "llava_next"
    image_grid_pinpoints: tuple[tuple[int, int], ...] = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    """Heights and widths that an image may be scaled into, whole tiles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            pinpoints = tuple((height, width) for height, width in self.image_grid_pinpoints)
        except ValueError:
            pinpoints = ()
        if not pinpoints:
            raise InputError(
                f"{self.model_type} config: image_grid_pinpoints {str(self.image_grid_pinpoints)[:60]!r} must be pairs "
                "of height and width; fix config.json"
            )
        object.__setattr__(self, "image_grid_pinpoints", pinpoints)
        side = self.vision_config.image_size
        for height, width in pinpoints:
            if height % side or width % side or height * width > _MOST_TILES * side**2:
                raise InputError(
                    f"{self.model_type} config: image_grid_pinpoints must be at most {_MOST_TILES} whole tiles of "
                    f"{side} pixels, and {height}x{width} is not; fix config.json"
                )
        if self.image_tokens != self.vision_config.side**2:
            raise InputError(
                f"{self.model_type} config: vision_feature_select_strategy {self.vision_feature_select_strategy!r} "
                f"leaves {self.image_tokens} features of {self.vision_config.side**2} patches; "
                "use 'default' with CLIP towers and 'full' with SigLIP's"
            )

    def one_page(self) -> LlavaConfig:
        """The LLaVA-1.5 that is left without the tiles."""
        shared: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(LlavaConfig)}
        shared["model_type"] = LlavaConfig.model_type
        return LlavaConfig(**shared)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"image_grid_pinpoints": [list(pinpoint) for pinpoint in self.image_grid_pinpoints]}


def _onevision_tower() -> VisionConfig:
    return VisionConfig("siglip_vision_model", 1152, 4304, 26, 16, 3, 384, 14, "gelu_pytorch_tanh", 1e-6)


@dataclass(frozen=True)
class LlavaOnevisionConfig(LlavaNextConfig):
    """LLaVA-OneVision: NeXT's tiles, at most so many tokens an image. Defaults are `LlavaOnevisionConfig`'s."""

    text_config: RotaryConfig = field(default_factory=Qwen2Config)
    vision_config: VisionConfig = field(default_factory=_onevision_tower)
    model_type: str = "llava_onevision"
    image_token_index: int = 151646
    vision_feature_layer: int = -1
    vision_feature_select_strategy: str = "full"
    image_grid_pinpoints: tuple[tuple[int, int], ...] = tuple(
        (height, width) for height in range(384, 2305, 384) for width in range(384, 2305, 384)
    )
    video_token_index: int = 151647
    vision_aspect_ratio: str = "anyres_max_9"
    """Features of more tiles than this are scaled down to as many."""

    _decoder: ClassVar = "qwen2"
    _tower: ClassVar = "siglip_vision_model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"anyres_max_[1-9]\d{0,2}", self.vision_aspect_ratio):
            raise InputError(
                f"llava_onevision config: vision_aspect_ratio {self.vision_aspect_ratio!r} is not supported; "
                "use 'anyres_max_9' or another number"
            )

    @property
    def most_tiles(self) -> int:
        """Tiles' worth of features that the grid of one image may take."""
        return int(self.vision_aspect_ratio.removeprefix("anyres_max_"))

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"video_token_id": self.video_token_index}
