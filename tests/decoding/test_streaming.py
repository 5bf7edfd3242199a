"""Answers that are streamed: the same tokens, counts and text, by the same programs, and never half
a letter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.decoding import steps
from jaxspec.engine import batcher, compile_cache, running
from jaxspec.engine.compile_cache import timed
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.stops import text_so_far
from tests import tiny
from train.tokenizer import make_tokenizer

NEW = 30
CONFIG = EngineConfig(
    gamma=3, new_buckets=(32,), prompt_buckets=(64,), image_buckets=(0,), batch_size=1
)


def asked(engine: Engine, temperature: float = 0.0) -> Request:
    return tiny.request_of(engine, "What?", seed=5, temperature=temperature, max_new_tokens=NEW)


@pytest.mark.parametrize(
    ("config", "first"),
    [(replace(CONFIG, trace=True), 8), (None, 128)],
    ids=["chain, growing", "plain, fixed"],
)
def test_a_streamed_answer_is_the_whole_one_by_the_same_programs(
    config: EngineConfig | None,
    first: int,
    target: LoadedModel,
    draft: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batcher, "FIRST", first)
    monkeypatch.setattr(compile_cache, "EXECUTABLES", {})
    engine = Engine(target, config and draft, config or CONFIG)
    for temperature in (0.0, 1.0):
        whole = engine.generate(asked(engine, temperature))
        programs = len(compile_cache.EXECUTABLES)
        *parts, last = engine.stream(asked(engine, temperature))
        assert len(compile_cache.EXECUTABLES) == programs
        assert (last.tokens, last.text, last.trace) == (whole.tokens, whole.text, whole.trace)
        for field, value in vars(whole.stats).items():
            np.testing.assert_array_equal(getattr(last.stats, field), value, err_msg=field)
        assert len(parts) >= 3
        for part, following in zip(parts, [*parts[1:], last], strict=True):
            assert len(part.tokens) == part.stats.emitted + 1
            # the loop that went on wrote elsewhere
            assert part.stats.histogram.sum() == part.stats.steps
            assert following.tokens[: len(part.tokens)] == part.tokens
            assert following.text.startswith(part.text)


def test_who_stops_reading_stops_the_decoding(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, decodes = Engine(target, config=CONFIG), []
    for module in (batcher, running):
        monkeypatch.setattr(
            module, "timed", lambda step, *a, **k: decodes.append(step) or timed(step, *a, **k)
        )
    part = next(engine.stream(asked(engine)))
    assert decodes == [steps.run_prefill, steps.run_decode]
    assert 1 < len(part.tokens) < NEW


def byte_level() -> Any:
    """One token a byte, as the vocabularies of GPT-2's kind hold all of them."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(letters))}, []))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "tokenizer", [byte_level, make_tokenizer], ids=["byte level", "byte fallback"]
)
@pytest.mark.parametrize("every", [1, 2, 5])
def test_no_half_letter_is_told(tokenizer: Callable[[], Any], every: int) -> None:
    """Also where a byte more makes letters before it unreadable for a while, as byte fallback
    does.
    """
    words = "Zwei Äpfel, 日本語 and 🙂🙂 too."
    encoder = PromptEncoder(tokenizer())
    tokens = encoder.tokenizer.encode(words, add_special_tokens=False)
    told = [""]
    for end in range(every, len(tokens), every):
        told.append(text_so_far(told[-1], encoder.decode(tokens[:end]), ()))
    assert encoder.decode(tokens) == words
    assert all(after.startswith(before) for before, after in pairwise([*told, words]))
    assert len(set(told)) > len(words) / (2 * every)
    assert "\ufffd" not in told[-1]
