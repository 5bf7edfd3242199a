"""Passes of one width write what plain decoding writes at that width, to the last bit of every sum.

The target has pairs of tokens that score alike but for rounding, so that a bit decides which one is
written. Every draft of it changes answers at once where plain steps read one token and blocks read
several (try it: width=1 in `expected`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.config import LvlmConfig, ModelConfig, PixelConfig, QwenTowerConfig
from jaxspec.decoding.state import DecodeState
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.session import Session
from jaxspec.errors import InputError
from jaxspec.heads import kinds
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds.assistant import AssistantConfig
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.heads.kinds.eagle1 import Eagle1Config
from jaxspec.heads.kinds.eagle3.config import Eagle3Config
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.heads.kinds.mtp import MtpConfig
from jaxspec.heads.kinds.one_pass import OnePassConfig
from jaxspec.heads.kinds.vispec import VispecConfig
from jaxspec.loading.models import LoadedHead
from jaxspec.models.families import split_tower
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import make_mesh
from tests import tiny
from tests.tiny.families import FAMILIES, SQUARES

WIDTH, NEW = 8, 40
WORDS = ("Hi", "What is this?", "Tell me more of it", "Why", "Say it again, please", "And?", "a")
ASKED = [Request(words, NEW - i, images=[tiny.page(i)] * (i % 3)) for i, words in enumerate(WORDS)]
PLAIN = EngineConfig(
    batch_size=4, width=WIDTH, new_buckets=(NEW,), prompt_buckets=(64, 256), image_buckets=(0, 1, 2)
)
DRAFTS: dict[str, dict[str, Any]] = {
    "gamma 7": {"views": ("M",), "gamma": 7},
    "two views": {"views": ("M", "T"), "gamma": 3, "weighting": "mt-paper"},
    "view and head": {"views": ("T", "head"), "gamma": 4},
}
CONFIG = replace(
    tiny.CONFIG,
    text_config=replace(tiny.CONFIG.text_config, hidden_size=256, intermediate_size=512),
)
"""As wide as it takes for the rounding of a row to depend on the rows beside it."""


def trio(dtype: Any) -> Any:
    """Return a target, a draft model and a KV head."""
    params = tiny.random_params(CONFIG, scale=0.05)
    scores = params["language_model"]["lm_head"]["weight"].T
    last_bits = np.random.default_rng(0).integers(-1, 2, scores[:, 1::2].shape) * float(
        jnp.finfo(dtype).eps
    )
    scores[:, 1::2] = scores[:, : 2 * last_bits.shape[1] : 2] * (1 + last_bits)
    head, head_params = tiny.kv_head(LanguageModel(CONFIG), params)
    draft = tiny.noisy(params, 0.005) | {"vision_tower": params["vision_tower"]}
    params, draft, head_params = jax.tree.map(
        lambda x: jnp.asarray(x, dtype), (params, draft, head_params)
    )
    return tiny.loaded(params, CONFIG), tiny.loaded(draft, CONFIG), LoadedHead(head, head_params)


@pytest.fixture(scope="module")
def models() -> Any:
    return trio(jnp.float32)


def engine(models: Any, views: tuple[str, ...] = (), **options: Any) -> Engine:
    target, draft, *heads = models
    drafts = [draft] * bool(views) + heads * ("head" in views)
    return Engine(
        target, drafts, replace(PLAIN, views=tuple(v for v in views if v != "head"), **options)
    )


@pytest.fixture(scope="module")
def expected(models: Any) -> list[tuple[int, ...]]:
    """Return plain answers."""
    return tiny.tokens(engine(models).generate(ASKED))


@pytest.mark.parametrize("name", ["two views", *tiny.rarer("gamma 7", "view and head")])
def test_answers_do_not_depend_on_the_draft(models, expected, name):
    found = engine(models, **DRAFTS[name]).generate(ASKED)
    assert tiny.tokens(found) == expected
    assert sum(result.stats.accepted_at.sum() for result in found)


@pytest.mark.full
def test_processed_answers_do_not_depend_on_the_draft(models):
    settings = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "no_repeat_ngram_size": 4}
    requests = [replace(request, **settings) for request in ASKED]
    plain = tiny.tokens(engine(models).generate(requests))
    results = engine(models, **DRAFTS["two views"]).generate(requests)
    assert tiny.tokens(results) == plain
    assert sum(result.stats.accepted_at.sum() for result in results)


HEADS: dict[str, Callable[[ModelConfig], HeadConfig]] = {
    "KV": partial(KVHeadConfig.of_target, image_slots=2),
    "one-pass": partial(OnePassConfig.of_target, image_slots=2, markov=2),
    "MTP": MtpConfig.of_target,
    "MSD": partial(Eagle1Config.of_target, images="unfused"),
    "ViSpec": VispecConfig.of_target,
    "EAGLE-3": partial(Eagle3Config.of_target, target_layers=(0, 1, 2)),
    "DFlash": partial(DFlashConfig.of_target, layers=1, target_layers=(0, 1)),
    "DSpark": partial(
        DFlashConfig.of_target, layers=1, target_layers=(1,), markov=2, anchored=True
    ),
    "assistant": partial(AssistantConfig.of_target, layers=2, width=64),
}
"""Makers of heads, by the kind's name."""
DRAFTING = {
    "llava": ("ViSpec", "M, lookup, DFlash"),
    "llava_next": ("MSD", "M, lookup, MTP"),
    "llava_onevision": ("KV", "M, lookup, one-pass"),
    "qwen2_5_vl": ("M, lookup, EAGLE-3",),
    "qwen3_vl": ("M, DSpark",),
    "opt": ("T, lookup",),
    "gemma4": ("assistant",),
    "gemma4_unified": ("M, lookup, assistant",),
}
"""What drafts for a family, alone or in a mixture."""


