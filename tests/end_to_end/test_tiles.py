"""LLaVA-NeXT and LLaVA-OneVision with drafts write what transformers' `generate` does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import CLIPImageProcessorPil, LlavaForConditionalGeneration
from transformers import LlavaConfig as TheirLlavaConfig

from eval.lib.drafts.forward import forward_logits
from jaxspec.config import LlamaConfig, LlavaConfig, VisionConfig
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.engine.memory import Sizes, abstract_inputs
from jaxspec.errors import InputError
from jaxspec.loading.pairs import same_tower
from jaxspec.prompts.encoder import Prompt
from tests import tiny
from tests.tiny import hf, tiles
from tests.tiny.hf import torch

pytestmark = pytest.mark.full

NEW = 32
SHAPES = [[], [(90, 31)], [(40, 41), (13, 64)], [(20, 30), (55, 21), (12, 12), (33, 34), (25, 80)]]
"""Heights and widths of the images of each prompt."""
BUCKETS: dict[str, Any] = {"prompt_buckets": (640,), "image_buckets": (40,), "new_buckets": (NEW,)}


@pytest.fixture(scope="module", params=["next", "onevision-qwen2"])
def target(request, tmp_path_factory) -> tuple[Any, LoadedModel]:
    model = tiles.MODELS[request.param]()
    return model, tiles.load(tmp_path_factory.mktemp(request.param) / "model", model)


@pytest.fixture(scope="module")
def answers(target) -> list[tuple[Prompt, list[int]]]:
    """Return prompts of none, one, two and five images, and of a second turn with another image,
    with transformers' answers.
    """
    model, ours = target
    encoder = Engine(ours).encoder
    prompts = [
        encoder.prompt(
            "what is this?", [tiles.page(*shape, seed=i) for i, shape in enumerate(shapes)]
        )
        for shapes in SHAPES
    ]
    done = [(prompt, tiles.generate(model, prompt, NEW)) for prompt in prompts]
    second = encoder.follow_up(*done[1], "and this?", [tiles.page(26, 60, seed=9)])
    done.append((second, tiles.generate(model, second, NEW)))
    assert all(len(set(answer)) > 4 for _, answer in done), "a constant answer proves little"
    return done


def decode(engine: Engine, answers: list[tuple[Prompt, list[int]]]) -> list[Any]:
    """Decode all prompts as one ragged batch, and check that each gives what transformers gives."""
    results = engine.generate([Request(prompt, NEW) for prompt, _ in answers])
    for result, (_, answer) in zip(results, answers, strict=True):
        assert list(result.tokens) == answer
    return results


def test_a_draft_of_the_same_family(target, answers):
    """A draft of the same family, which looks through the target's tower, writes transformers'
    answers; view P is shown the base tile of each image alone.
    """
    _, ours = target
    params = tiny.noisy(ours.params, 0.05) | {"vision_tower": ours.params["vision_tower"]}
    draft = replace(ours, params=params)
    assert same_tower(ours, draft)
    engine = Engine(ours, draft, EngineConfig(views=("M", "T", "P"), gamma=3, **BUCKETS))
    results = decode(engine, answers)
    assert sum(result.stats.accepted_at.sum() for result in results) > 0
    # The plan of memory counts the very shapes that run.
    requests = [Request(prompt, NEW) for prompt, _ in answers]
    planned = abstract_inputs(engine.assembly.program, 8, Sizes(640, (40, 40), NEW, ((640,),)))[0]
    read = engine.batcher.read(requests)
    given = engine.batcher.inputs(read, read[-1].sizes, 8)
    assert jax.tree.map(jnp.shape, planned) == jax.tree.map(jnp.shape, given)


def test_a_draft_that_reads_pages(target, answers):
    """A LLaVA-1.5 draft, of other width and with its own tower that sees one tile of each image, as
    the TABED paper pairs it, writes transformers' answers.
    """
    _, ours = target
    if ours.config.model_type != "llava_next":
        pytest.skip("one family is enough to show it")
    tower = VisionConfig(**hf.VISION | {"hidden_size": 16, "num_hidden_layers": 2})
    text = LlamaConfig(**hf.TEXT | tiles.TEXT | {"hidden_size": 16, "intermediate_size": 24})
    config = LlavaConfig(text, tower, image_token_index=tiles.IMAGE)
    pages = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    draft = LoadedModel(config, tiny.random_params(config), ours.tokenizer, pages)
    assert not same_tower(ours, draft)
    decode(Engine(ours, draft, EngineConfig(views=("M", "P"), gamma=2, **BUCKETS)), answers)


def test_without_tiles(tmp_path):
    """A LLaVA-NeXT without tiles gives the logits of transformers' LLaVA-1.5 reading its files, as
    the released TABED code does.
    """
    model = tiles.llava_next()
    ours = tiles.load(tmp_path / "model", model).without_tiles()
    raw = model.config.to_dict() | {"model_type": "llava", "image_seq_length": 9}
    theirs = LlavaForConditionalGeneration(TheirLlavaConfig.from_dict(raw)).eval()
    missing, unexpected = theirs.load_state_dict(model.state_dict(), strict=False)
    assert (missing, unexpected) == ([], ["model.image_newline"])
    prompt = Engine(ours).encoder.prompt("what is this?", [tiles.page(30, 50), tiles.page(13, 12)])
    pages = CLIPImageProcessorPil(size={"shortest_edge": 12}, crop_size={"height": 12, "width": 12})
    pixels = torch.tensor(
        np.asarray(pages(images=list(prompt.images), return_tensors="np")["pixel_values"])
    )
    ids = np.repeat(prompt.tokens, np.where(prompt.tokens == tiles.IMAGE, 9, 1)).astype(np.int64)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(ids[None]), pixel_values=pixels).logits[0, -1]
    hf.assert_close(forward_logits(ours, prompt, ()), logits)
    assert ours.without_tiles() is ours


def test_only_next_is_read_without_tiles(target):
    _, ours = target
    if ours.config.model_type == "llava_next":
        assert ours.without_tiles().config.model_type == "llava"
        return
    with pytest.raises(InputError, match="tiles: a 'llava_one"):
        ours.without_tiles()
