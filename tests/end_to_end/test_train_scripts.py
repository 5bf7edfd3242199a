"""The training scripts, two steps each: tower, target, draft, captioner, and the directories that they leave."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from configs.train import mini
from jaxspec.decoding.engine import LoadedModel
from train import captioner, draft, target


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    target.main(mini.TARGET_DEBUG, mini.TOWER_DEBUG, path, path / "hf" / "target")
    evaluated = replace(mini.DRAFT_DEBUG, evaluate_every=2)
    draft.main(evaluated, mini.TOWER_DEBUG, path, path / "hf" / "draft", target=path / "hf" / "target")
    captioner.main(mini.CAPTIONER_DEBUG, path / "hf" / "draft", path, path / "hf" / "captioner")
    return path


def test_each_stage_took_its_steps_once(runs: Path) -> None:
    for stage in ("tower", "target", "draft", "captioner"):
        log = [json.loads(line) for line in (runs / stage / "metrics.jsonl").read_text().splitlines()]
        trained = [entry for entry in log if "loss" in entry]
        assert [entry["step"] for entry in trained] == [1, 2]  # the draft found the tower finished
        assert all(np.isfinite(entry["loss"]) for entry in trained)


def test_the_draft_was_tried_in_the_engine(runs: Path) -> None:
    """Its last evaluation is what an engine gives of the directories: both were trained two steps."""
    *_, evaluated = [json.loads(line) for line in (runs / "draft" / "metrics.jsonl").read_text().splitlines()]
    assert evaluated["step"] == 2
    assert 1 <= evaluated["mean_acceptance_length"] <= 6
    assert 0 <= evaluated["draft_acceptance_rate"] <= 1


def test_all_load_and_share_the_tower(runs: Path) -> None:
    target, *others = (LoadedModel.load(runs / "hf" / name) for name in ("target", "draft", "captioner"))
    for other in others:
        towers = [jax.tree.leaves(model.params["vision_tower"]) for model in (target, other)]
        for ours, theirs in zip(*towers, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert target.tokenizer.get_vocab() == other.tokenizer.get_vocab()
