"""A text model is a target: for chats in JSONL, its own answers to them, a KV head and a draft of
its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.config import Qwen2Config
from jaxspec.heads.loading import load_head
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.draft_recipe import Recipe, train_draft
from jaxspec.training.recipes import Stage
from tests import tiny
from tests.tiny import training
from tests.tiny.files import write_lines
from tests.tiny.training import train_head
from tests.training import child
from train import distill_data, prepare

pytestmark = pytest.mark.full

# Some tokens end an answer, so that not all run to the limit.
TARGET = Qwen2Config.from_hf(
    tiny.CONFIG.text_config.to_hf()
    | {"model_type": "qwen2", "eos_token_id": [*range(5, 30)], "num_hidden_layers": 1}
)
TRAIN = TrainConfig(
    steps=1, batch=4, warmup=1, log_every=1, dtype="float32", mesh=MeshConfig(data=1)
)
STAGES = (Stage("tune", TRAIN, (("talk", 1.0),)),)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(
        tmp_path_factory.mktemp("target"), TARGET, tiny.random_params(TARGET), tiny.chat_tokenizer()
    )


@pytest.fixture(scope="module")
def answers(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what the target answers to chats."""
    folder = tmp_path_factory.mktemp("data")
    told = {"role": "assistant", "content": "No."}
    chats = [{"messages": [{"role": "user", "content": f"Say {i}."}, told]} for i in range(12)]
    write_lines(folder / "chat.jsonl", chats)
    data = prepare.main(prepare.Text(folder / "chat.jsonl", "chat", out=folder))
    options = distill_data.Options(
        *(str(target), str(data), "anew"),
        temperature=1.0,
        max_new_tokens=8,
        prompt_buckets=(64,),
        out=folder,
    )
    found = distill_data.main(options)
    assert found is not None
    return found


def test_a_head_is_trained_and_loses_nothing(target: Path, answers: Path, tmp_path: Path) -> None:
    options = {"gamma": 3, "image_slots": 4}  # of which the last means nothing here
    stages = tuple(
        replace(stage, train=replace(stage.train, evaluate_every=TRAIN.steps)) for stage in STAGES
    )
    recipe = replace(
        child.HEAD,
        target=str(target),
        stages=stages,
        head=options,
        draft_vocabulary=40,
        held_out="talk",
    )
    config, params = train_head(recipe, tmp_path / "runs", {"talk": answers})
    run = tmp_path / "runs" / "tune"
    decoded = training.metrics(run)[-1]
    assert decoded["decoded_tokens_per_pass"] >= 1
    assert decoded["identical"] == 1
    jax.tree.map(np.testing.assert_array_equal, load_head(run / "best")[1], params)
    assert not config.pools
    assert len(config.text_config.draft_vocabulary) == 40


def test_a_draft_is_trained_on_the_same(target: Path, answers: Path, tmp_path: Path) -> None:
    start = replace(TARGET, hidden_size=16, head_dim=4)
    recipe = Recipe(
        target=str(target), start=start, stages=STAGES, buckets=(64,), view="T", draft_vocabulary=40
    )
    draft = train_draft(recipe, tmp_path, {"talk": answers})
    words = draft.config.draft_vocabulary
    assert set(words) > set(TARGET.eos_token_id)  # though no answer has half of them
    assert draft.config == replace(start, draft_vocabulary=words)
    assert draft.params["lm_head"]["weight"].shape == (40, 16)
