"""Text drafts are exported for vLLM or refused, with the command that serves them and the view that
shows what vLLM shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.checkpoints.directories import read_config
from jaxspec.config import Qwen2Config, RopeScaling, text_config
from jaxspec.errors import InputError
from jaxspec.loading.pairs import check_pair
from jaxspec.prompts.views import parse_views
from tests import tiny
from tests.tiny import families

TEXT = replace(
    tiny.CONFIG.text_config,
    vocab_size=tiny.CONFIG.text_config.vocab_size - 2,
    max_position_embeddings=96,
)
"""A draft of fewer tokens than its target, and of a shorter context."""


def save(path: Path, config: Any) -> str:
    return str(tiny.save(path, config, tiny.random_params(config)))


def test_a_text_draft_is_written_for_vllm(tmp_path: Path, said: Callable[..., str]) -> None:
    target, draft = save(tmp_path / "target", tiny.CONFIG), save(tmp_path / "draft", TEXT)
    out = tmp_path / "out"
    told = said("export", draft, out, "--for", "vllm", "--vocab-of", target).splitlines()
    assert told[1].startswith(f"vllm serve {target} --speculative-config")
    assert "vllm serve path/to/target --spec" in (out / "README.md").read_text()
    assert f'"method": "draft_model", "model": "{out}"' in told[1]
    assert "longer than 96 of the target's 512 tokens" in told[2]
    assert "0.20.2 and older refuse" in told[3]
    assert text_config(read_config(out)).vocab_size == tiny.CONFIG.text_config.vocab_size
    again = said("export", draft, tmp_path / "again", "--for", "vllm", "--vocab-of", out)
    assert len(again.splitlines()) == 2  # a text target of the same context


@pytest.mark.parametrize(
    ("config", "options", "told"),
    [
        (
            TEXT,
            ["--for", "sglang", "--vocab-of", "{}"],
            "not a draft head; a draft model is written only for vllm",
        ),
        (TEXT, ["--for", "vllm"], "the vocabulary size of its target; give vocab-of"),
        (
            TEXT,
            ["--for", "vllm", "--vocab-of", "{}", "--draft-vocabulary", "8"],
            "the vocabulary size of its target",
        ),
        (tiny.CONFIG, ["--for", "vllm", "--vocab-of", "{}"], "vLLM shows drafts no images"),
        (
            Qwen2Config(
                vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1,
                rope_scaling=RopeScaling(mrope_section=(1, 1, 2)),
            ),
            ["--for", "vllm", "--vocab-of", "{}"],
            "vLLM takes no draft with M-RoPE",
        ),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_refused(
    config: Any, options: list[str], told: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    target, draft = save(tmp_path / "target", tiny.CONFIG), save(tmp_path / "draft", config)
    assert told in refusal(
        "export", draft, tmp_path / "out", *(option.format(target) for option in options)
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
def test_a_draft_sees_as_many_placeholders_as_its_target_has_slots(
    family: str, tmp_path: Path
) -> None:
    """Under view T-slots a draft sees as many placeholders as its target has slots, with plain
    positions, and no answer changes.
    """
    target = LoadedModel.load(families.write(tmp_path, family) / "target")
    draft = LoadedModel.load(save(tmp_path / "draft", tiny.CONFIG.text_config))
    settings: dict[str, Any] = {
        "prompt_buckets": (64, 128),
        "image_buckets": (0, 1, 2, 4, 16),
        "new_buckets": (16,),
    }
    engine = Engine(target, draft, EngineConfig(views=("T-slots",), gamma=2, **settings))
    request = Request(engine.encoder.prompt("What?", [tiny.page(0)]), 12)
    theirs, own = engine.batcher.read([request])[0].rows
    np.testing.assert_array_equal(own.tokens, theirs.tokens)
    assert (own.tokens == engine.encoder.image_token).sum() > 1
    assert own.sources is own.rotary is None
    plain = Engine(target, config=EngineConfig(views=(), **settings))
    assert engine.generate(request).tokens == plain.generate(request).tokens


def test_a_draft_without_the_placeholder_is_refused() -> None:
    target = replace(
        tiny.loaded({}), config=replace(tiny.CONFIG, image_token_index=TEXT.vocab_size)
    )
    draft = replace(target, config=TEXT)
    check_pair(target, draft, parse_views(["T"]))
    with pytest.raises(
        InputError,
        match=f"T-slots shows token {TEXT.vocab_size}, but the draft has {TEXT.vocab_size}",
    ):
        check_pair(target, draft, parse_views(["T", "T-slots"]))
