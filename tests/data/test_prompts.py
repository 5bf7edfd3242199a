"""Prompts follow the template, join turns as token ids, show images by placeholders, and are padded
to buckets.
"""

from __future__ import annotations

import numpy as np
import pytest

from configs.models.mini import IMAGE_TOKEN
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.rows import bucket, pad_rows
from train.tokenizer import make_tokenizer

ENCODER = PromptEncoder(make_tokenizer(), IMAGE_TOKEN)
TOKENIZER = ENCODER.tokenizer


def text(tokens):
    return TOKENIZER.decode(tokens)


def test_first_turn_follows_the_llava_template():
    prompt = ENCODER.prompt("What is here?", ["image"])
    assert prompt.tokens[0] == TOKENIZER.bos_token_id
    assert text(prompt.tokens[1:]) == "USER: <image>\nWhat is here? ASSISTANT:"
    assert (prompt.tokens == ENCODER.image_token).sum() == 1


def test_placeholders_may_stand_anywhere_but_must_match():
    prompt = ENCODER.prompt("First: <image>\nSecond: <image>\nSame?", ["a", "b"])
    assert (prompt.tokens == ENCODER.image_token).sum() == 2
    with pytest.raises(InputError, match="1 <image> placeholders but 2 images"):
        ENCODER.prompt("<image>\nSame?", ["a", "b"])
    with pytest.raises(InputError, match="1 <image> placeholders but 0 images"):
        ENCODER.prompt("<image>\nSame?")


@pytest.mark.parametrize("encoder", [ENCODER, PromptEncoder(TOKENIZER)], ids=["images", "text"])
def test_half_a_character_is_no_text(encoder):
    first = encoder.prompt("What?")
    for ask in (
        encoder.prompt,
        encoder.completion,
        lambda words: encoder.follow_up(first, [5], words),
    ):
        with pytest.raises(InputError, match=r"prompt 'So \\ud83d\?': '\\ud83d' is half a charact"):
            ask("So \ud83d?")


def test_follow_up_keeps_the_answers_own_ids():
    first = ENCODER.prompt("What is here?", ["image"])
    answer = [700, 6, 900]  # ids that no tokeniser would choose for their own text
    for given in (answer, [*answer, ENCODER.eos]):
        second = ENCODER.follow_up(first, given, "And now?")
        start = len(first.tokens)
        assert second.tokens[:start].tolist() == first.tokens.tolist()
        assert second.tokens[start : start + 4].tolist() == [*answer, ENCODER.eos]
        assert text(second.tokens[start + 4 :]) == "USER: And now? ASSISTANT:"
        assert second.images == first.images


def test_buckets():
    assert [bucket(n, (8, 2, 4), "x") for n in (1, 2, 3, 8)] == [2, 2, 4, 8]
    with pytest.raises(InputError, match="x: 9 is over the largest bucket 8"):
        bucket(9, (8, 2, 4), "x")
    rows, lengths = pad_rows([np.asarray([1, 2]), np.asarray([3])], 3)
    assert rows.tolist() == [[1, 2, 0], [3, 0, 0]]
    assert lengths.tolist() == [2, 1]
