"""Samples of evaluation sets, and how the rows of your own data become some.

A line of a JSONL file of your own (or a row of parquet, in the same columns) is

    {"id": "kitchen", "image": "kitchen.jpg", "turns": ["What is odd?", "Why?"],
     "reference": "The chair floats."}

- `id`: A name or a whole number, each once.
- `image` or `images`: A path, or a list of paths; a conversation without images has neither.
- `turns`: The questions, one or more. `<image>` marks the place of an image; without marks, the
  images precede the first question.
- `reference`: Optional right answer to the first question, or a list with one for every turn.

Paths are relative to the file's folder, to its `images/`, or to the folder that is given for them.
Other columns are not read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxspec.data.images import StoredImage
from jaxspec.data.rows import DataRow, local_rows
from jaxspec.errors import InputError, located, reading
from jaxspec.prompts.messages import Message, dialogue
from jaxspec.prompts.placeholders import place_in_turns


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

    @property
    def messages(self) -> tuple[Message[Any], ...]:
        """Return the whole conversation."""
        return dialogue(self.turns, self.images)


def own_samples(
    name: str, path: Path, images: Path | None = None, labels: tuple[str, ...] = ()
) -> Iterator[Sample]:
    """Yield the conversations of a file, as the set `name`.

    Args:
      images: Folder of the images; None means the file's folder, or `images/` in it.
      labels: Further columns to keep, as text; a row without one has an empty label.

    Raises InputError, naming file and line, for a row in another form.
    """
    if images is not None and not images.is_dir():
        raise InputError(f"images {images}: no such folder; give the one with {path}'s images")
    origins: dict[str, str] = {}
    for row in local_rows(path):
        row = row if images is None else replace(row, folder=images)
        sample = own_sample(name, row, labels)
        if (first := origins.setdefault(sample.id, row.place)) != row.place:
            raise InputError(f"{row.place}: id {sample.id!r} is at {first} already; rename one")
        yield sample


def own_sample(name: str, row: DataRow, labels: tuple[str, ...] = ()) -> Sample:
    """Return the conversation that a row holds; `labels` are further columns to keep."""
    values, turns = row.values, row.values.get("turns")
    identity, image, many = (values.get(column) for column in ("id", "image", "images"))
    with located(row.place):
        if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
            raise InputError(f"'id' is {identity!r:.60}; give a name, or a whole number")
        listed = isinstance(turns, list) and all(isinstance(t, str) and t.strip() for t in turns)
        if not turns or not listed:
            raise InputError(f"'turns' is {turns!r:.60}, not a list of questions; give one")
        if image and many:
            raise InputError("has both 'image' and 'images'; leave one of them")
        if many is not None and not isinstance(many, list):
            raise InputError(f"'images' is {many!r:.60}; give a list of paths, or one as 'image'")
        column, paths = ("image", [image]) if image else ("images", many or ())
        images = [stored_image(row, column, path) for path in paths]
        right = values.get("reference")
        answers = right if isinstance(right, list) else [right or "", *[""] * (len(turns) - 1)]
        if len(answers) != len(turns) or not all(isinstance(answer, str) for answer in answers):
            raise InputError(f"'reference' is {right!r:.60}; give a text, or {len(turns)} texts")
        questions = place_in_turns(turns, len(images))
    label_texts = tuple((column, str(values.get(column, ""))) for column in labels)
    dialogue = tuple(zip(questions, answers, strict=True))
    return Sample(str(identity), name, tuple(images), dialogue, labels=label_texts)


def stored_image(row: DataRow, column: str, value: Any) -> StoredImage:
    """Return the image of a cell: the hub's {bytes, path}, or a path.

    It is decoded once, so that errors come early.
    """
    origin = f"{row.place}, {column}"
    if isinstance(value, Mapping) and value.get("bytes") is None and value.get("path"):
        value = value["path"]  # the hub's form of an image that is a file
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):
        image = StoredImage(value["bytes"], origin)
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
        raise InputError(f"{origin}: a {kind} is no image; give a path, or {{bytes, path}}")
    loaded = image.load()
    return replace(image, size=(loaded.height, loaded.width))


def text_of(row: DataRow, columns: tuple[str, ...]) -> str:
    """Return the text of the first column that the row has; InputError if there is no text."""
    value = next((row.values[column] for column in columns if column in row.values), None)
    if not isinstance(value, str) or not value.strip():
        raise InputError(
            f"{row.place}: column {' or '.join(columns)!r} has no text ({value!r:.60}, of "
            f"{list(row.values)!r:.200}); mend the row, or name the set's own data"
        )
    return value.strip()
