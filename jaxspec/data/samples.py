"""Define samples: conversations about images, to train on and to evaluate."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec.data.images import StoredImage
from jaxspec.data.messages import DATA_URL, decoded_url
from jaxspec.data.rows import DataRow
from jaxspec.errors import InputError, located, reading
from jaxspec.prompts.messages import Message, dialogue


@dataclass(frozen=True)
class Sample:
    """Hold a conversation about images.

    `turns` are (question, answer). The questions hold one `<image>` for each of `images`, in order.
    The answer is the set's reference, or empty.
    """

    id: str
    dataset: str
    images: tuple[Any, ...]
    """uint8 arrays [Y, X, 3], PIL images or `StoredImage`s."""
    turns: tuple[tuple[str, str], ...]
    accepted: tuple[str, ...] = field(default=(), kw_only=True)
    """Short answers to the first question that count as right."""
    labels: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    """Further columns of the sample, such as MMSpec's topic and category."""
    system: str = field(default="", kw_only=True)
    """System prompt; "" for none."""

    @property
    def messages(self) -> tuple[Message[Any], ...]:
        """Return the whole conversation."""
        return dialogue(self.turns, self.images, self.system)

    def question(self, turn: int) -> list[Message[Any]]:
        """Return the messages between an answer and the next one, the answer of a turn from 0.

        They are the question, and a system prompt before the first one.
        """
        messages = self.messages
        first = len(messages) - 2 * len(self.turns)
        return [*(messages[:first] if turn == 0 else ()), messages[first + 2 * turn]]


def stored_image(row: DataRow, column: str, value: Any) -> StoredImage:
    """Return the image of a cell: a path, a data URL, bytes, or the hub's {bytes, path}.

    It is decoded once, so that errors come early.
    """
    origin = f"{row.origin}, {column}"
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path"):
        value = value["path"]  # the hub's form of an image that is a file
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        value = value["bytes"]
    if isinstance(value, bytes):
        image = StoredImage(value, origin)
    elif isinstance(value, str) and DATA_URL.match(value):
        with located(origin):
            image = replace(decoded_url(value), name=origin)
    elif isinstance(value, str) and re.match(r"https?:", value):
        raise InputError(f"{origin}: {value!r:.60} is a web address; fetch it, and give the file")
    elif isinstance(value, str) and row.folder is not None:
        paths = (os.path.abspath(folder / value) for folder in (row.folder, row.folder / "images"))
        file = next((Path(file) for file in paths if os.path.isfile(file)), None)
        if file is None:
            raise InputError(f"{origin}: no such image file {value!r:.60} in {row.folder}")
        if row.confined and not file.is_relative_to(os.path.abspath(row.folder)):
            raise InputError(
                f"{origin}: image file {value!r:.60} is outside of {row.folder}; link to it from "
                "there, or prepare it with --outside"
            )
        with reading(f"{origin}: {file} cannot be read", "check its permissions"):
            image = StoredImage(file.read_bytes(), f"{origin} ({value})")
    else:
        kind = type(value).__name__
        raise InputError(f"{origin}: a {kind} is no image; give a path, bytes or a data URL")
    loaded = image.load()
    return replace(image, size=(loaded.height, loaded.width))


def text_of(row: DataRow, columns: tuple[str, ...]) -> str:
    """Return the text of the first column that the row has; InputError if there is no text."""
    value = next((row.values[column] for column in columns if column in row.values), None)
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{row.origin}: column {' or '.join(columns)!r} has no text ({value!r:.60}, of "
            f"{list(row.values)!r:.200}); mend the row, or name the set's own data"
        )
    return value.strip()
