"""Models on tiny checkpoints that write together give the same tokens whoever proposes, also a
model with its own blind view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from eval.lib.drafts.forward import forward_logits
from jaxspec.decoding.collaboration.combination import default_proposer, parse_combination
from jaxspec.engine.engine import CollaborationConfig, Engine
from jaxspec.engine.requests import Request
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import text_params
from jaxspec.prompts.encoder import Prompt
from tests import tiny
from tests.tiny import loaded

NEW = 12
CONFIG = CollaborationConfig(
    batch_size=4, prompt_buckets=(64,), image_buckets=(1,), new_buckets=(NEW,)
)
VISUAL = replace(CONFIG, combination="contrastive:beta=1", views=("M", "T"))
"""Visual contrastive decoding."""
THREE = replace(CONFIG, combination="weighted:0.4,0.4,0.2")


@pytest.fixture(scope="module")
def reading(target: LoadedModel) -> LoadedModel:
    """Return a text model of the same vocabulary."""
    return loaded(
        tiny.noisy(text_params(target.config, target.params), 0.1), tiny.CONFIG.text_config
    )


@pytest.fixture(scope="module")
def models(target: LoadedModel, reading: LoadedModel) -> list[LoadedModel]:
    return [target, replace(target, params=jax.device_put(tiny.noisy(target.params, 0.1))), reading]


def requests(engine: Engine) -> list[Request]:
    """Return a greedy request and two sampled ones, with one image each."""
    pages = [tiny.page(i) for i in range(3)]
    heat = ((0.0, 1.0), (0.8, 0.9), (1.0, 1.0))
    return [
        Request(
            engine.encoder.prompt("What?", [Image.fromarray(page)]), NEW - i, t, top_p=p, seed=i
        )
        for i, (page, (t, p)) in enumerate(zip(pages, heat, strict=True))
    ]


@pytest.mark.parametrize(
    ("config", "gammas"),
    [(VISUAL, (3, 1)), *tiny.rarer((THREE, (1, 2, 1)))],
    ids=["visual", "three"],
)
def test_who_proposes_does_not_matter(
    config: CollaborationConfig, gammas: tuple[int, ...], models: list[LoadedModel]
) -> None:
    """Whoever proposes, greedy rows are those of standard collaborative decoding, and rows do not
    depend on their neighbours.
    """
    chosen = models if config is THREE else [models[0]] * 2
    plain = Engine(chosen, config=replace(config, method="standard"))
    quick = Engine(chosen, config=replace(config, gammas=gammas))
    asked = requests(plain)
    (standard, *_), together = plain.generate(asked), quick.generate(asked)
    assert together[0].tokens == standard.tokens
    assert len(standard.tokens) == NEW
    assert together[0].stats.accepted.sum() > 0
    moved = quick.generate([asked[2], replace(asked[1], seed=9), asked[0]])
    for other, result in zip(moved[::2], together[::-2], strict=True):
        assert other.tokens == result.tokens
        for field in ("emitted", "verified", "calls", "tested", "accepted"):
            np.testing.assert_array_equal(getattr(other.stats, field), getattr(result.stats, field))
    if config is VISUAL:
        check_contrast(chosen[0], plain, asked[0], standard.tokens)


@pytest.mark.parametrize(
    ("text", "costs", "proposer"),
    [
        ("weighted:0.4,0.6", (1, 1), 1),
        ("weighted:0.4,0.6", (1, 2), 0),  # 0.4 is over 1 / 3
        ("weighted:0.3,0.7", (1, 2), 1),  # 0.7 is over 2 / 3
        ("weighted", (5, 5), 0),
        ("weighted:0.2,0.3,0.5", (1, 1, 3), 1),
        ("contrastive:mu=0.1", (8, 1), 1),
        ("logits:0.1,2,0.1", (3, 5, 4), 0),
    ],
)
def test_the_weights_choose_the_proposer(text: str, costs: tuple[int, ...], proposer: int) -> None:
    assert default_proposer(parse_combination(text, len(costs)), costs) == proposer


def test_the_chosen_proposer_has_the_longest_runs(models: list[LoadedModel]) -> None:
    """The proposer that `auto` chooses has the longest runs; the tower of the first model is no
    part of its cost.
    """
    target, _, reading = models
    config = replace(CONFIG, default_proposer="auto", gammas=(3, 1))
    for weights, proposer, gammas in (("0.5,0.5", 0, (3, 1)), ("0.4,0.6", 1, (1, 3))):
        for method in ("alternating", "naive"):
            fields = {"combination": f"weighted:{weights}", "method": method}
            engine = Engine([target, reading], config=replace(config, **fields))
            settings: Any = engine.config
            assert (settings.default_proposer, settings.gammas) == (proposer, gammas)
            program: Any = engine.assembly.program
            if method == "naive":
                assert (program.proposer, program.gamma) == (proposer, 3)
            else:
                assert (program.first, program.gammas) == (proposer, gammas)


def check_contrast(
    model: LoadedModel, plain: Engine, request: Request, answer: Sequence[int]
) -> None:
    """Check that each token is the argmax of twice the logits with the image less those without, in
    full passes of the model.
    """
    newline = model.tokenizer.encode("\n", add_special_tokens=False)[-1]
    blind = Prompt(
        np.where(request.prompt.tokens == plain.encoder.image_token, newline, request.prompt.tokens)
    )
    differs = False
    for place, token in enumerate(answer):
        seen, unseen = (
            forward_logits(model, prompt, answer[:place]) for prompt in (request.prompt, blind)
        )
        assert token == np.argmax(2 * seen - unseen)
        differs |= token != np.argmax(seen)
    assert differs, "contrast is what this test is about"


def test_models_that_cannot_write_together(models: list[LoadedModel]) -> None:
    target, _, reading = models
    wider = replace(tiny.CONFIG.text_config, vocab_size=tiny.CONFIG.text_config.vocab_size + 1)
    with pytest.raises(InputError, match=r"model 2 vocabulary: 105 tokens and model 1's 104"):
        Engine([target, loaded(tiny.random_params(wider), wider)])
    other = loaded(reading.params, reading.config, tiny.tokenizer(tiny.CHARACTERS[::-1]))
    with pytest.raises(InputError, match=r"model 2 tokeniser: differs from model 1's"):
        Engine([target, other])
    short = replace(reading.config, max_position_embeddings=16)
    both = Engine([target, loaded(reading.params, short)], config=CONFIG)
    with pytest.raises(InputError, match=r"over model 2's context of 16"):
        both.generate(requests(both))


def test_votes_have_no_scores_to_change(models: list[LoadedModel]) -> None:
    """Votes refuse penalties, which change scores, and take min-p, which filters probabilities."""
    engine = Engine(models, config=replace(THREE, combination="weighted:0.4,0.3,0.3,greedy=vote"))
    greedy, drawn, _ = requests(engine)
    with pytest.raises(InputError, match=r"^request 1: repetition_penalty: 1.3 changes scores"):
        engine.generate([greedy, replace(greedy, repetition_penalty=1.3)])
    (alone,) = engine.generate([greedy])
    together = engine.generate([greedy, replace(drawn, min_p=0.2)])
    assert together[0].tokens == alone.tokens
    assert together[1].tokens


@pytest.mark.parametrize(
    ("chosen", "fields", "words"),
    [
        ([0, 2], {"combination": "weighted:0.6,0.5"}, "sum to 1.1"),
        ([0, 2], {"combination": "wieghted"}, "did you mean 'weighted'"),
        ([0, 2], {"combination": "logits:nan,1"}, "'nan'; give a number of at most"),
        ([0, 2], {"combination": "logits:-1e39,1"}, "'-1e39'; give a number of at most"),
        ([0, 2], {"views": ("M", "M")}, "cannot be shown M, it is a text model"),
        ([0, 2], {"views": ("C", "T")}, "captions are for drafts"),
        ([0, 1, 2], {"combination": "contrastive"}, "not 3 models; give 2"),
        ([0], {}, "1 model; give at least 2"),
    ],
)
def test_refusals(
    chosen: list[int], fields: dict[str, Any], words: str, models: list[LoadedModel]
) -> None:
    with pytest.raises(InputError, match=words) as refused:
        Engine([models[i] for i in chosen], config=replace(CONFIG, **fields))
    assert "\n" not in str(refused.value)
