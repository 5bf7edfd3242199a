"""Hold LVLM configurations of the LLaVA, Gemma and Qwen families, to and from `config.json`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Self

from jaxspec.config.decoders import decoder_config
from jaxspec.config.gemma import Gemma3TextConfig
from jaxspec.config.schema import Part, check_choice, check_positive, known_fields
from jaxspec.config.text import LlamaConfig, Qwen2Config, Qwen3Config, RotaryConfig
from jaxspec.config.vision import Qwen3VisionConfig, QwenVisionConfig, VisionConfig
from jaxspec.errors import InputError

MOST_TILES = 100
"""The most tiles of an image. The released models take 36 at most."""


@dataclass(frozen=True)
class BaseLvlmConfig(Part):
    """Hold the fields and rules that the families share."""

    text_config: RotaryConfig
    vision_config: Any
    model_type: str
    image_token_index: int
    tie_word_embeddings: bool = False

    architecture: ClassVar[str]
    """transformers' class."""
    _decoder: ClassVar[type[RotaryConfig]]
    _tower: ClassVar[Any] = VisionConfig
    _tower_kind: ClassVar[str | None] = None
    """The model_type of a tower that names none; None: the default of its class."""
    stacked: ClassVar[Any] = 0
    """Decoder layers after which features are added to the image slots (DeepStack)."""
    image_space: ClassVar[str] = ""
    """Text before and after an image and its marks, which the chat template leaves out."""
    image_marks: ClassVar[tuple[int, int] | None] = None
    """Tokens around an image's placeholder; None for a family without them."""
    image_sign: ClassVar[int | None] = None
    """Token that chat templates write for an image; None: placeholder and marks."""

    def __post_init__(self) -> None:
        # The file has two flags: transformers 4 obeys the decoder's, transformers 5 either.
        tied = self.tie_word_embeddings or self.text_config.tie_word_embeddings
        object.__setattr__(self, "tie_word_embeddings", tied)
        object.__setattr__(self, "text_config", replace(self.text_config, tie_word_embeddings=tied))
        for f in fields(self):
            token, value = f.name.endswith(("_token_id", "_token_index")), getattr(self, f.name)
            if token and value < 0:
                part = f"{self.model_type} config"
                raise InputError(f"{part}: {f.name} {value} is not supported; give 0 or more")

    @property
    def tower(self) -> Any:
        """Return all that an image's features depend on, except the weights."""
        return self.vision_config

    @classmethod
    def read_text(cls, raw: dict[str, Any]) -> RotaryConfig:
        """Return the decoder that a file's `text_config` describes."""
        return cls._decoder.from_hf(raw | {"model_type": cls._decoder.model_type})

    @classmethod
    def read_vision(cls, raw: dict[str, Any]) -> Any:
        """Return the tower that a file's `vision_config` describes."""
        return cls._tower.from_hf({"model_type": cls._tower_kind} | raw)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the family's dictionary; a part that is null or missing is the class's default."""
        raw = {key: value for key, value in raw.items() if value is not None}
        read = {"text_config": cls.read_text, "vision_config": cls.read_vision}
        parts = {part: read[part](raw[part]) for part in read if part in raw}
        entries = {key: value for key, value in raw.items() if key not in read}
        token = {"image_token_index": raw.get("image_token_id")}
        return cls(**known_fields(cls, token | entries), **parts)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {
            "architectures": [self.architecture],
            "text_config": self.text_config.to_hf(),
            "vision_config": self.vision_config.to_hf(),
            "image_token_id": self.image_token_index,
        }


@dataclass(frozen=True)
class LlavaConfig(BaseLvlmConfig):
    """Describe LLaVA-1.5: tower, two-layer projector, rotary decoder, transformers' defaults."""

    text_config: RotaryConfig = field(default_factory=LlamaConfig)
    vision_config: VisionConfig = field(default_factory=VisionConfig)
    model_type: str = "llava"
    image_token_index: int = 32000
    projector_hidden_act: str = "gelu"
    multimodal_projector_bias: bool = True
    vision_feature_layer: int = -2
    vision_feature_select_strategy: str = "default"

    architecture = "LlavaForConditionalGeneration"
    _decoder: ClassVar[type[RotaryConfig]] = LlamaConfig
    """The decoder of a file that names none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        part, layer = f"{self.model_type} config", self.vision_feature_layer
        layers = self.vision_config.num_hidden_layers
        if layer not in range(-layers - 1, layers + 1):
            raise InputError(f"{part}: vision_feature_layer {layer} of a tower of {layers} layers")
        check_choice(part, self, "vision_feature_select_strategy", "default", "full")
        check_choice(part, self, "projector_hidden_act", "gelu")
        if self.text_config.joint_images:
            decoder = self.text_config.model_type
            raise InputError(f"{part}: a decoder {decoder!r}, whose image tokens read one another")

    @property
    def tower(self) -> Any:
        features = self.vision_feature_layer, self.vision_feature_select_strategy
        return self.vision_config, *features, getattr(self, "image_grid_pinpoints", None)

    @property
    def image_tokens(self) -> int:
        """Return P, the features of one tile, which is a whole image in LLaVA-1.5."""
        vision = self.vision_config
        return (
            vision.side**2 + vision.class_token - (self.vision_feature_select_strategy == "default")
        )

    @classmethod
    def read_text(cls, raw: dict[str, Any]) -> RotaryConfig:
        return decoder_config(raw, cls._decoder.model_type)

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"image_seq_length": self.image_tokens}


@dataclass(frozen=True)
class LlavaNextConfig(LlavaConfig):
    """Describe LLaVA-NeXT: an image is a base tile and the tiles of the best grid."""

    model_type: str = "llava_next"
    image_grid_pinpoints: tuple[tuple[int, int], ...] = (
        *((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    )
    """Heights and widths of the grids, in whole tiles."""

    architecture = "LlavaNextForConditionalGeneration"

    def __post_init__(self) -> None:
        """Raise InputError for grids that cut tiles, and for an unsupported strategy."""
        super().__post_init__()
        part, side = f"{self.model_type} config", self.vision_config.image_size
        pinpoints = tuple(tuple(pinpoint) for pinpoint in self.image_grid_pinpoints)
        object.__setattr__(self, "image_grid_pinpoints", pinpoints)
        grids = {tuple(length / side for length in pinpoint) for pinpoint in pinpoints}
        whole = {(y, x) for y in range(1, MOST_TILES + 1) for x in range(1, MOST_TILES // y + 1)}
        if not grids or not grids <= whole:
            raise InputError(
                f"{part}: image_grid_pinpoints {pinpoints!s:.60} must be heights and widths of "
                f"1 to {MOST_TILES} whole tiles of {side} pixels; fix config.json"
            )
        if self.image_tokens != self.vision_config.side**2:
            raise InputError(
                f"{part}: vision_feature_select_strategy {self.vision_feature_select_strategy!r} "
                "is not supported; use 'default' with CLIP towers and 'full' with SigLIP's"
            )

    def without_tiles(self) -> LlavaConfig:
        """Return the LLaVA-1.5 that is left without the tiles."""
        shared: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(LlavaConfig)}
        shared["model_type"] = LlavaConfig.model_type
        return LlavaConfig(**shared)


def _siglip(layers: int, image_size: int) -> VisionConfig:
    """Return a tower of SigLIP SO400M's shape, for images of this many pixels along a side."""
    return VisionConfig(
        "siglip_vision_model", 1152, 4304, layers, 16, 3, image_size, 14, "gelu_pytorch_tanh", 1e-6
    )


