"""Buckets decide which requests run together, and how many programs that asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec.engine import compile_cache
from jaxspec.engine.batches import batcher
from jaxspec.engine.batches.fitting import in_batches
from jaxspec.engine.config import BATCH_BUCKETS, PROMPT_BUCKETS
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel
from jaxspec.engine.memory import Sizes
from jaxspec.prompts.rows import bucket
from tests import tiny


def llava_like(seed: int) -> list[Sizes]:
    """Return the sizes of 64 requests with up to two images of 576 slots, and text of 20 to 300
    tokens.
    """
    rng = np.random.default_rng(seed)
    images, text = rng.choice([0, 1, 1, 1, 2], 64).tolist(), rng.integers(20, 300, 64).tolist()
    return [
        Sizes(bucket(576 * i + t, PROMPT_BUCKETS, ""), (i, 0), 1024) for i, t in zip(images, text)
    ]


@pytest.mark.parametrize("seed", range(5))
def test_a_mix_of_requests_needs_few_programs(seed: int) -> None:
    """A mix of requests needs few programs, while one batch of each bucket would be of 12 to 14
    kinds, with as many programs again for each bucket of new tokens.
    """
    sizes = llava_like(seed)
    batches = in_batches(sizes, 8)
    assert sorted(i for batch in batches for i in batch) == list(range(64))
    assert len(batches) <= 10
    kinds = set()
    for batch in batches:
        flat = np.asarray([sizes[i].flat for i in batch])
        assert (flat.max(0) <= 2 * flat.min(0)).all()
        kinds.add((*flat.max(0), bucket(len(batch), BATCH_BUCKETS, "")))
    assert len(kinds) <= 8


@pytest.mark.full
def test_limits_and_lengths_share_programs_and_change_no_answer(
    target: LoadedModel, draft: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "FIRST", 8)
    compiled: dict[Any, Any] = {}
    monkeypatch.setattr(compile_cache, "EXECUTABLES", compiled)
    config = EngineConfig(
        views=("T",), gamma=3, batch_size=4, prompt_buckets=(16, 32, 64), new_buckets=(4, 8, 16, 32)
    )
    engine = Engine(target, draft, config)
    requests = [
        tiny.request_of(engine, "x" * (3 * i), seed=i, temperature=float(i % 2), max_new_tokens=new)
        for i, new in enumerate((3, 5, 10, 20))
    ]
    together = engine.generate(requests)
    assert len(compiled) <= 4  # prefill and decode; as answers grow, growth and decode
    monkeypatch.setattr(batcher, "FIRST", 128)
    alone = Engine(target, draft, replace(config, prompt_buckets=(64,), new_buckets=(32,)))
    assert [result.tokens for result in together] == [
        alone.generate(request).tokens for request in requests
    ]


def test_views_are_as_wide_as_they_need(target: LoadedModel, draft: LoadedModel) -> None:
    config = EngineConfig(views=("T",), gamma=3, prompt_buckets=(8, 16, 32, 64, 128))
    engine = Engine(target, draft, config)
    request = tiny.request_of(engine, "What?", images=3)
    state = engine.prefill([request])
    (read,) = engine.batcher.read([request])
    wide, narrow = (len(row) for row in read.rows)
    sizes = read.sizes.length, *read.sizes.sources[0]
    assert sizes == tuple(bucket(n, config.prompt_buckets, "") for n in (wide, narrow))
    assert (
        state.target.slots - state.drafter[0].cache.slots
        == read.sizes.length - read.sizes.sources[0][0]
        > 0
    )
    assert (
        engine.memory_report([request]).draft_cache
        < Engine(target, draft, replace(config, views=("M",))).memory_report([request]).draft_cache
    )
    assert engine.generate(request).tokens == Engine(target).generate(request).tokens
