"""Messages in OpenAI's and transformers' forms are read with their roles, parts and images, or
refused in one line.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_from_bytes

import numpy as np
import pytest
from PIL import Image

from jaxspec.data.images import Picture
from jaxspec.data.messages import image_source, read_messages
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message, dialogue, user_message
from tests import tiny

PAGE = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(4, 5, 3))


def encoded(page: Image.Image = PAGE) -> str:
    out = io.BytesIO()
    page.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,PAGE", "detail": "low"}},
        {"type": "image_url", "image_url": "data:image/png;base64,PAGE"},
        {"type": "input_image", "image_url": "data:image/png;base64,PAGE"},
        {"type": "image_url", "image_url": {"url": "file://FOLDER/a%20page.png"}},
        {"type": "image", "image": "data:image/png;base64,PAGE"},
        {"type": "image", "url": "DATA:;base64,ESCAPED"},
        {"type": "image", "url": "data:image/jpeg;name=a.jpg;charset=utf-8;BASE64,PAGE"},
        {"type": "image", "url": "data:application/octet-stream;base64,LINES"},
        {"type": "image", "url": "data:,PERCENT"},
        {"type": "image", "base64": "LINES"},
        {"type": "image", "base64": "PAGE"},
        {"type": "image", "url": "a page.png"},
        {"type": "image", "path": "a page.png"},
        {"type": "image", "image": "FOLDER/a page.png", "text": None},
        {"type": "image", "image": None},
        {"type": "image"},
    ],
    ids=str,
)
def test_forms_of_an_image(part: dict[str, Any], tmp_path: Path) -> None:
    PAGE.save(tmp_path / "a page.png")
    texts = {
        "PAGE": encoded(),
        "LINES": "\r\n".join(re.findall(".{1,20}", encoded().rstrip("="))),
        "ESCAPED": quote(encoded(), safe=""),
        "PERCENT": quote_from_bytes(base64.b64decode(encoded())),
        "FOLDER": str(tmp_path),
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(inner) for name, inner in value.items()}
        for name, text in texts.items() if isinstance(value, str) else ():
            value = value.replace(name, text)
        return value

    beside = [] if set(part) - {"type"} and list(part.values())[1] else [PAGE]
    text = {"type": "text", "text": "What?"}
    (message,) = read_messages(
        user(filled(part), text), beside, lambda value: image_source(value, tmp_path)
    )
    assert message.parts == (None, "What?")
    (image,) = message.images
    np.testing.assert_array_equal(Picture.of(image).rgb(), PAGE)


def test_roles_and_contents() -> None:
    assert read_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "human", "content": ["Hi", {"type": "input_text", "text": "there"}]},
            {"role": "gpt", "content": "Ho"},
            {"role": "user", "content": "And <image>?"},
        ],
        [PAGE],
    ) == [
        Message("system", ("Be brief.",)),
        Message("user", ("Hi", "there")),
        Message("assistant", ("Ho",)),
        Message("user", ("And ", None, "?"), (PAGE,), inline=True),
    ]
    # Images that no message shows precede the first question; without images a mark is text.
    said = [{"from": "system", "value": "S"}, {"from": "human", "value": "Q"}]
    assert read_messages(said, [PAGE])[1] == user_message("Q", [PAGE])
    assert read_messages(user("<image>"))[0].parts == ("<image>",)


def test_an_image_between_texts_keeps_its_place_in_one_text() -> None:
    page = {"type": "image", "image": PAGE}
    (between,) = read_messages(user("Is ", page, " red?"))
    (before,) = read_messages(user(page, page, "Alike?"))
    assert between.marked == "Is <image> red?"
    assert before.marked == "<image>\n<image>\nAlike?"
    assert user_message(before.marked, [PAGE, PAGE]) == before


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"role": "user"}, "messages: {'role': 'user'}; give a list of {role, content}"),
        ([], "messages: []; give a list"),
        (["Hi"], "messages[0]: 'Hi' is no message {role, content}"),
        ([{"role": "user"}], "messages[0]: {'role': 'user'} is no message"),
        ([{"role": "usr", "content": "Hi"}], "messages[0]: role 'usr' is unknown; did you mean 'u"),
        (
            [{"role": "assistant", "content": None, "tool_calls": []}],
            "messages[0]: content None; give a text or a list of parts",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "a"}]}],
            "messages[0]: tool_calls are not read; give what the tool was asked as text",
        ),
        (user({"type": "video"}), "messages[0]: content[0]: {'type': 'video'} is no part"),
        (user({"type": "text"}), "content[0]: {'type': 'text'} is no part"),
        (
            user("Hi", {"type": "image"}, {"type": "image"}),
            "messages[0]: content[2]: shows an image without a source after all 1 images",
        ),
        (
            user({"type": "image", "url": "data:image/png;base64"}, {"type": "image"}),
            "image 'data:image/png;base64': no data URL; give data:image/png;base64,...",
        ),
        (
            user({"type": "image", "image": PAGE, "resized_height": 28}),
            "messages[0]: content[0]: resized_height is not read here; give the request max_pixels",
        ),
        (
            user({"type": "image", "base64": "?"}, {"type": "image"}),
            "messages[0]: content[0]: image 'base64': not base64",
        ),
    ],
)
def test_wrong_messages_are_one_line(values: Any, reason: str) -> None:
    assert reason in tiny.one_line(read_messages, values, [PAGE])


def test_images_left_over_and_web_addresses() -> None:
    with pytest.raises(InputError, match="messages: show 1 of 2 images; mark each with a part"):
        read_messages(user({"type": "image"}, "Hi"), [PAGE, PAGE])
    (message,) = read_messages(user({"type": "image", "url": "https://a.org/b.png"}))
    with pytest.raises(InputError, match=r"image https://a\.org/b\.png: a web address; fetch it"):
        Picture.of(message.images[0])


ENCODER = PromptEncoder(tiny.tokenizer(), tiny.SPECIAL.index("<image>"))


def test_messages_in_vicunas_form() -> None:
    """A conversation in messages reads as question and follow-ups do, and as training's dialogue
    does.
    """
    turns = [("<image>\nWho?", "Me."), ("Why?", "No.")]
    said = dialogue([*turns, ("So <image>?", "")], "ab", "Be brief.")[:-1]
    prompt = ENCODER.prompt(said)
    assert ENCODER.text(prompt.tokens) == (
        "Be brief. USER: \nWho? ASSISTANT:Me.USER: Why? ASSISTANT:No.USER: So ? ASSISTANT:"
    )
    assert prompt.images == ("a", "b")
    first = ENCODER.prompt(said[:2])
    second = ENCODER.follow_up(first, ENCODER.ids("Me."), "Why?")
    third = ENCODER.follow_up(second, ENCODER.ids("No."), said[-1:])
    assert third.tokens.tolist() == prompt.tokens.tolist()
    ((tokens, mask),) = ENCODER.dialogues([said[:-1]])
    assert tokens.tolist() == prompt.tokens.tolist()[: len(tokens)]
    assert ENCODER.text(tokens[mask]) == "Me.No."


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_images_without_words_are_asked_with_roles(system: str) -> None:
    encoder = replace(ENCODER, system=system)
    text = f"{system} USER: <image>\n ASSISTANT:".strip()
    assert encoder.prompt("", ["a"]).tokens.tolist()[1:] == encoder.ids(text)
    # Training reads an answer without a question as plain text, or as a caption.
    ((tokens, _),) = encoder.dialogues([dialogue([("<image>", "A cup.")], ["a"])])
    assert tokens.tolist()[1:] == encoder.ids("<image>A cup.</s>")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (dialogue([("Who?", "Me.")]), "the last is the assistant's; end with the user's"),
        ([Message("user", ("A",))] * 2, "user, user before an answer; Vicuna's form has"),
    ],
)
def test_messages_that_no_prompt_can_hold(messages: list[Message], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        ENCODER.prompt(messages)
