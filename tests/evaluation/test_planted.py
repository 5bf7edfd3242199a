"""Planted models as checkpoints: how often a draft is right is what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from configs.models.mini import DRAFT, TARGET
from eval import planted
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError

NEW = 13


@pytest.mark.parametrize(("right", "tokens_a_block"), [(1.0, 4), (0.0, 1)])
def test_a_planted_pair_agrees_as_asked(tmp_path: Path, right: float, tokens_a_block: int) -> None:
    planted.write(tmp_path / "target", TARGET, 1.0, seed=0)
    planted.write(tmp_path / "draft", DRAFT, right, seed=1)
    target, draft = (LoadedModel.load(tmp_path / name) for name in ("target", "draft"))
    engine = Engine(target, draft, EngineConfig(gamma=3, prompt_buckets=(64,), new_buckets=(16,)))
    prompt = engine.encoder.prompt("What is this?", [Image.new("RGB", (48, 48))])
    (result,) = engine.generate([Request(prompt, NEW)])
    assert len(set(result.tokens)) == NEW  # a cycle, from whatever the prompt ends in
    assert result.stats.emitted / result.stats.steps == tokens_a_block


def test_a_share_past_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"draft: right after 1.5 of the tokens; give a share from 0 to 1"):
        planted.write(tmp_path / "draft", DRAFT, 1.5, seed=0)
