"""Caches that grow give the same answers and counts as caches with room for all from the start."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.config import text_config
from jaxspec.decoding.processors import ending_at, right_aligned
from jaxspec.decoding.sources.lookup import Text
from jaxspec.engine.batches import batcher
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.loading.models import LoadedHead
from jaxspec.models.inputs import PromptRows
from tests import tiny

CONFIG = EngineConfig(
    views=("M", "T"),
    gamma=3,
    batch_size=4,
    new_buckets=(32,),
    prompt_buckets=(64,),
    image_buckets=(0,),
)
CHAIN = replace(CONFIG, weighting="inverse_error_power:window=3", trace=True)
LENGTHS = (20, 3, 9, 14)


@pytest.fixture(scope="module")
def head(target: LoadedModel) -> LoadedHead:
    """Return a head that reads images only; these prompts have no images."""
    return tiny.head_of(target, feature="last_hidden", reads_text=False)


def requests_of(engine: Engine, *temperatures: float) -> list[Request]:
    return [
        tiny.request_of(engine, "What?", seed=i, temperature=temperature, max_new_tokens=length)
        for i, (length, temperature) in enumerate(zip(LENGTHS, temperatures))
    ]


def test_a_cache_grows_in_groups_of_slots(target: LoadedModel) -> None:
    cache = init_cache(text_config(target.config), 1, 16, jnp.dtype(jnp.float32), layers=())
    assert [cache.resized(16 + more).slots for more in (0, 1, 8, 9)] == [16, 24, 24, 32]


@pytest.mark.parametrize("sizes", [(4, 6, 8, 3), (8, 3, 4, 6)], ids=["longer", "shorter"])
def test_what_lookup_and_penalties_read_fits_rows_of_other_sizes(
    sizes: tuple[int, int, int, int],
) -> None:
    """Texts that lookup and penalties read fit rows of other sizes as if they had been padded to
    these.
    """
    length, room, other, more = sizes
    lengths = np.array([3, 4])
    long = np.array([[5, 6, 7, 0, 0, 0, 0, 0], [8, 9, 5, 6, 0, 0, 0, 0]])
    old, new = (PromptRows(long[:, :size], lengths) for size in (length, other))
    want = Text.of(new, more)
    got = Text.of(old, room).fitted(want)
    assert (got.start, got.length.tolist()) == (want.start, want.length.tolist())
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(
        ending_at(right_aligned(old.tokens, lengths), other), right_aligned(new.tokens, lengths)
    )


@pytest.mark.parametrize(
    "config",
    [CHAIN, *tiny.rarer(replace(CONFIG, views=(), tree="2:6"))],
    ids=["chain", "tree of a head"],
)
def test_answers_and_counts_are_those_of_whole_caches(
    config: EngineConfig,
    target: LoadedModel,
    head: LoadedHead,
    draft: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(target, draft if config.views else head, config)
    requests, runs = requests_of(engine, 0.0, 1.0, 1.0, 0.0), []
    for first in (8, 128):
        monkeypatch.setattr(batcher, "FIRST", first)
        runs.append(engine.generate(requests))
    for ours, theirs in zip(*runs, strict=True):
        assert (ours.tokens, ours.trace) == (theirs.tokens, theirs.trace)
        for field, value in vars(theirs.stats).items():
            np.testing.assert_array_equal(getattr(ours.stats, field), value, err_msg=field)
