"""Streamed answers have the same tokens, counts and text, by the same programs, and never show half
a letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxspec.decoding import steps
from jaxspec.engine import compile_cache
from jaxspec.engine.batches import batch, batcher
from jaxspec.engine.compile_cache import timed
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.stops import AnswerText, text_so_far
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
        for name, value in vars(whole.stats).items():
            np.testing.assert_array_equal(getattr(last.stats, name), value, err_msg=name)
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
    for module in (batch, batcher):
        monkeypatch.setattr(
            module, "timed", lambda step, *a, **k: decodes.append(step) or timed(step, *a, **k)
        )
    part = next(engine.stream(asked(engine)))
    assert decodes == [steps.run_prefill, steps.run_decode]
    assert 1 < len(part.tokens) < NEW


def byte_level() -> Any:
    """Return a tokeniser with a token for each byte, as GPT-2's vocabularies, and one for "can"."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: i for i, letter in enumerate([*letters, "ca", "can"])}
    core = Tokenizer(models.BPE(words, [("c", "a"), ("ca", "n")]))
    core.pre_tokenizer, core.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    core.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def joining() -> Any:
    """Return a byte-level tokeniser that also makes "can't" of "ca n't", as transformers' older
    files do.
    """
    tokenizer = byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode(tokenizer.encode("ca n't , I 've")) == "can't, I've"
    return tokenizer


@pytest.fixture(scope="module")
def encoders() -> dict[str, PromptEncoder]:
    makers = {"byte level": byte_level, "joining": joining, "byte fallback": make_tokenizer}
    return {name: PromptEncoder(make()) for name, make in makers.items()}


KINDS = pytest.mark.parametrize("kind", ["byte level", "joining", "byte fallback"])
WORDS = "Zwei Äpfel, 日本語 and 🙂🙂 too."


@KINDS
@pytest.mark.parametrize("every", [1, 2, 5])
def test_no_half_letter_is_told(encoders: dict[str, PromptEncoder], kind: str, every: int) -> None:
    """No half letter is streamed: text stays where a next byte makes it unreadable for a while, as
    byte fallback does.
    """
    encoder = encoders[kind]
    tokens = encoder.ids(WORDS)
    told = [""]
    for end in range(every, len(tokens), every):
        told.append(text_so_far(told[-1], encoder.text(tokens[:end]), ()))
    assert encoder.text(tokens) == WORDS
    assert all(after.startswith(before) for before, after in pairwise([*told, WORDS]))
    assert len(set(told)) > len(WORDS) / (2 * every)
    assert "\ufffd" not in told[-1]


@KINDS
@given(data=st.data())
def test_an_answer_read_in_parts_has_the_text_of_all(
    encoders: dict[str, PromptEncoder], kind: str, data: st.DataObject
) -> None:
    """An answer that is read in parts has the text of the whole, and ends at the first token whose
    text holds a stop string.
    """
    encoder = encoders[kind]
    texts = st.sampled_from(
        ["ca", " n't", "can", " , ", "日本", "Äpfel", " 've", " 'm", " ", "a. "]
    )
    vocabulary = encoder.tokenizer.get_vocab()
    some = [vocabulary[form] for form in ("<0x61>", "<0xC3>", "<0x84>") if form in vocabulary]
    tokens = st.one_of(st.integers(0, len(vocabulary) - 1), *map(st.just, some))
    pieces = st.one_of(texts.map(encoder.ids), tokens.map(lambda token: [token]))
    tokens = [*chain(*data.draw(st.lists(pieces, max_size=12)))]
    stops = data.draw(st.lists(st.sampled_from(["n't", "本", "a. ", "el can", " "]), max_size=2))
    records = data.draw(st.booleans())
    answer, read = AnswerText(encoder, stops, records), 0
    texts_of = [encoder.text(tokens[:n]).lstrip() for n in range(len(tokens) + 1)]
    while read < len(tokens) and answer.stop is None:
        more = data.draw(st.integers(1, 4))
        answer.extend(tokens[read : read + more])
        read = min(read + more, len(tokens))
        if answer.stop is None:
            assert answer.text == texts_of[read].rstrip()
            assert answer.tokens == tokens[:read]
    ended = [n for n, text in enumerate(texts_of) if any(stop in text for stop in stops)]
    if ended:
        whole = texts_of[ended[0]]
        assert answer.tokens == tokens[: ended[0]]
        assert answer.text == min((whole.partition(stop)[0] for stop in stops), key=len)
        assert whole.startswith(answer.text + str(answer.stop))
    else:
        assert answer.stop is None
    assert len(answer.pieces) == records * len(answer.tokens)


