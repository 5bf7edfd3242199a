"""Every twin loads by its id, offline, and those that presets put together fit each other."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import configs
from eval.lib.collaborative.config import CollaborativeEvalConfig
from eval.lib.drafts.config import EvalConfig
from jaxspec import Engine, EngineConfig, Request
from jaxspec.config import text_config
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel, load_draft
from jaxspec.loading.pairs import check_pair, check_vocabulary
from jaxspec.prompts.views import parse_views
from jaxspec.training.draft_recipe import Recipe
from tests.hub.assistants import AssistantTwin
from tests.hub.block_heads import BlockTwin
from tests.hub.conftest import load_twin
from tests.hub.heads import HEADS, LAYOUTS
from tests.hub.table import TWINS, HeadTwin


@pytest.mark.full
@pytest.mark.parametrize("name", TWINS)
def test_it_loads_offline_with_its_words_and_stop_tokens(name: str) -> None:
    twin, model = TWINS[name], load_twin(name)
    assert model.config.model_type == twin.family
    assert model.model.has_vision == (model.image_processor is not None)
    check_vocabulary("target", model)
    said = model.tokenizer.encode("The tree is \u00fc and blue.", add_special_tokens=False)
    assert model.tokenizer.decode(said).strip() == "The tree is \u00fc and blue."
    assert (model.tokenizer.chat_template is not None) == twin.chat
    stop = text_config(model.config).eos_token_id
    named = twin.generation.get("eos_token_id")
    if isinstance(named, list):
        assert stop == tuple(model.tokenizer.convert_tokens_to_ids(named))


def test_a_text_model_lacks_the_image_token_of_its_tokeniser() -> None:
    """A text model whose tokeniser has an image token that the model lacks, as Gemma 3's small
    ones, refuses that token in one line.
    """
    engine = Engine(load_twin("google/gemma-3-1b-it"))
    batcher = engine.batcher
    batcher.read([Request("A <image_soft_token>", 4)])  # of a user, whose text is text
    with pytest.raises(InputError, match=r"'<image_soft_token>' is token (\d+), .* has \1; leave"):
        batcher.read([Request(engine.encoder.completion("A <image_soft_token>"), 4)])


def layouts_of(kind: type) -> list[str]:
    return [name for name in LAYOUTS if isinstance(HEADS[name], kind)]


@pytest.mark.full
@pytest.mark.parametrize("name", layouts_of(HeadTwin))
def test_public_heads_draft_for_their_targets(
    name: str, tmp_path: Path, said: Callable[..., str]
) -> None:
    """Public heads draft for their targets: their rules for images are known, and an export's
    config.json names them.
    """
    twin, kind = HEADS[name], {"fused": "EAGLE-3 head", "eagle1": "EAGLE-1 head"}
    assert isinstance(twin, HeadTwin)
    facts = json.loads(said("inspect", name, "--json"))
    assert facts["family"].startswith(
        "ViSpec head" if twin.rule == "compressed" else kind[twin.feature]
    )
    assert facts["facts"]["image rule"] == twin.rule
    assert "speed-up at 2" in said("plan", twin.target, "--draft", name, "--chips", "h100")
    said("export", name, tmp_path / "head")
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["jaxspec"]["images"] == twin.rule
    check_copy(name, tmp_path / "head", load_twin(twin.target))


def check_copy(name: str, copy: Path, target: LoadedModel) -> None:
    """Check that a head and its export are one draft of the target."""
    one, other = (load_draft(path, target) for path in (name, copy))
    assert one.config.text_config == other.config.text_config
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    assert Engine(target, one).assembly.mixture.names == ("head", "lookup")


@pytest.mark.full
@pytest.mark.parametrize("name", layouts_of(BlockTwin))
def test_public_heads_draft_blocks_for_their_targets(
    name: str, tmp_path: Path, said: Callable[..., str]
) -> None:
    twin = HEADS[name]
    assert isinstance(twin, BlockTwin)
    assert "DFlash head" in said("inspect", name)
    assert "speed-up at 2" in said("plan", twin.target, "--draft", name, "--chips", "h100")
    copy, target = tmp_path / "copy", load_twin(twin.target)
    # no factor and no cap of a Gemma in speculators' classes
    server = "vllm" if twin.is_gemma or "final_logit_softcapping" in twin.config else "speculators"
    served = copy if server == "speculators" else twin.target
    told = said("export", name, copy, "--for", server, "--vocab-of", twin.target)
    assert f"vllm serve {served}" in told
    check_copy(name, copy, target)
    gamma = twin.options["gamma"] + 1
    with pytest.raises(InputError, match=f"gamma: {gamma} is more than the"):
        Engine(target, load_draft(name, target), EngineConfig(gamma=gamma))


@pytest.mark.full
@pytest.mark.parametrize("name", layouts_of(AssistantTwin))
def test_an_assistant_drafts_for_its_target(
    name: str, tmp_path: Path, said: Callable[..., str]
) -> None:
    """An assistant drafts for its target; config.json says which kind of draft it is."""
    twin, copy = HEADS[name], tmp_path / "copy"
    assert "Gemma 4 assistant" in said("inspect", name)
    assert "speed-up at 2" in said("plan", twin.target, "--draft", name, "--chips", "h100")
    said("export", name, copy)
    check_copy(name, copy, load_twin(twin.target))


def test_an_id_that_is_not_there_is_one_line(refusal: Callable[..., str]) -> None:
    missing = "'llava-hf/llava-1.5-70b-hf': no such directory, and cannot be fetched from the hub"
    assert missing in refusal("inspect", "llava-hf/llava-1.5-70b-hf")


def test_a_plan_of_a_text_draft_that_is_shown_images_is_one_line(
    refusal: Callable[..., str],
) -> None:
    target, draft = "google/gemma-3-4b-it", "google/gemma-3-270m-it"
    assert "views: M shows images and the draft is a text model; use view T" in refusal(
        "plan", target, "--draft", draft, "--views", "M", "--chips", "h100"
    )


def pairs() -> Iterator[Any]:
    """Yield every target and draft, models that write together, and target and start of training,
    of the presets.
    """
    for module in pkgutil.walk_packages(configs.__path__, "configs."):
        config = getattr(importlib.import_module(module.name), "config", None)
        if isinstance(config, EvalConfig):
            views = tuple(dict.fromkeys(view for row in config.rows for view in row.draft_views))
            found = [(config.target, name, views) for name in config.draft]
        elif isinstance(config, CollaborativeEvalConfig):
            found = [
                (pair.models[0], other, ("T",))
                for pair in config.pairings
                for other in pair.models[1:]
            ]
        elif isinstance(config, Recipe):
            found = [(config.target, config.start, ("T",))]
        else:
            found = []
        yield from ((a, b, views) for a, b, views in found if a in TWINS and b in TWINS)


@pytest.mark.parametrize(("target", "draft", "views"), dict.fromkeys(pairs()))
def test_models_that_presets_put_together_fit(
    target: str, draft: str, views: tuple[str, ...]
) -> None:
    check_pair(load_twin(target), load_twin(draft), parse_views(views))
