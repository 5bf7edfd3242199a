"""A model's context says how many tokens its prompts and answers may have, stretched ones too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxspec import Engine, EngineConfig, Request
from jaxspec.cli.inspect import inspect
from jaxspec.config import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    OptConfig,
    Qwen2Config,
    RopeScaling,
    RotaryConfig,
)
from jaxspec.errors import InputError
from jaxspec.publishing.export import export
from tests import tiny

YARN = {"rope_type": "yarn", "factor": 4.0}
STRETCHED = replace(
    tiny.CONFIG.text_config,
    max_position_embeddings=256,
    rope_scaling=RopeScaling("yarn", factor=4.0, original_max_position_embeddings=256),
)


@pytest.mark.parametrize(
    ("kind", "positions", "scaling", "context"),
    [
        (LlamaConfig, 4096, None, 4096),
        (LlamaConfig, 4096, {"type": "linear", "factor": 4.0}, 16384),
        (LlamaConfig, 131072, {"rope_type": "llama3", "factor": 8.0}, 131072),
        (Qwen2Config, 32768, YARN, 131072),  # as on Qwen2.5's cards
        (Qwen2Config, 32768, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (Qwen2Config, 131072, YARN | {"original_max_position_embeddings": 32768}, 131072),
        (Qwen2Config, 131072, YARN | {"original_max_position_embeddings": 4096}, 131072),
        (Gemma3TextConfig, 131072, {"rope_type": "linear", "factor": 8.0}, 131072),
        (OptConfig, 2048, None, 2048),
    ],
)
def test_the_context_is_what_vllm_serves(
    kind: Any, positions: int, scaling: dict[str, Any] | None, context: int
) -> None:
    """The context is what vLLM serves, or what config.json says where that is more."""
    config = kind.from_hf({"max_position_embeddings": positions, "rope_scaling": scaling})
    assert config.context == context


def test_frequencies_without_a_range_between_are_refused() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0}
    with pytest.raises(InputError, match=r"low_freq_factor 1.0 of rope type llama3; give less"):
        LlamaConfig.from_hf({"rope_scaling": scaling})


def test_a_window_within_the_stretched_context_is_kept() -> None:
    raw = {"max_position_embeddings": 4096, "sliding_window": 4096}
    assert MistralConfig.from_hf(raw).sliding_window is None
    stretched = MistralConfig.from_hf(raw | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert isinstance(stretched, RotaryConfig)
    assert stretched.sliding_window == 4096


def test_a_target_answers_within_its_stretched_context(tmp_path: Path) -> None:
    target = tiny.loaded(tiny.random_params(STRETCHED), STRETCHED)
    sizes = EngineConfig(prompt_buckets=(768, 2048), new_buckets=(8,), image_buckets=(0,))
    engine = Engine(target, config=sizes)
    assert engine.generate(Request("x" * 300, 4)).tokens
    with pytest.raises(InputError, match="over the target's context of 1024; shorten the prompt"):
        engine.generate(Request("x" * 1100, 4))
    export(tiny.save(tmp_path / "model", STRETCHED, target.params), tmp_path / "out")
    assert inspect(tmp_path / "out").context == 1024
    assert "| context | 1,024 tokens |" in (tmp_path / "out" / "README.md").read_text()