def test_pieces_are_the_letters_of_the_text(encoders: dict[str, PromptEncoder]) -> None:
    for encoder in encoders.values():
        answer = AnswerText(encoder, pieces=True)
        answer.extend(encoder.ids(WORDS))
        assert "".join(answer.pieces) == answer.text == WORDS
        assert not any("\ufffd" in piece for piece in answer.pieces)


@pytest.mark.parametrize("every", [1, 3])
def test_an_answer_that_continues_a_prompt_keeps_its_spaces(
    encoders: dict[str, PromptEncoder], every: int
) -> None:
    """Wherever a text is cut in prompt and answer, both together are the text."""
    for encoder in encoders.values():
        tokens = encoder.ids("def f(x):\n    return  x \n")
        for cut in range(1, len(tokens)):
            answer = AnswerText(encoder, after=tokens[cut - 1 : cut])
            for begin in range(cut, len(tokens), every):
                answer.extend(tokens[begin : begin + every])
            assert encoder.text(tokens[:cut]) + answer.text == encoder.text(tokens)
        first, *rest = encoder.ids("x\n4")
        answer = AnswerText(encoder, ["\n"], after=[first])
        answer.extend(rest)
        assert (answer.text, answer.stop) == ("", "\n")
        tokens = encoder.ids("a book and a book")
        pieces = [encoder.text([token], after=[token]) for token in tokens]
        assert "".join(pieces).lstrip() == encoder.text(tokens)


def test_a_stream_goes_on_where_sent_text_is_rewritten(encoders: dict[str, PromptEncoder]) -> None:
    """A stream, and its pieces, go on where the tokeniser rewrites what was sent: it joins
    "ca n't", and a bad byte makes the letter before it unreadable.
    """
    joining, fallback = encoders["joining"], encoders["byte fallback"]
    letter: Any = fallback.tokenizer.convert_tokens_to_ids(["<0xC3>", "<0x84>", "<0xC3>"])
    cases = (
        (joining, joining.ids("I ca n't see it in here.")),
        (fallback, [*letter, *fallback.ids(" it in here.")]),
    )
    for encoder, tokens in cases:
        answer, sent = AnswerText(encoder, pieces=True), [""]
        for token in tokens:
            answer.extend([token])
            sent.append(text_so_far(sent[-1], answer.text, ()))
        assert all(after.startswith(before) for before, after in pairwise(sent))
        assert not answer.text.startswith(sent[-1])
        for text in (sent[-1], "".join(answer.pieces)):
            assert len(text) == len(answer.text)
            assert text.endswith(" it in here.")


def test_a_stop_string_may_begin_tokens_before(encoders: dict[str, PromptEncoder]) -> None:
    for encoder in encoders.values():
        answer = AnswerText(encoder, ["日", "pfel, 日"])
        answer.extend(encoder.ids(WORDS))
        assert (answer.text, answer.stop) == ("Zwei Ä", "pfel, 日")


def test_a_stop_string_may_end_in_blank_text(encoders: dict[str, PromptEncoder]) -> None:
    """A stop string that ends in blank text ends the answer at its token, not at the next letter;
    what precedes the first letter counts for nothing.
    """
    for encoder in encoders.values():
        answer = AnswerText(encoder, [".\n\n", "\n\n"])
        answer.extend(encoder.ids("\n\nOne.\n\nTwo.\n\n"))
        assert (answer.text, answer.stop) == ("One", ".\n\n")
        assert encoder.text(answer.tokens).lstrip() == "One.\n\n"


@dataclass(frozen=True)
class Counting(PromptEncoder):
    """Count the tokens that are decoded."""

    sizes: list[int] = field(default_factory=list)

    def text(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        self.sizes.append(len(tokens))
        return super().text(tokens, after)


@KINDS
def test_a_long_answer_is_decoded_once(encoders: dict[str, PromptEncoder], kind: str) -> None:
    counting = Counting(encoders[kind].tokenizer)
    tokens = counting.ids("Two apples and a book, 12 of 日本 too. " * 40)
    answer = AnswerText(counting, ["no"], pieces=True)
    answer.extend(tokens)
    assert answer.text == counting.text(tokens).strip()
    assert sum(counting.sizes) < 20 * len(tokens)
    assert max(counting.sizes[:-1]) < 40
