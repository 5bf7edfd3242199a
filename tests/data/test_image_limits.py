"""Requests may bound their images: Qwen's in pixels, Gemma 4's in tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.serve.bodies import chat
from jaxspec.serve.examples import examples
from jaxspec.serve.messages import Limits
from tests import tiny
from tests.tiny.families import SEEING

LIMITS = {
    "qwen2_5_vl": {"max_pixels": 768},
    "qwen3_vl": {"max_pixels": 768},
    "gemma4": {"max_soft_tokens": 70},
    "gemma4_unified": {"max_soft_tokens": 70},
}
"""Fields of a request that choose less than the processors of `models`."""


def models(family: str) -> tuple[LoadedModel, LoadedModel]:
    """Return a model, and one whose processor has the limit."""
    config, processor = SEEING[family]()
    words = tiny.tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = LoadedModel(config, tiny.random_params(config), words, processor)
    if "max_pixels" in LIMITS[family]:
        less = type(processor)(patch_size=4, size={"shortest_edge": 64, "longest_edge": 768})
        return model, replace(model, image_processor=less)
    more = type(processor)(max_soft_tokens=140, patch_size=4, pooling_kernel_size=3)
    return replace(model, image_processor=more), model


@pytest.mark.parametrize("family", LIMITS)
def test_less_is_the_processors_own(family: str) -> None:
    """A request reads, sizes and plans as a model whose processor has its limit, also next to a
    request without one.
    """
    buckets = EngineConfig(prompt_buckets=(64, 112, 160, 448), image_buckets=(0, 1, 2, 4, 8, 32))
    engine, fewer = (Engine(model, config=buckets) for model in models(family))
    pages = [Image.fromarray(tiny.page(i, *size)) for i, size in enumerate([(60, 90), (43, 19)])]
    asked = Request("Like it?", 8, images=pages[: 1 if "max_soft_tokens" in LIMITS[family] else 2])
    few = replace(asked, **LIMITS[family])
    whole, limited = engine.batcher.read([asked, few])
    (expected,) = fewer.batcher.read([asked])
    for name, values in vars(expected.rows[0]).items():
        np.testing.assert_array_equal(getattr(limited.rows[0], name), values)
    assert limited.sizes == expected.sizes
    assert limited.sizes.length < whole.sizes.length
    assert limited.sizes.tiles < whole.sizes.tiles
    mixed: Any = engine.batcher.inputs([whole, limited], whole.sizes, 2)
    alone: Any = fewer.batcher.inputs([expected], whole.sizes, 1)
    for name, tiles in alone.images.items():
        np.testing.assert_array_equal(mixed.images[name][1], tiles[0])
    plan, same, most = (
        engines.memory_report([request]).total
        for engines, request in ((engine, few), (fewer, asked), (engine, asked))
    )
    assert plan == same < most


@pytest.mark.parametrize("name", ["max_pixels", "max_soft_tokens"])
def test_other_images_and_values_are_refused(name: str) -> None:
    config, processor = SEEING["llava_onevision"]()
    other = LoadedModel(config, {}, tiny.tokenizer(), processor)
    with pytest.raises(InputError, match=f"{name}: 140, which 'llava_onevision' does not size"):
        other.images_within({name: 140})
    mend = {"max_pixels": "1 to 33554432", "max_soft_tokens": "one of 70, 140, 280, 560, 1120"}[
        name
    ]
    for value in (0, True, 1 << 26):
        with pytest.raises(InputError, match=f"{name}: {value}; give {mend}"):
            Request("Hi", **{name: value})  # type: ignore[arg-type]


def test_a_body_may_choose_the_tokens_of_its_images() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_soft_tokens": 70}
    engine = Engine(models("gemma4")[0])
    for limits in (Limits("m"), Limits("m", max_soft_tokens=140)):
        assert chat(body, engine.encoder, limits).requests[0].max_soft_tokens == 70
    (request,) = chat(body | {"max_soft_tokens": None}, engine.encoder, limits).requests
    assert request.max_soft_tokens == 140
    sizes = [engine.batcher.read(examples(engine, [256], 1, 56, 4, None, n)) for n in (70, 140)]
    assert [max(request.sizes.tiles[0] for request in requests) for requests in sizes] == [1, 2]
