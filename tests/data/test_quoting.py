"""Questions, answers, system prompts and captions may quote any special token: their ids are those
of the text.

The oracle is the same tokeniser with other names for its special tokens, so that a quotation is
nothing special to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from jaxspec.checkpoints.directories import parse_config
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.prompts.chat_templates import chat_templates
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.templates import bos_before, has_vicuna_form
from jaxspec.prompts.views import VIEWS
from tests import tiny
from tests.hub.build import write_texts
from tests.hub.table import TWINS

FORMS = {(twin.family, twin.words, twin.chat): name for name, twin in TWINS.items()}
"""A twin of each family, tokeniser and kind of template."""


@pytest.fixture(scope="module", params=FORMS.values())
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("twin")
    raw = write_texts(path, TWINS[request.param])
    return PromptEncoder.of(parse_config(path, raw), load_tokenizer(path))


def special(tokenizer: Any) -> dict[str, int]:
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: i for i, token in added if token.special}


def renamed(tokenizer: Any) -> Any:
    """Return the tokeniser and its template with `§` behind each special token."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    words = "|".join(map(re.escape, special(tokenizer)))

    def rename(text: str) -> str:
        return re.sub(words, lambda word: f"{word[0]}§", text)

    backend = Tokenizer.from_str(rename(tokenizer.backend_tokenizer.to_str()))
    roles = ("bos_token", "eos_token")
    names = {role: rename(getattr(tokenizer, role)) for role in roles if getattr(tokenizer, role)}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    made.chat_template = tokenizer.chat_template and rename(tokenizer.chat_template)
    return made


def conversation(quote: Callable[[str], str], image: bool = False) -> list[Message]:
    """Return a system prompt, two questions and an answer, each with all quotations."""
    asked = Message("user", (None, quote("Who?")), ("page",)) if image else None
    return [
        Message("system", (quote("Be kind."),)),
        asked or Message("user", (quote("Who?\n"),)),
        Message("assistant", (quote("Me."),)),
        Message("user", (quote("\n<photo.png>? "),)),
    ]


def quoting(tokenizer: Any) -> Callable[[str], str]:
    words = special(tokenizer)
    marks = "\ufdd0 \ufdd0\ufdd0 <\ufdd0s>"  # which the quoter itself writes
    return lambda text: f"{text} {''.join(words)}the {' '.join(words)}. {marks} {text}"


def test_quotations_in_messages_are_text(encoder: PromptEncoder) -> None:
    tokenizer, oracle = encoder.tokenizer, renamed(encoder.tokenizer)
    quote = quoting(tokenizer)
    messages = conversation(quote)
    if not (oracle.chat_template or has_vicuna_form(tokenizer, encoder.decoder)):
        ((tokens, mask),) = encoder.dialogues([[Message("user", ("",)), messages[2]]])
        assert tokens[mask].tolist() == [*oracle.encode(quote("Me."))[1:], encoder.eos]
        return
    template = chat_templates(PromptEncoder(oracle))["default"]
    parts = "selectattr" in template
    said = [
        {"role": m.role, "content": [{"type": "text", "text": m.texts[0]}] if parts else m.texts[0]}
        for m in messages
    ]
    if encoder.image_token is not None:
        template = template.removeprefix("{{ bos_token }}")
    for count in (2, 4):
        text = oracle.apply_chat_template(
            said[:count], chat_template=template, tokenize=False, add_generation_prompt=True
        )
        expected = oracle.encode(text, add_special_tokens=False)
        if not text.startswith(oracle.bos_token or "§"):
            expected = [*bos_before(oracle, text), *expected]
        assert encoder.prompt(messages[:count]).tokens.tolist() == expected


def test_quotations_next_to_images_and_in_rows_are_text(encoder: PromptEncoder) -> None:
    """Next to images and in rows, the only special tokens are those of the conversation without
    quotations.
    """
    tokenizer, ids = encoder.tokenizer, {*special(encoder.tokenizer).values()}
    oracle, quote = renamed(tokenizer), quoting(tokenizer)
    if not (tokenizer.chat_template or has_vicuna_form(tokenizer, encoder.decoder)):
        return
    image = encoder.image_token is not None

    def kept(tokens: Any) -> list[int]:
        return [token for token in tokens.tolist() if token in ids]

    plain, quoted = (
        [
            encoder.prompt(said[:2]),
            encoder.follow_up(encoder.prompt(said[:2]), [encoder.eos or 0], said[3:]),
        ]
        for said in (conversation(str, image), conversation(quote, image))
    )
    for one, other in zip(plain, quoted):
        assert kept(one.tokens) == kept(other.tokens)
        assert kept(one.tokens).count(encoder.image_token or -1) == len(one.images) == image
    ((tokens, mask),) = encoder.dialogues([conversation(quote, image)[:3]])
    ((ordinary, _),) = encoder.dialogues([conversation(str, image)[:3]])
    assert kept(tokens) == kept(ordinary)
    end = ordinary[-1]
    answer = oracle.encode(quote("Me."), add_special_tokens=False)
    assert tokens[mask].tolist() == [*answer, *([end] if end in ids else [])]


def test_a_quotation_in_two_parts_of_a_message_is_text(encoder: PromptEncoder) -> None:
    """A special token that is quoted in two parts of a message, which templates join, is text."""
    words = special(encoder.tokenizer)
    if not (encoder.tokenizer.chat_template or has_vicuna_form(encoder.tokenizer, encoder.decoder)):
        return

    def kept(*parts: str) -> list[int]:
        tokens = encoder.prompt([Message("user", parts)]).tokens.tolist()
        return [token for token in tokens if token in words.values()]

    plain = kept("Who?", "Me.")
    for word in words:
        for cut in {1, len(word) // 2, len(word) - 1}:
            assert kept(f"Who? {word[:cut]}", f"{word[cut:]} Me.") == plain, word[:cut]


def test_quotations_in_captions_are_text(encoder: PromptEncoder) -> None:
    caption = quoting(encoder.tokenizer)("A cup.")
    oracle = renamed(encoder.tokenizer)
    expected = (oracle.encode(text, add_special_tokens=False) for text in ("image: ", caption))
    assert VIEWS["C"].substitute(encoder, caption) == [*chain(*expected)]


def test_completions_are_raw(encoder: PromptEncoder) -> None:
    words = special(encoder.tokenizer)
    images = (
        {encoder.image_text, "<image>", "<video>"} if encoder.image_token is not None else set()
    )
    text = "".join(word for word in words if word not in images)
    tokens = encoder.completion(text).tokens.tolist()
    assert tokens[-len(words) + len(images & words.keys()) :] == encoder.ids(text)
    assert {*encoder.ids(text)} <= {*words.values()}


def test_an_images_token_is_text_whatever_its_kind() -> None:
    """An image's token in a text is text, also where the tokeniser holds `<image>` as a word that
    is not special.
    """
    from tokenizers import AddedToken

    words = tiny.tokenizer()
    words.add_tokens([AddedToken("<picture>", special=False)])
    number = words.convert_tokens_to_ids("<picture>")
    encoder = PromptEncoder(words, tiny.SPECIAL.index("<image>"), sign=number)
    for text in ("A <picture> of it", "<image>", "<<image>image>"):
        ids = encoder.text_ids(text)
        assert not {number, encoder.image_token} & {*ids}
        assert encoder.text(ids) == text
    assert encoder.text_ids("A cup.") == encoder.ids("A cup.")
