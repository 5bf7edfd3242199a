"""Write a tiny checkpoint of every kind of input, with all files that lie next to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.huggingface import SaveOptions, save
from jaxspec.checkpoints.processors import pillow_class
from jaxspec.config import (
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    ModelConfig,
    OptConfig,
    PixelConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VisionConfig,
    Qwen3VLConfig,
    QwenVisionConfig,
    QwenVLConfig,
    RopeScaling,
    VisionConfig,
    text_config,
)
from tests import tiny

_TEXT, _VISION = tiny.CONFIG.text_config, tiny.CONFIG.vision_config
_SIDE, _WORDS, _IMAGE = _VISION.image_size, _TEXT.vocab_size, tiny.CONFIG.image_token_index
_PINPOINTS = ((_SIDE, 2 * _SIDE), (2 * _SIDE, _SIDE))
_SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}
_QWEN_TEXT = {"vocab_size": _WORDS, "num_key_value_heads": 1, "eos_token_id": 2} | _SHAPE
_QWEN_TOWER: dict[str, Any] = {"patch_size": 4, "out_hidden_size": 16}
_QWEN_MARKS: dict[str, Any] = {"image_token_index": 3, "video_token_id": 0}
_QWEN_MARKS |= {"vision_start_token_id": 1, "vision_end_token_id": 2}


def _next() -> tuple[ModelConfig, Any]:
    config = LlavaNextConfig(
        _TEXT, _VISION, image_token_index=_IMAGE, image_grid_pinpoints=_PINPOINTS
    )
    edges = {"size": {"shortest_edge": _SIDE}, "crop_size": {"height": _SIDE, "width": _SIDE}}
    pinpoints = [list(pinpoint) for pinpoint in _PINPOINTS]
    maker = pillow_class("LlavaNextImageProcessor")
    return config, maker(image_grid_pinpoints=pinpoints, **edges)


def _onevision() -> tuple[ModelConfig, Any]:
    tower = VisionConfig(
        "siglip_vision_model", image_size=_SIDE, patch_size=14, hidden_act="gelu", **_SHAPE
    )
    text = Qwen2Config(**_QWEN_TEXT)
    config = LlavaOnevisionConfig(
        text, tower, image_token_index=_IMAGE, video_token_index=3, image_grid_pinpoints=_PINPOINTS
    )
    maker = pillow_class("LlavaOnevisionImageProcessor")
    pinpoints = [list(pinpoint) for pinpoint in _PINPOINTS]
    return config, maker(image_grid_pinpoints=pinpoints, size={"height": _SIDE, "width": _SIDE})


def _patches_of_qwen() -> Any:
    size = {"shortest_edge": 64, "longest_edge": 4096}
    return pillow_class("Qwen2VLImageProcessor")(patch_size=4, size=size)


def _qwen_vl() -> tuple[ModelConfig, Any]:
    rope = RopeScaling(mrope_section=(1, 1, 2))
    text = Qwen2Config(**_QWEN_TEXT, rope_scaling=rope)
    vision = QwenVisionConfig(
        1, 16, 24, 2, **_QWEN_TOWER, window_size=16, fullatt_block_indexes=(0,)
    )
    return QwenVLConfig(text, vision, **_QWEN_MARKS), _patches_of_qwen()


def _qwen3_vl() -> tuple[ModelConfig, Any]:
    rope = RopeScaling(mrope_section=(2, 1, 1), mrope_interleaved=True)
    text = Qwen3Config(**_QWEN_TEXT, head_dim=8, rope_scaling=rope)
    vision = Qwen3VisionConfig(
        2, 16, 24, 2, **_QWEN_TOWER, num_position_embeddings=9, deepstack_visual_indexes=(1,)
    )
    return Qwen3VLConfig(text, vision, **_QWEN_MARKS), _patches_of_qwen()


_MARKS = {"image_token_index": 3, "boi_token_id": 1, "eoi_token_id": 2}
_PATCHES = {"patch_size": 4, "pooling_kernel_size": 3}


def _squares() -> Any:
    return pillow_class("Gemma4ImageProcessor")(max_soft_tokens=70, **_PATCHES)


def _gemma3() -> tuple[ModelConfig, Any]:
    kinds = ("sliding_attention", "full_attention")
    heads = {"num_key_value_heads": 1, "head_dim": 8, "query_pre_attn_scalar": 8}
    text = Gemma3TextConfig(
        vocab_size=_WORDS, layer_types=kinds, sliding_window=8, rope_theta=100.0,
        **_SHAPE | heads | {"num_hidden_layers": 2},
    )  # fmt: skip
    tower = VisionConfig("siglip_vision_model", image_size=_SIDE, patch_size=14, **_SHAPE)
    config = Gemma3Config(
        text, tower, mm_tokens_per_image=1, image_token_index=3, boi_token_index=1,
        eoi_token_index=2, tie_word_embeddings=False,
    )  # fmt: skip
    size = {"height": _SIDE, "width": _SIDE}
    return config, pillow_class("Gemma3ImageProcessor")(size=size, image_seq_length=1)


def _gemma4() -> tuple[ModelConfig, Any]:
    """Return a model with 31B's tower, whose window is shorter than an image."""
    kinds = ("sliding_attention", "full_attention")
    text = replace(tiny.gemma4(kinds, 20), use_bidirectional_attention="vision")
    heads = {"num_key_value_heads": 2, "head_dim": 8, "standardize": True}
    vision = Gemma4VisionConfig(**_SHAPE, **heads, **_PATCHES, position_embedding_size=210)
    return Gemma4Config(text, vision, tie_word_embeddings=False, **_MARKS), _squares()


def _gemma4_unified() -> tuple[ModelConfig, Any]:
    vision = PixelConfig(**_PATCHES, mm_embed_dim=16, output_proj_dims=16)
    text = Gemma4UnifiedTextConfig.from_hf(text_config(_gemma4()[0]).to_hf())
    text = replace(text, model_type="gemma4_unified_text")
    return Gemma4UnifiedConfig(text, vision, tie_word_embeddings=False, **_MARKS), _squares()


def _opt() -> tuple[ModelConfig, Any]:
    return OptConfig(vocab_size=_WORDS, **_SHAPE), None


FAMILIES: dict[str, Callable[[], tuple[ModelConfig, Any]]] = {
    "llava": lambda: (tiny.CONFIG, tiny.image_processor()),
    "llava_next": _next,
    "llava_onevision": _onevision,
    "qwen2_5_vl": _qwen_vl,
    "qwen3_vl": _qwen3_vl,
    "opt": _opt,
}
SQUARES: dict[str, Callable[[], tuple[ModelConfig, Any]]] = {
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
}
"""Gemma 4's, whose images take at least 70 tokens."""
SEEING = {name: make for name, make in FAMILIES.items() if name != "opt"} | SQUARES
SEEING["gemma3"] = _gemma3
"""Every family that reads images."""


def write(path: Path, family: str) -> Path:
    """Write `target`, in shards, and for a LLaVA its KV head `head`."""
    config, processor = FAMILIES[family]()
    params = tiny.random_params(config)
    options = SaveOptions(max_shard_bytes=20_000)
    words = tiny.tokenizer() if text_config(config).model_type == "llama" else tiny.chat_tokenizer()
    save(path / "target", config, params, options, tokenizer=words, image_processor=processor)
    if family == "llava":
        tiny.save_head(path / "head", tiny.CONFIG, params)
    return path