@dataclass(frozen=True)
class LlavaOnevisionConfig(LlavaNextConfig):
    """Describe LLaVA-OneVision: NeXT's tiles, with a bound on the tokens of an image."""

    text_config: RotaryConfig = field(default_factory=Qwen2Config)
    vision_config: VisionConfig = field(default_factory=partial(_siglip, 26, 384))
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

    architecture = "LlavaOnevisionForConditionalGeneration"
    _decoder = Qwen2Config
    _tower_kind = "siglip_vision_model"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"anyres_max_[1-9]\d{0,2}", self.vision_aspect_ratio):
            ratio = self.vision_aspect_ratio
            raise InputError(f"vision_aspect_ratio {ratio!r} is not supported; use 'anyres_max_9'")

    @property
    def most_tiles(self) -> int:
        """Return the most tiles' worth of features that the grid of one image may take."""
        return int(self.vision_aspect_ratio.removeprefix("anyres_max_"))

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"video_token_id": self.video_token_index}


@dataclass(frozen=True)
class Gemma3Config(BaseLvlmConfig):
    """Describe Gemma 3 with images: SigLIP's tower, whose features are averaged over squares."""

    text_config: Gemma3TextConfig = field(default_factory=Gemma3TextConfig)
    vision_config: VisionConfig = field(default_factory=partial(_siglip, 27, 896))
    model_type: str = "gemma3"
    image_token_index: int = 262144
    boi_token_index: int = 255999
    eoi_token_index: int = 256000
    mm_tokens_per_image: int = 256

    architecture = "Gemma3ForConditionalGeneration"
    _decoder = Gemma3TextConfig
    _tower_kind = "siglip_vision_model"
    image_space = "\n\n"

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        # Without an entry the tower is transformers' default, which fits no Gemma 3.
        return super().from_hf(raw | {"vision_config": raw.get("vision_config") or {}})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("gemma3 config", self, "mm_tokens_per_image")
        vision, tokens = self.vision_config, self.mm_tokens_per_image
        side = math.isqrt(tokens)
        if vision.class_token or side**2 != tokens or vision.side % side:
            raise InputError(
                f"gemma3 config: mm_tokens_per_image {tokens} of a {vision.model_type} of "
                f"{vision.side} x {vision.side} patches; give SigLIP's, and a square of a divisor"
            )

    @property
    def image_tokens(self) -> int:
        """Return the number of features of an image."""
        return self.mm_tokens_per_image

    @property
    def image_marks(self) -> tuple[int, int]:
        return self.boi_token_index, self.eoi_token_index

    @property
    def image_sign(self) -> int:
        return self.boi_token_index

    @property
    def tower(self) -> Any:
        return self.vision_config, self.mm_tokens_per_image


