"""`smollm2-eyes` is made of a shipped adapter and the language model from pip, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints import huggingface
from jaxspec.checkpoints.adapters import save_adapter
from jaxspec.checkpoints.locating import locate
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.models.lora import LORA, Lora, init_lora, merged
from jaxspec.training.config import TrainConfig
from jaxspec.training.draft_recipe import Recipe, start_draft
from jaxspec.training.recipes import Stage
from jaxspec.typing import Params
from jaxspec_demo import models as shipped_models
from tests import tiny

UPDATES = Lora(rank=2, alpha=4, modules=("q_proj", "o_proj"))
WORDS = ("<|im_end|>", "<empty_output>", "<|im_start|>", "\n", "user", "assistant", "red", "ball")


def language_tokenizer():
    """Return a tokenizer of words, with the spare token whose id becomes the image's."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="red"))
    core.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    core.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in WORDS[:3]]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """Write the language model to disk and an adapter in place of the shipped one, and return the
    LLaVA's parameters.
    """
    config = replace(tiny.CONFIG, image_token_index=1)
    params = tiny.random_params(config)
    pairs = jax.tree.map(lambda leaf: leaf + 0.1, init_lora(UPDATES, params, jax.random.key(0)))
    params = {**params, LORA: pairs}
    shipped = tmp_path / "assets" / "smollm2_eyes"
    images = tiny.image_processor()
    save_adapter(shipped, config, params, UPDATES, "smollm2-135m", jnp.float32, images)
    text = tmp_path / "language"
    huggingface.save(
        text, config.text_config, params["language_model"], tokenizer=language_tokenizer()
    )
    monkeypatch.setattr(shipped_models, "smollm2", lambda: text)
    monkeypatch.setattr(shipped_models, "ASSETS", tmp_path / "assets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return params


def test_the_model_is_merged_once(world: Params, capsys: pytest.CaptureFixture[str]) -> None:
    found = LoadedModel.load("smollm2-eyes")
    expected = merged(world, UPDATES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found.params, expected)
    assert "written to" in capsys.readouterr().err
    path = locate("smollm2-eyes")
    assert not capsys.readouterr().err
    assert [entry.name for entry in path.parent.iterdir() if entry.name != ".lock"] == [
        "smollm2-eyes"
    ]
    prompt = prompt_encoder(found).prompt("red", [np.zeros((28, 28, 3), np.uint8)])
    words = found.tokenizer.convert_ids_to_tokens(prompt.tokens.tolist())
    assert words == [
        *("<|im_start|>", "user", "\n", "<image>", "\n", "red", "<|im_end|>", "\n"),
        *words[8:],
    ]
    assert prompt.tokens[3] == 1
    assert words[8:] == ["<|im_start|>", "assistant", "\n"]
    for content in ("<image>\nred", [{"type": "image"}, {"type": "text", "text": "red"}]):
        text = found.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        assert found.tokenizer.encode(text) == prompt.tokens.tolist()


def test_training_goes_on_from_an_adapter(world: Params, tmp_path: Path) -> None:
    train = TrainConfig(steps=1, batch=1, frozen=("vision_tower", "language_model"))
    stage = Stage("tune", train, (("talk", 1.0),))
    shipped = str(tmp_path / "assets" / "smollm2_eyes")
    recipe = Recipe(
        target="smollm2-eyes", start=shipped, stages=(stage,), buckets=(64,), lora=UPDATES
    )
    start = start_draft(recipe, LoadedModel.without_weights("smollm2-eyes"))
    jax.tree.map(np.testing.assert_array_equal, start.params, world)
