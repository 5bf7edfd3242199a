"""The mini models' tower and draft train for two steps each, and leave whole directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.engine.engine import LoadedModel
from jaxspec.errors import InputError
from jaxspec.training.config import MeshConfig
from tests.tiny import training
from tests.tiny.files import read_json
from train import recipe, tower
from train.setup import check_output, own_output

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    train = replace(tower.TRAIN, steps=2, batch=2, log_every=1, mesh=MeshConfig(data=1))
    tower.main(train, path / "tower")
    steps = [f"--tune.{option}" for option in ("steps=2", "batch=2", "log-every=1", "mesh.data=1")]
    words = ("mini_draft", "--target", path / "tower" / "hf", "--runs", path / "draft")
    recipe.main([*map(str, words), *steps])
    return path


def test_each_stage_took_its_steps_once(runs: Path) -> None:
    for stage in ("tower", "draft/tune"):
        losses = training.losses(runs / stage)
        assert len(losses) == 2
    # begun at random: all words are alike
    config = read_json(runs / "draft" / "hf" / "config.json")
    assert losses[0] == pytest.approx(np.log(config["text_config"]["vocab_size"]), rel=0.1)


def test_no_run_replaces_the_model_of_another(runs: Path, tmp_path: Path) -> None:
    """A run refuses the path of another run's model before any training; it may replace its own."""
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
    check_output(made, runs / "draft")
    # The other run began before there was a model.
    with pytest.raises(InputError, match="hf: holds another run's model; give another path"):
        own_output(made, runs / "tower")(runs / "tower" / "hf")


def test_all_load_and_share_the_tower(runs: Path) -> None:
    first, draft = (LoadedModel.load(runs / name / "hf") for name in ("tower", "draft"))
    towers = (model.params["vision_tower"] for model in (first, draft))
    # the draft's in 16 bits
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8), *towers)
    assert first.tokenizer.get_vocab() == draft.tokenizer.get_vocab()