@dataclass(frozen=True)
class QwenVLConfig(BaseLvlmConfig):
    """Describe Qwen2.5-VL: tower of windowed attention, merger, Qwen2 decoder with M-RoPE.

    Defaults are those of transformers' `Qwen2_5_VLConfig`, whose tower and decoder do not fit each
    other.
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

    architecture = "Qwen2_5_VLForConditionalGeneration"
    _decoder = Qwen2Config
    _tower = QwenVisionConfig
    _text_defaults: ClassVar[dict[str, Any]] = {
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
    """Defaults of transformers' text configuration that differ from the decoder's."""
    _mrope_section: ClassVar = (16, 24, 24)
    """`mrope_section` where a file names none."""
    _mrope_interleaved: ClassVar = False

    @property
    def image_marks(self) -> tuple[int, int]:
        """Return the tokens before and after an image's placeholder."""
        return self.vision_start_token_id, self.vision_end_token_id

    @property
    def tower(self) -> Any:
        return replace(self.vision_config, out_hidden_size=0, tokens_per_second=0)

    @classmethod
    def read_text(cls, raw: dict[str, Any]) -> RotaryConfig:
        decoder = super().read_text(cls._text_defaults | raw)
        rope = decoder.rope_scaling
        sections = rope.mrope_section or cls._mrope_section
        rope = replace(rope, mrope_section=sections, mrope_interleaved=cls._mrope_interleaved)
        return replace(decoder, rope_scaling=rope)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the hub's flat files, and the nested ones that transformers writes since 4.52.

        Flat files hold the decoder's fields at the level of `vision_config`.
        """
        text, vision = raw.get("text_config") or raw, raw.get("vision_config") or {}
        return super().from_hf(raw | {"text_config": text, "vision_config": vision})

    def to_hf(self) -> dict[str, Any]:
        """Return the nested dictionary, which transformers reads since 4.52."""
        out = super().to_hf()
        out["text_config"]["model_type"] = f"{self.model_type}_text"
        del out["image_token_index"], out["text_config"]["architectures"]
        return out


@dataclass(frozen=True)
class Qwen3VLConfig(QwenVLConfig):
    """Describe dense Qwen3-VL: tower with DeepStack, Qwen3 decoder with interleaved M-RoPE.

    Defaults are those of transformers' `Qwen3VLConfig`, whose tower and decoder do not fit each
    other.
    """

    text_config: Qwen3Config
    vision_config: Qwen3VisionConfig
    model_type: str = "qwen3_vl"

    architecture = "Qwen3VLForConditionalGeneration"
    _decoder = Qwen3Config
    _tower = Qwen3VisionConfig
    _text_defaults: ClassVar = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
    _mrope_section: ClassVar = (24, 20, 20)
    _mrope_interleaved: ClassVar = True

    @property
    def stacked(self) -> int:
        """Return the number of decoder layers after which features are added to image slots."""
        return len(self.vision_config.deepstack_visual_indexes)

    @property
    def tower(self) -> Any:
        return replace(self.vision_config, out_hidden_size=0)
