"""Read messages as people write them: {role, content} in OpenAI's or transformers' form.

The older {from, value} and the usual names of roles are read too.

A content is a text, or a list of parts: {"type": "text", "text": ...} and images. An image is
OpenAI's {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}, or transformers'
{"type": "image"} with its source as `image`, `url`, `path` or `base64`. Without a source it is the
next of the images given with the messages, as is an `<image>` in a text that is no part.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlparse

from jaxspec.data.images import ImageSource, StoredImage
from jaxspec.errors import InputError, located, nearest
from jaxspec.prompts.messages import Message, Role, user_message
from jaxspec.prompts.placeholders import PLACEHOLDER

ROLES: dict[str, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatbot", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
"""The usual names of roles."""
SPEAKERS, CONTENTS = ("role", "from"), ("content", "value")
"""Entries of a message; of each pair the first one with a value counts."""
_IMAGES = ("image", "image_url", "input_image")
_TEXTS = ("text", "input_text", "output_text")
_SOURCES = ("image_url", "image", "url", "path", "base64")
"""Entries of an image's part that may hold its source; the first one with a value counts."""
_SIZES = ("max_pixels", "min_pixels", "resized_height", "resized_width")
"""Entries of an image's part that would change its pixels; a request has one limit for all."""
DATA_URL = re.compile("data:", re.IGNORECASE)


def image_source(value: Any, folder: Path | None = None) -> ImageSource:
    """Return an image of a message: pixels, a file's name, a data URL or a file's URL.

    folder: Folder of relative names; None means the working directory.
    """
    if not isinstance(value, str) or re.match(r"https?:", value):
        return value
    if DATA_URL.match(value):
        return decoded_url(value)
    path = unquote(urlparse(value).path) if value.startswith("file://") else value
    return path if folder is None else folder / path


def decoded_url(url: str) -> StoredImage:
    """Return the image of a data URL (RFC 2397), not yet decoded, whatever media type it names.

    Raises InputError for a URL without content, and for what is not base64.
    """
    head, comma, data = url.partition(",")
    if not comma:
        raise InputError(f"image {url[:40]!r}: no data URL; give data:image/png;base64,...")
    content = unquote_to_bytes(data.encode("ascii", "replace"))
    if head.lower().endswith(";base64"):
        content = _from_base64(content, head)
    return StoredImage(content, f"{head[:40]},...")


def read_messages(
    values: Any,
    images: Sequence[Any] = (),
    source: Callable[[Any], ImageSource] = image_source,
) -> list[Message[ImageSource]]:
    """Return messages with all their images.

    Args:
      images: Images given with the messages. If no message shows any, they come before the first
        question.
      source: Reader of an image's source.

    Raises InputError that names the message.
    """
    if not isinstance(values, list | tuple) or not values:
        raise InputError(f"messages: {values!r:.60}; give a list of {{role, content}}")
    queue = _ImageQueue(images)
    messages = []
    for number, value in enumerate(values):
        with located(f"messages[{number}]"):
            messages.append(_message(value, queue, source))
    if queue.taken == 0 and images:
        return _before_the_first(messages, [source(image) for image in images])
    if queue.taken < len(images):
        raise InputError(
            f"messages: show {queue.taken} of {len(images)} images; mark each with a part "
            f'{{"type": "image"}} or {PLACEHOLDER}'
        )
    return messages


def role_of(message: Mapping[str, Any]) -> Role | None:
    """Return the role of a message, None if it names none; InputError for an unknown one."""
    name = _first(message, SPEAKERS)
    if not isinstance(name, str):
        return None
    if name.lower() not in ROLES:
        raise InputError(f"role {name!r} is unknown; {nearest(name, list(ROLES))}")
    return ROLES[name.lower()]


def _first(entries: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first value among the named entries."""
    return next((entries[name] for name in names if entries.get(name) is not None), None)


class _ImageQueue:
    """Hand out the images given with the messages, in their order."""

    def __init__(self, images: Sequence[Any]) -> None:
        self.images, self.taken = images, 0

    def next(self) -> Any:
        if self.taken == len(self.images):
            raise InputError(
                f"shows an image without a source after all {self.taken} images given with "
                'the messages; give {"type": "image", "path": "photo.jpg"}'
            )
        self.taken += 1
        return self.images[self.taken - 1]


def _message(
    value: Any, queue: _ImageQueue, source: Callable[[Any], ImageSource]
) -> Message[ImageSource]:
    """Return a message of any public form.

    Args:
      queue: Images that placeholders in texts stand for, in order.
      source: Returns the source of an image from its entry.
    """
    entries = value if isinstance(value, Mapping) else {}
    role, content = role_of(entries), _first(entries, CONTENTS)
    if role is None or not entries.keys() & {*CONTENTS}:
        raise InputError(f"{value!r:.60} is no message {{role, content}}")
    if entries.get("tool_calls"):
        raise InputError("tool_calls are not read; give what the tool was asked as text")
    if isinstance(content, str):
        marks = content.count(PLACEHOLDER) if queue.images else 0
        sources = [source(queue.next()) for _ in range(marks)]
        message = user_message(content, sources) if marks else Message("user", (content,))
        return replace(message, role=role)
    if not isinstance(content, list | tuple) or not content:
        raise InputError(f"content {content!r:.60}; give a text or a list of parts")
    parts: list[str | None] = []
    images = []
    for number, part in enumerate(content):
        with located(f"content[{number}]"):
            text = _text(part)
            parts.append(text)
            if text is None:
                images.append(source(_source(part, queue)))
    return Message(role, tuple(parts), tuple(images))


def _text(part: Any) -> str | None:
    """Return a part's text, or None for an image."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS and isinstance(part.get("text"), str):
        return part["text"]
    if kind in _IMAGES:
        return None
    raise InputError(
        f'{part!r:.60} is no part that is read; give {{"type": "text", "text": ...}} or '
        '{"type": "image", ...}'
    )


def _source(part: Mapping[str, Any], queue: _ImageQueue) -> Any:
    """Return the source of a part's image, or the next image of those given with the messages."""
    for name in _SIZES:
        if part.get(name) is not None:
            raise InputError(
                f"{name} is not read here; give the request max_pixels, or leave it out"
            )
    name = next((name for name in _SOURCES if part.get(name) is not None), None)
    if name is None:
        return queue.next()
    value = part[name]
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if name == "base64" and isinstance(value, str):
        return StoredImage(_from_base64(value.encode("ascii", "replace"), name), "base64")
    return value


def _from_base64(content: bytes, name: str) -> bytes:
    """Decode base64, also in lines and without padding."""
    content = b"".join(content.split())
    try:
        return base64.b64decode(content + b"=" * (-len(content) % 4), validate=True)
    except ValueError as error:
        raise InputError(f"image {name[:40]!r}: not base64 ({error}); encode the file") from None


def _before_the_first(
    messages: list[Message[ImageSource]], images: list[ImageSource]
) -> list[Message[ImageSource]]:
    """Return the messages with images that none shows before the first question."""
    for number, message in enumerate(messages):
        if message.role == "user":
            parts = (*[None] * len(images), *message.parts)
            first = replace(message, parts=parts, images=(*images, *message.images))
            return [*messages[:number], first, *messages[number + 1 :]]
    raise InputError(f"messages: no question shows the {len(images)} images; add the user's")
