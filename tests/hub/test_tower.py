"""Training a draft fetches and reads of its target what the draft takes: the tower, tokeniser,
image processor.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.checkpoints.tower import tower_files
from jaxspec.command import load_preset
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.training.draft_recipe import start_draft
from tests import tiny
from tests.hub import build
from tests.hub.conftest import cached_at, load_twin
from tests.hub.table import TWINS
from train.recipe import KIND

pytestmark = pytest.mark.full

TARGET = "llava-hf/llava-1.5-7b-hf"


@pytest.fixture
def towers_alone(tmp_path: Path) -> Path:
    """Yield a cache with a target of three shards, of which those without a tensor of the tower are
    not there.
    """
    whole = load_twin(TARGET)
    snapshot = build.add(tmp_path, TARGET, lambda folder: build.write_model(folder, TWINS[TARGET]))
    with cached_at(tmp_path):
        held = tower_files(TARGET)
        shards = {*snapshot.glob("model-*.safetensors")}
        assert {*held} < shards
        for shard in shards - {*held}:
            shard.unlink()
        with pytest.raises(InputError, match="named by the index and not there"):
            LoadedModel.load(TARGET)
        yield whole


def test_a_draft_takes_the_tower_of_shards_that_hold_it(towers_alone: LoadedModel) -> None:
    recipe = load_preset(KIND, "llava15_68m")
    small = replace(tiny.CONFIG.text_config, vocab_size=101, hidden_size=16, num_attention_heads=2)
    recipe = replace(recipe, start=replace(small, num_key_value_heads=2))
    start = start_draft(recipe, LoadedModel.without_weights(TARGET))
    jax.tree.map(
        np.testing.assert_array_equal,
        start.params["vision_tower"],
        towers_alone.params["vision_tower"],
    )