def test_every_family_and_kind_of_head_has_its_bits_compared():
    drafting = {name for each in DRAFTING.values() for names in each for name in names.split(", ")}
    heads = {type(make(tiny.CONFIG)) for name, make in HEADS.items() if name != "assistant"}
    assert DRAFTING.keys() == (FAMILIES | SQUARES).keys()
    assert drafting >= HEADS.keys()
    assert heads | {AssistantConfig} == {kind.config for kind in kinds.KINDS}


@pytest.mark.full
@pytest.mark.parametrize("family", DRAFTING)
def test_caches_hold_the_same_bits(family):
    """Caches in bfloat16 do not depend on the program that wrote them, for every family and kind of
    draft.
    """
    target, draft, _ = pair_of(family)
    caches, plain = written(family, target)
    counts = Counter(plain.tokens.ravel().tolist())
    likeliest = sorted(token for token, _ in counts.most_common(4))
    for names in DRAFTING[family]:
        parts = names.split(", ")
        views = tuple(part for part in parts if part not in HEADS)
        drafts: list[Any] = [draft] * bool({"M", "T"} & {*views})
        drafts += [head_of(part, target, likeliest) for part in parts if part in HEADS]
        found, state = written(family, target, drafts, gamma=3, views=views)
        jax.tree.map(np.testing.assert_array_equal, found, caches)
        assert state.stats.accepted_at.sum() > 0


def head_of(kind: str, target: LoadedModel, words: list[int]) -> LoadedHead:
    """Return a head of random weights, which drafts only these tokens where its kind lets it."""
    config = HEADS[kind](target.config)
    if not isinstance(config, AssistantConfig):
        text = replace(config.text_config, draft_vocabulary=tuple(words))
        config = replace(config, text_config=text).for_target(target.config)
    params = tiny.eagle_params(config, target.params)
    return LoadedHead(config, jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params))


def written(
    family: str, target: LoadedModel, drafts: Sequence[Any] = (), **options: Any
) -> tuple[Any, DecodeState]:
    """Return the target's cache after prefill and after the loop, and the loop's last state."""
    sizes = {"prompt_buckets": (448,), "image_buckets": (1 if family in SQUARES else 32,)}
    one = Engine(target, drafts, replace(PLAIN, **sizes, **options))
    pages = [[tiny.page(i, 25, 31)] * (target.images is not None) for i in range(4)]
    asked = [Request(one.encoder.completion(*prompt), NEW) for prompt in zip(WORDS, pages)]
    requests = one.batcher.read(asked)
    batch = Batch(one.batcher, requests)
    batch.join(dict(enumerate(requests)))
    begun = bits(batch)
    batch.decode(ended=batch.rows)
    return (begun, bits(batch)), batch.state


