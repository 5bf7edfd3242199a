"""Configurations that no model here computes are refused in one line, which names the entry."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxspec.config import (
    Gemma3Config,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MistralConfig,
    OptConfig,
    Qwen2Config,
    QwenVLConfig,
    VisionConfig,
)
from jaxspec.errors import InputError

WINDOW = {"use_sliding_window": True, "sliding_window": 16}
SIGLIP = {"model_type": "siglip_vision_model"}


@pytest.mark.parametrize(
    ("kind", "raw", "message"),
    [
        (
            LlamaConfig,
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported",
        ),
        (
            LlamaConfig,
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "factor 0 is not supported; give more than 0",
        ),
        (
            LlamaConfig,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1.0}},
            "beta_fast -1.0 is not supported; give more than 0",
        ),
        (
            QwenVLConfig,
            {"text_config": {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}},
            "mrope_section [16, 24] of heads of 128; give three numbers that add up to 64",
        ),
        (
            LlamaConfig,
            {"vocab_size": 9, "draft_vocabulary": [3, 9]},
            "draft_vocabulary: give ids from 0 to 8, each once",
        ),
        (LlamaConfig, {"draft_vocabulary": [3, 3]}, "ids from 0 to 31999, each once"),
        (LlamaConfig, {"known_tokens": -3}, "known_tokens -3; give 0 to 32000"),
        (LlamaConfig, {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (MistralConfig, {"sliding_window": 0}, "sliding_window 0 is not supported"),
        (
            Qwen2Config,
            WINDOW | {"layer_types": ["full_attention"] * 31 + ["chunked_attention"] * 2},
            "for 32 layers; give full_attention or sliding_attention for each",
        ),
        (
            Gemma4TextConfig,
            {"vocab_size_per_layer_input": 8},
            "vocab_size_per_layer_input 8 for 262144 tokens; give 0 or more, and 262144",
        ),
        (
            Gemma4UnifiedTextConfig,
            {"num_kv_shared_layers": 30},
            "num_kv_shared_layers 30 of 30 layers; give 0 to 29",
        ),
        (
            Gemma4TextConfig,
            {"num_kv_shared_layers": 27},
            "num_kv_shared_layers 27 of 30 layers, and the 3 others are not of kind full_attention",
        ),
        (
            Gemma4Config,
            {"text_config": {"enable_moe_block": True}},
            "enable_moe_block True: experts, as in Gemma 4 26B-A4B, are not supported",
        ),
        (Gemma4Config, {"vision_config": None}, "gemma4 config: vision_config is null"),
        (Gemma3Config, {"vision_config": None}, "mm_tokens_per_image 256 of a siglip_vision_model"),
        (Gemma4VisionConfig, {"num_key_value_heads": 4}, "12 heads of 64 and 4 of keys; give no"),
        (
            Gemma4UnifiedTextConfig,
            {"per_layer_config": {"0": {"head_dim": 512}}},
            "give the full layers, with equal sizes",
        ),
        (OptConfig, {"activation_function": "gelu_new"}, "activation_function 'gelu_new' is not s"),
        (VisionConfig, SIGLIP | {"image_size": [12, 24]}, "image_size [12, 24] is not supported"),
        (LlavaConfig, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer [-2, -5] is not s"),
        (LlavaConfig, {"vision_feature_layer": 40}, "vision_feature_layer 40 of a tower of 24 lay"),
        (LlavaConfig, {"text_config": {"model_type": "opt"}}, "'opt' is not one of ['llama', 'mis"),
        (LlavaNextConfig, {"image_grid_pinpoints": [[336, 600]]}, "1 to 100 whole tiles of 336 pi"),
        (
            LlavaOnevisionConfig,
            {"vision_feature_select_strategy": "default"},
            "and 'full' with SigLIP's",
        ),
        (VisionConfig, {"patch_size": 0}, "vision config: patch_size 0 is not supported; give mo"),
        (LlavaNextConfig, {"vision_config": {"image_size": 0}}, "image_size 0 is not supported"),
        (QwenVLConfig, {"vision_config": {"patch_size": 0}}, "patch_size 0 is not supported"),
        (
            QwenVLConfig,
            {"vision_config": {"window_size": 20}},
            "window_size 20 must hold 1 to 64 merge groups of 2 x 14",
        ),
    ],
)
def test_what_is_not_supported_is_one_line(kind: Any, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        kind.from_hf(raw)
    assert "\n" not in str(caught.value)


def test_windows_that_change_nothing_are_read() -> None:
    assert MistralConfig.from_hf({"max_position_embeddings": 4096}) == MistralConfig(
        max_position_embeddings=4096
    )
    for raw in (WINDOW | {"use_sliding_window": False}, WINDOW | {"sliding_window": 32768}):
        assert Qwen2Config.from_hf(raw | {"max_window_layers": 0}) == Qwen2Config(
            num_hidden_layers=32
        )
    short = {"use_sliding_window": True, "num_hidden_layers": 28}
    assert Qwen2Config.from_hf(short) == Qwen2Config(num_hidden_layers=28)
