"""Heads for Gemma 4 change no answer about 0 to 3 images, in chains and trees, also where an image
is longer than the windows of the target and of the head.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.engine.session import Session
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.making import new_head
from jaxspec.loading.models import LoadedHead
from jaxspec.models.families import text_params
from tests import tiny
from tests.tiny.families import SQUARES

NEW = 16
ENGINE = EngineConfig(
    gamma=3, batch_size=4, prompt_buckets=(480,), new_buckets=(NEW,), image_buckets=(3,)
)
Answers = list[tuple[int, ...]]
KINDS: dict[str, dict[str, Any]] = {
    "assistant": {"feature": "assistant", "layers": 2, "width": 64},
    "DeepSeek's EAGLE-3": {"feature": "fused", "target_layers": (0, 1, 1, 2, 2)},
    "DeepSeek's DSpark": {"feature": "block", "layers": 2, "target_layers": (1,)}
    | {"anchored": True, "markov": 4},
    "z-lab's DFlash": {"feature": "block", "layers": 2, "target_layers": (0, 1), "window": 12},
}
"""Options of `new_head`. DeepSeek's layers are the target's full ones."""


@cache
def target() -> LoadedModel:
    config, processor = SQUARES["gemma4"]()
    params = jax.tree.map(jnp.asarray, tiny.random_params(config))
    return LoadedModel(config, params, tiny.chat_tokenizer(), processor)


@cache
def plain() -> tuple[Answers, Answers]:
    return answers(Engine(target(), config=ENGINE))[:2]


def answers(engine: Engine) -> tuple[Answers, Answers, int]:
    """Return answers to prompts, and in a conversation whose later question has an image, and how
    many drafted tokens the former accepted.
    """
    pages = [tiny.page(i) for i in range(3)]
    prompts = [engine.encoder.completion("What?", pages[:count]) for count in range(4)]
    results = engine.generate([Request(prompt, NEW) for prompt in prompts])
    session = Session(engine)
    turns = [
        session.ask(text, images=pages[:count], max_new_tokens=8).tokens
        for text, count in (("Hi", 0), ("And this?", 2))
    ]
    accepted = sum(int(result.stats.accepted_at.sum()) for result in results)
    return [result.tokens for result in results], turns, accepted


def head(kind: str) -> LoadedHead:
    """Return a head of random weights, which drafts the likeliest tokens where its kind lets it."""
    model = target()
    config: HeadConfig = new_head(model.config, gamma=3, **KINDS[kind])
    counts = Counter(token for answer in plain()[0] for token in answer)
    words = tuple(sorted(token for token, _ in counts.most_common(3)))
    text: Any = config.text_config
    if kind == "DeepSeek's EAGLE-3":
        text = tiny.gemma_eagle(model.model.text, target_layers=text.target_layers)
    elif kind == "DeepSeek's DSpark":
        text = replace(model.model.text.without_window((1, 1)), tie_word_embeddings=False)
    if kind != "assistant":
        config = replace(config, text_config=replace(text, draft_vocabulary=words))
    config = config.for_target(model.config)
    return LoadedHead(config, tiny.eagle_params(config, text_params(model.config, model.params)))


@pytest.mark.parametrize(
    ("kind", "tree"),
    [
        ("DeepSeek's DSpark", "2:5"),
        *tiny.rarer(
            ("DeepSeek's EAGLE-3", "2:5"), ("assistant", "dynamic:2:6"), ("z-lab's DFlash", None)
        ),
    ],
)
def test_answers_are_the_plain_ones(kind: str, tree: str | None) -> None:
    prompts, turns, accepted = answers(Engine(target(), head(kind), replace(ENGINE, tree=tree)))
    assert (prompts, turns) == plain()
    assert accepted > 0 or kind == "assistant"