def pair_of(family: str) -> tuple[Any, ...]:
    """Return a target with wide layers, and a draft that looks through its tower."""
    config, processor = (FAMILIES | SQUARES)[family]()
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    if isinstance(config, LvlmConfig):
        sight: Any = {"hidden_size": 32, "intermediate_size": 40}
        if isinstance(config.vision_config, QwenTowerConfig):
            sight |= {"out_hidden_size": 256}
        if isinstance(config.vision_config, PixelConfig):
            sight = {}
        vision = replace(config.vision_config, **sight)
        config = replace(
            config, text_config=replace(config.text_config, **wide), vision_config=vision
        )
    else:
        config = replace(config, **wide)
    params = tiny.random_params(config, scale=0.05)
    tower = flatten_dict(split_tower(params)[0])
    draft = unflatten_dict(flatten_dict(tiny.noisy(params, 0.005)) | tower)
    models = [jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), one) for one in (params, draft)]
    return *(LoadedModel(config, one, tiny.tokenizer(), processor) for one in models), None


def bits(batch: Batch) -> list[np.ndarray]:
    """Return the lengths of the target's cache, and its keys and values up to them."""
    cache = jax.tree.map(np.asarray, batch.state.target)
    return [
        cache.length,
        *(leaf[i, :, :n] for leaf in (*cache.k, *cache.v) for i, n in enumerate(cache.length)),
    ]


@pytest.mark.full
def test_streams_sessions_and_freed_rows(models):
    """Streams, sessions and freed rows, which each begin or enter the loop otherwise, write the
    same tokens with and without drafts.
    """
    runs = []
    for options in ({}, DRAFTS["two views"]):
        one = engine(models, **options)
        *_, streamed = one.stream(ASKED[1])
        turns = Session(one)
        talk = [
            turns.ask(text, images=images, max_new_tokens=20)
            for text, images in (("Hi", [tiny.page()]), ("Why?", []))
        ]
        queued = engine(models, batch_size=2, **options).generate(ASKED)
        runs.append(tiny.tokens([streamed, *talk, *queued]))
    assert runs[0] == runs[1]


@pytest.mark.full
@pytest.mark.parametrize("question", ["And?", "a"])
def test_a_session_goes_on_behind_a_stop_string(models, question):
    """A session goes on behind a stop string with the same tokens, whether plain decoding pauses at
    token 9 or before or a block has read it already.
    """
    runs = []
    for options in ({}, DRAFTS["gamma 7"]):
        turns = Session(engine(models, **options))
        begun = turns.engine.generate(Request(question, 9)).text
        talk = [turns.ask(question, max_new_tokens=NEW, stop=[begun])]
        talk += [turns.ask(text, max_new_tokens=20) for text in WORDS[1:4]]
        assert talk[0].finish_reason == "stop"
        runs.append(tiny.tokens(talk))
    assert runs[0] == runs[1]


@pytest.mark.full
def test_a_mesh(models):
    """Answers of a target on several devices do not depend on the draft, either."""
    target, *drafts = models
    split = tiny.split(target, make_mesh(model=2, data=2))
    plain, found = (
        engine([split, *drafts], **options).generate(ASKED)
        for options in ({}, DRAFTS["view and head"])
    )
    assert tiny.tokens(found) == tiny.tokens(plain)
    assert sum(result.stats.accepted_at.sum() for result in found)


def test_what_cannot_have_one_width_is_refused(models):
    with pytest.raises(InputError, match="width: 8, but a block has 9 tokens; give 9 or more"):
        engine(models, views=("M",), gamma=8)
    with pytest.raises(InputError, match="width: 8 with a tree"):
        engine(models, views=("M",), gamma=3, tree="2:7")


@pytest.mark.full
def test_a_live_batch_answers_as_if_alone_whatever_drafts(models):
    """At one width neither the rows next to a request nor the draft change a rounding."""
    runs = []
    for options in ({}, DRAFTS["two views"]):
        decoding = engine(models, **options)
        batch = decoding.live(ASKED)
        requests = dict(enumerate(decoding.batcher.read(ASKED)))
        together = tiny.run_live(batch, dict(requests))
        apart = [tiny.run_live(batch, {i: request})[i] for i, request in requests.items()]
        runs += [tiny.tokens(together[i] for i in requests), tiny.tokens(apart)]
    assert runs[0] == runs[1] == runs[2] == runs[3]
