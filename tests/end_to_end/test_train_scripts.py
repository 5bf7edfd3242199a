"""The mini models' recipes, two steps each: tower, target, draft, head, and the directories that they leave."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jaxspec.checkpoints.directories import check_output
from jaxspec.checkpoints.kv_head import load_kv_head
from jaxspec.decoding.engine import LoadedModel
from jaxspec.errors import InputError
from jaxspec.training.config import MeshConfig
from train import recipe, tower


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    train = replace(tower.TRAIN, steps=2, batch=2, log_every=1, mesh=MeshConfig(data=1))
    tower.main(train, path / "tower")
    for name, seer in (("target", "tower"), ("draft", "tower")):
        words = ["--target", str(path / seer / "hf"), "--runs", str(path / name)]
        recipe.main([f"mini_{name}", *words, *two_steps("tune")])
    words = ["--data", "picturebook:describe", "--anchoring.anchors", "2", "--buckets", "96", "160"]
    recipe.main(["kv_mini", *words, "--runs", str(path / "head"), *two_steps("kv-head")])
    return path


def two_steps(stage: str) -> list[str]:
    options = ("steps=2", "batch=2", "log-every=1", "mesh.data=1")
    return [f"--{stage}.{option}" for option in options]


def test_each_stage_took_its_steps_once(runs: Path) -> None:
    for stage in ("tower", "target/tune", "draft/tune", "head/kv_head"):
        log = [json.loads(line) for line in (runs / stage / "metrics.jsonl").read_text().splitlines()]
        assert [entry["step"] for entry in log] == [1, 2]
        if stage.endswith("tune"):  # decoders that begin at random, for whom all words are alike
            config = json.loads(((runs / stage).parent / "hf" / "config.json").read_text())
            assert log[0]["loss"] == pytest.approx(np.log(config["text_config"]["vocab_size"]), rel=0.1)


def test_a_kv_head_lies_with_its_run_and_reports_as_drafts_do(runs: Path) -> None:
    assert load_kv_head(runs / "head" / "hf", np.float32)[0].pooling == "linear"
    assert json.loads((runs / "head" / "kv_head" / "train_config.json").read_text())["buckets"] == [96, 160]
    line = json.loads((runs / "head" / "kv_head" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["tokens_per_pass"] >= 1
    assert 0 <= line["acceptance"] <= 1


def test_the_options_of_a_kv_head_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe.main(["kv_mini", "--help"])
    shown = " ".join(re.sub("[│─╭╮╰╯]", " ", capsys.readouterr().out).split())
    assert "--head.feature" in shown
    assert not re.findall(r"(--[a-z.-]+)(?: \{[^}]*\}| [A-Z{}|]+)? \(default", shown)


def test_no_run_replaces_the_model_of_another(runs: Path, tmp_path: Path) -> None:
    """The error comes before any training; a run may replace its own model."""
    made = runs / "draft" / "hf"
    before = (made / "config.json").stat()
    for train in (
        lambda: recipe.main(["mini_text", "--out", str(made), "--runs", str(tmp_path)]),
        lambda: recipe.main(["kv_mini", "--out", str(made), "--runs", str(tmp_path)]),
        lambda: tower.main(runs=tmp_path / "tower", out=made),
    ):
        with pytest.raises(InputError, match="hf: holds another run's model; give another path"):
            train()
    assert (made / "config.json").stat() == before
    assert not list(tmp_path.iterdir())
    check_output(made, runs / "draft" / "tune")


def test_all_load_and_share_the_tower(runs: Path) -> None:
    target, draft = (LoadedModel.load(runs / name / "hf") for name in ("target", "draft"))
    jax.tree.map(np.testing.assert_array_equal, target.params["vision_tower"], draft.params["vision_tower"])
    assert target.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
