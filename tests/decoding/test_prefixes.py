"""Prompts of a live batch are read in pieces, behind what earlier prompts left, and change no
answer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import KVCache
from jaxspec.engine.batches import reading
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.batches.prefixes import Prefix, Prefixes
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.prompts.rows import PromptRow
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.tiny.families import FAMILIES

NEW, BYTES = 12, 2**24
SIZES: dict[str, Any] = {
    "batch_size": 2, "prompt_buckets": (192,), "image_buckets": (0, 2), "new_buckets": (NEW,),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 8)
    monkeypatch.setattr(reading, "SHORT", 4)


def live(engine: Engine, examples: list[Request], prefixes: int = BYTES) -> Batch:
    """Return a batch that may read prompts in pieces, whose programs compile when needed."""
    batch = engine.live(examples, prefixes)
    assert batch.reader is not None
    batch.reader.ready |= {*batch.reader.piece_sizes}
    return batch


def ask(batch: Batch, request: Any, owner: str = "") -> Result:
    """Return the answer to one request."""
    (read,) = batch.batcher.read([request])
    return tiny.run_live(batch, {0: replace(read, owner=owner)})[0]


def drafts(kind: str, target: LoadedModel, draft: LoadedModel) -> tuple[Any, dict[str, Any]]:
    if kind == "views and lookup":
        return draft, {"views": ("M", "T", "lookup")}
    options = {"feature": "fused", "target_layers": (0, 1, 2)} if kind == "EAGLE-3" else {}
    return tiny.head_of(target, **options), {"views": None}


@pytest.mark.parametrize("kind", ["views and lookup", *tiny.rarer("KV head", "EAGLE-3")])
def test_answers_do_not_depend_on_what_was_kept(
    kind: str, target: LoadedModel, draft: LoadedModel
) -> None:
    """Answers, greedy and drawn, to a conversation about an image and to other questions about it
    do not depend on what was kept.
    """
    drafting, options = drafts(kind, target, draft)
    engine = Engine(target, drafting, EngineConfig(gamma=3, **SIZES, **options))
    encoder, image = engine.encoder, tiny.page(0)
    first = encoder.prompt("What do you see here?", [image])
    answer = engine.generate(Request(first, NEW)).tokens
    second = encoder.follow_up(first, answer, "And what is behind it?")
    other = encoder.prompt("What do you like in it?", [image])
    unlike = encoder.prompt("What do you see here?", [tiny.page(1)])
    requests = [Request(first, NEW), Request(second, NEW), Request(other, NEW, 1.0, seed=3)]
    requests += [Request(unlike, NEW), Request(other, NEW, 1.0, seed=4)]
    expected = [engine.generate(request) for request in requests]
    batch = live(engine, requests)
    results = [ask(batch, request) for request in requests]
    for result, cold in zip(results, expected):
        assert (result.tokens, result.stats.steps) == (cold.tokens, cold.stats.steps)
    start, end = (int(x) for x in np.flatnonzero(images_of(batch, first) >= 0)[[0, -1]])
    cached = [result.cached for result in results]
    assert cached[0] == 0
    assert cached[1] >= len(images_of(batch, first)) - 4
    assert end < cached[2] < len(images_of(batch, other)) - 4
    assert cached[3] <= start
    assert cached[4] == len(images_of(batch, other)) - 1
    assert ask(batch, requests[1], "another key").cached == 0


@pytest.mark.full
def test_a_mesh(pair: tuple[Path, Path]) -> None:
    """On a mesh, what is kept of prompts is split as the cache is, and changes no answer."""
    target, draft = (LoadedModel.load(path) for path in pair)
    plain, split = Engine(target), LoadedModel.load(pair[0], mesh=make_mesh(model=2))
    first = plain.encoder.prompt("What do you see here?", [tiny.page(0)])
    second = plain.encoder.follow_up(
        first, plain.generate(Request(first, NEW)).tokens, "And what is behind it?"
    )
    requests = [Request(first, NEW), Request(second, NEW)]
    batch = live(Engine(split, draft, EngineConfig(gamma=3, **SIZES)), requests)
    results = [ask(batch, request) for request in requests]
    assert [r.tokens for r in results] == [r.tokens for r in plain.generate(requests)]
    assert results[1].cached > len(first.tokens)


def images_of(batch: Batch, prompt: Any) -> np.ndarray:
    return batch.batcher.read([Request(prompt, NEW)])[0].rows[0].images


def test_at_one_width_no_bit_depends_on_what_was_kept(target: LoadedModel) -> None:
    """At one width in bfloat16 no bit depends on what was kept, also where the second image of a
    prompt is new.
    """
    half = replace(target, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), target.params))
    engine = Engine(half, config=EngineConfig(width=8, **SIZES))
    encoder, pages = engine.encoder, [tiny.page(0), tiny.page(1)]
    first = encoder.prompt("What do you see?", pages[:1])
    second = encoder.follow_up(first, first.tokens[-20:], "And in this?", pages[1:])
    third = encoder.follow_up(second, first.tokens[-9:], "Which is it?")
    requests = engine.batcher.read([Request(prompt, NEW) for prompt in (first, second, third)])
    warm = live(engine, requests)
    counts = []
    for request in requests:
        found, cold = (
            batch.reader.read(request, batch.fit(request), 1e9)
            for batch in (warm, live(engine, requests, 0))
        )
        counts.append(found.cached)
        assert (cold.cached, found.cached % 8) == (0, 0)
        length = int(cold.state.target.length[0])
        assert length == len(request.rows[0])
        np.testing.assert_array_equal(found.logits, cold.logits)
        for leaf, other in zip(found.state.target.k, cold.state.target.k, strict=True):
            np.testing.assert_array_equal(leaf[:, :, :length], other[:, :, :length])
    assert 0 == counts[0] < counts[1] < counts[2]


def test_rows_decode_between_the_pieces_of_a_long_prompt(target: LoadedModel) -> None:
    engine = Engine(target, config=EngineConfig(**SIZES))
    requests = [Request("Hi", NEW, min_new_tokens=NEW), Request("Tell me all of it. " * 2, NEW)]
    batch = live(engine, requests, 0)
    short, long = engine.batcher.read(requests)
    batch.join({0: short})
    counts, waiting = [], {1: long}
    while waiting:
        batch.run_ms = 0.0  # of a fast loop
        batch.join(waiting)
        batch.decode(stride=1)
        counts.append(batch.longest)
    pieces = -(-len(long.rows[0]) // 8)
    assert 4 < pieces == len(counts) < NEW
    assert counts == [*range(2, 2 + pieces)]
    results = tiny.run_live(batch, {})
    assert [results[i].tokens for i in range(2)] == [
        engine.generate(request).tokens for request in requests
    ]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_read_as_the_whole_prompt_is(family: str) -> None:
    """Pieces that begin and end within images are read as the whole prompt is; where the tokens of
    an image read one another, the prompt is read whole.
    """
    config, processor = FAMILIES[family]()
    params = jax.device_put(tiny.random_params(config, scale=0.5))
    target = LoadedModel(config, params, tiny.chat_tokenizer(), processor)
    sizes = SIZES | {"prompt_buckets": (512,), "image_buckets": (0, 64)}
    engine = Engine(target, config=EngineConfig(**sizes))
    images = [tiny.page(0, 40, 28), tiny.page(1, 28, 40)] if target.images else []
    (request,) = engine.batcher.read([Request("What is it?", NEW, images=images)])
    batch = live(engine, [request])
    assert batch.reader is not None
    whole = batch.reader.prepare(request, request.sizes, whole=True)
    batch.reader.begun = None
    pieces = batch.reader.read(request, request.sizes, 0.0)
    steps = 1
    while pieces is None:
        pieces, steps = batch.reader.read(request, request.sizes, 0.0), steps + 1
    joint = target.model.text.joint_images
    assert steps == (1 if joint and images else -(-len(request.rows[0]) // 8))
    np.testing.assert_allclose(pieces.logits, whole.logits, atol=2e-4)
    for leaf, other in zip(
        jax.tree.leaves(pieces.state.target), jax.tree.leaves(whole.state.target)
    ):
        if leaf.ndim == 1:
            np.testing.assert_array_equal(leaf, other)


def prefix(owner: str, tokens: list[int], size: int = 100, images: str = "") -> Prefix:
    """Return a prefix of so many bytes; letters are images of one slot each, at its start."""
    number = np.arange(len(tokens))
    shown = np.where(number < len(images), number, -1).astype(np.int32)
    sources = np.where(number < len(images), 0, -1)[:, None]
    row = PromptRow(np.asarray(tokens), sources, None, None, shown)
    keys = (jnp.zeros((1, 1, (size - 8) // 4, 1), jnp.float16),)
    cache = KVCache(keys, keys, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    return Prefix(owner, row, tuple(images), cache)


def test_the_oldest_prefixes_make_room() -> None:
    kept = Prefixes(300, spare=2)
    a, b, c, d = (prefix("", [i, i, i, i]) for i in range(4))
    for each in (a, b, c):
        kept.add(each)
    assert kept.find("", a.row, ()) == (a, 4)  # used now, so b is the oldest
    kept.add(d)
    assert [kept.find("", each.row, ())[1] for each in (a, b, c, d)] == [4, 0, 4, 4]
    kept.add(prefix("", [7], 400))
    assert not kept.kept
    kept.add(a)
    kept.add(replace(d, cache=replace(d.cache, k=()), features=jnp.zeros(240, jnp.int8)))
    assert len(kept.kept) == 1


def test_prefixes_are_apart_by_key_and_image() -> None:
    kept = Prefixes(2**20, spare=2)
    mine, seen = prefix("me", [1, 2, 3, 4, 5]), prefix("me", [8, 8, 1, 2], images="xy")
    for each in (mine, seen):
        kept.add(each)
    assert kept.find("you", mine.row, ()) == (None, 0)
    assert kept.find("me", mine.row[:3], ()) == (mine, 3)
    assert [kept.find("me", seen.row, images)[1] for images in ("xy", "xz", "zy")] == [4, 1, 0]
    longer, other = prefix("me", [1, 2, 3, 4, 6, 7]), prefix("me", [1, 2, 9, 9])
    kept.add(longer)  # all but one token of the first
    kept.add(other)
    assert kept.kept == [seen, longer, other]
    kept.add(prefix("you", [1, 2, 9, 9]))
    assert len(kept.kept) == 4
