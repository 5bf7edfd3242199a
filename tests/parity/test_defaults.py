"""What a config.json leaves out is what transformers takes for it, in a whole file and in its
parts.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import transformers

import jaxspec.config as configs

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("LlavaConfig", "LlavaConfig", {}),
    (
        "LlavaConfig",
        "LlavaConfig",
        {"vision_config": {"model_type": "clip_vision_model", "hidden_size": 1152}},
    ),
    (
        "LlavaNextConfig",
        "LlavaNextConfig",
        {"vision_config": {"image_size": 336}, "text_config": {"hidden_size": 896}},
    ),
    ("LlavaOnevisionConfig", "LlavaOnevisionConfig", {}),
    ("OptConfig", "OPTConfig", {}),
    ("Qwen2Config", "Qwen2Config", {}),
    ("Qwen3Config", "Qwen3Config", {}),
    ("Gemma3TextConfig", "Gemma3TextConfig", {}),
    ("Gemma4TextConfig", "Gemma4TextConfig", {}),
    ("Gemma4UnifiedTextConfig", "Gemma4UnifiedTextConfig", {}),
    (
        "Gemma4Config",
        "Gemma4Config",
        {"text_config": {"hidden_size_per_layer_input": 0}, "vision_config": {"patch_size": 16}},
    ),
    ("Gemma4UnifiedConfig", "Gemma4UnifiedConfig", {"vision_config": {"patch_size": 16}}),
    (
        "Gemma3Config",
        "Gemma3Config",
        {"vision_config": {"image_size": 896, "patch_size": 14, "hidden_size": 1152}},
    ),
    ("MistralConfig", "MistralConfig", {}),
    ("QwenVLConfig", "Qwen2_5_VLConfig", {"vision_config": {"out_hidden_size": 8192}}),
]
RENAMED = {
    "remove_final_layer_norm": "_remove_final_layer_norm",
    "image_token_index": "image_token_id",
    "hidden_act": "hidden_activation",
}
OTHERWISE = {
    *("model_type", "head_dim", "rope_theta", "rope_scaling", "layer_types", "draft_vocabulary"),
    "tie_word_embeddings",
}
"""What transformers keeps in another form, or does not know."""


def compare(ours: Any, theirs: Any) -> int:
    """Compare the fields that both have; return how many there are."""
    count = 0
    for name in {field.name for field in fields(ours)} - OTHERWISE:
        mine, there = (
            getattr(ours, name),
            name if hasattr(theirs, name) else RENAMED.get(name, name),
        )
        if is_dataclass(mine):
            count += compare(mine, getattr(theirs, name))
        elif hasattr(theirs, there):
            assert listed(mine) == listed(getattr(theirs, there)), name
            count += 1
    return count


def listed(value: Any) -> Any:
    """Return tuples as lists."""
    return [listed(part) for part in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize(("kind", "name", "raw"), CASES)
def test_defaults_are_those_of_transformers(kind: str, name: str, raw: dict[str, Any]) -> None:
    ours, theirs = getattr(configs, kind).from_hf(raw), getattr(transformers, name)(**raw)
    assert compare(ours, theirs) >= 12
    assert type(ours).from_hf(ours.to_hf()) == ours


def test_null_stands_for_what_follows_from_other_sizes() -> None:
    grouped = {"num_attention_heads": 16, "num_key_value_heads": None}
    assert configs.Qwen2Config.from_hf(grouped).num_key_value_heads == 16
    assert (
        configs.OptConfig.from_hf(
            {"word_embed_proj_dim": None, "hidden_size": 24}
        ).word_embed_proj_dim
        == 24
    )
    assert configs.Qwen3Config.from_hf({}).head_dim == transformers.Qwen3Config().head_dim
