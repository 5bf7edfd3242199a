"""Simulated tokens per block: against blocks walked one by one, and against the engine on the mini models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.decoding.metrics import acceptance_metrics
from jaxspec.files import ASSETS
from jaxspec.loading import image_inputs
from jaxspec.prompts.rows import rewrite, stack_rows
from jaxspec.training.conversations import ConversationBatch
from jaxspec.training.losses import count_blocks
from jaxspec.training.objectives import simulated
from picturebook import test_set as picturebook_set

COUNT = jax.jit(count_blocks, static_argnames="gamma")


def walk(agree: list[bool], gamma: int) -> tuple[int, int]:
    """Blocks of one answer, drafted and verified as the engine does; `agree` of all tokens but prefill's."""
    at = blocks = 0
    while at < len(agree):
        run = 0
        while run < gamma and at + run < len(agree) and agree[at + run]:
            run += 1
        at, blocks = at + run + 1, blocks + 1
    return len(agree), blocks


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.booleans(), max_size=7), max_size=2), min_size=3, max_size=3),
    st.sampled_from([1, 3, 5]),
)
def test_blocks_are_those_of_the_walk(conversations: list[list[list[bool]]], gamma: int) -> None:
    agree, mask = np.ones((3, 24), bool), np.zeros((3, 24), bool)
    tokens = blocks = 0
    for row, answers in enumerate(conversations):
        at = 2
        for answer in answers:
            mask[row, at : at + len(answer) + 1] = True  # prefill's token first
            agree[row, at] = row % 2
            agree[row, at + 1 : at + 1 + len(answer)] = answer
            at += len(answer) + 3
            tokens, blocks = (a + b for a, b in zip((tokens, blocks), walk(answer, gamma)))
    assert tuple(map(int, COUNT(agree, mask, gamma=gamma))) == (tokens, blocks)


def test_engine_gives_what_was_simulated() -> None:
    target, draft = (LoadedModel.load(ASSETS / "mini" / name, jnp.dtype("float32")) for name in ("target", "draft"))
    config = EngineConfig(gamma=5, batch_size=8, prompt_buckets=(96,), image_buckets=(1,), new_buckets=(32,))
    engine = Engine(target, draft, config)
    samples = [sample for name in ("describe", "exist") for sample in picturebook_set(name, 4)]
    prompts = [engine.encoder.prompt(sample.turns[0][0], sample.images) for sample in samples]
    results = engine.generate([Request(prompt, 32) for prompt in prompts])
    measured = acceptance_metrics([result.stats for result in results])["tokens_per_pass"]

    assert draft.images is not None
    shown = draft.images.slots((48, 48), None)
    rows = [rewrite(prompt.tokens, engine.encoder.image_token, [shown]) for prompt in prompts]
    whole = [row.followed_by(result.tokens) for row, result in zip(rows, results, strict=True)]
    (stacked,) = stack_rows([[row] for row in whole], 128)
    places = np.arange(128)[None]
    begin, end = (np.asarray([[len(row)] for row in part]) for part in (rows, whole))
    images = image_inputs(draft, [sample.images for sample in samples], 1) or {}
    numbers = np.arange(len(samples), dtype=np.uint32)
    batch = ConversationBatch(stacked, (places >= begin) & (places < end), images, numbers)
    found = simulated(draft.model, [batch])(draft.params)["simulated_tokens_per_pass"]
    assert measured is not None
    assert measured > 2
    assert found == pytest.approx(measured, rel=0.02)
