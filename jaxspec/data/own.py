"""Evaluation data of one's own: a file of conversations about images.

A line of the JSONL file (or a row of parquet, in the same columns) is

    {"id": "kitchen", "image": "kitchen.jpg", "turns": ["What is odd here?", "Why?"], "reference": "The chair floats."}

| column              | what                                                                                      |
|---------------------|-------------------------------------------------------------------------------------------|
| `id`                | a name, or a whole number, each once                                                      |
| `image` or `images` | a path, or a list of paths; without either the conversation is text alone                 |
| `turns`             | the questions, one or more; `<image>` marks where images go, else all precede the first   |
| `reference`         | optional: the right answer to the first question, or a list with one for every turn       |

Paths are sought in the folder of the file and in `images/` in it, or in the folder that is given for them. Other
columns are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxspec.data.benchmarks import stored_image
from jaxspec.data.prompts import PLACEHOLDER, place_images
from jaxspec.data.rows import Row, local_rows
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError


def own_samples(name: str, path: Path, images: Path | None = None) -> Iterator[Sample]:
    """The conversations of a file, as the set `name`.

    Args:
      images: where their images lie; None: beside the file, or in `images/` there.

    Raises InputError, naming file and line, for what is not in the form above.
    """
    if images is not None and not images.is_dir():
        raise InputError(f"images {images}: no such folder; give the one that the images of {path} lie in")
    known: dict[str, str] = {}
    for row in local_rows(path):
        sample = own_sample(name, row if images is None else replace(row, folder=images))
        if (first := known.setdefault(sample.id, row.place)) != row.place:
            raise InputError(f"{row.place}: id {sample.id!r} stands at {first} already; give each its own")
        yield sample


def own_sample(name: str, row: Row) -> Sample:
    """The conversation that a row holds."""
    identity, turns = row.values.get("id"), _texts(row.values.get("turns"))
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise InputError(f"{row.place}: 'id' is {identity!r:.60}; give a name, or a whole number")
    if not turns:
        raise InputError(f"{row.place}: 'turns' is {row.values.get('turns')!r:.60}, not a list of questions; give one")
    images = tuple(stored_image(row, column, path) for column, path in _paths(row))
    try:
        asked = _placed(turns, len(images))
    except InputError as error:
        raise InputError(f"{row.place}: {error}") from error
    answers = _references(row, len(turns))
    return Sample(str(identity), name, images, tuple(zip(asked, answers, strict=True)))


def _paths(row: Row) -> list[tuple[str, Any]]:
    """(column, cell) of every image."""
    one, many = row.values.get("image"), row.values.get("images")
    if one and many:
        raise InputError(f"{row.place}: has both 'image' and 'images'; leave one of them")
    if many is not None and not isinstance(many, list):
        raise InputError(f"{row.place}: 'images' is {many!r:.60}; give a list of paths, or one as 'image'")
    return [("image", one)] if one else [("images", path) for path in many or ()]


def _placed(turns: list[str], images: int) -> list[str]:
    """The questions with a placeholder an image."""
    if PLACEHOLDER not in "".join(turns[1:]):
        return [place_images(turns[0], images), *turns[1:]]
    place_images("".join(turns), images)  # as many, over all turns
    return turns


def _references(row: Row, turns: int) -> list[str]:
    told = row.values.get("reference")
    answers = told if isinstance(told, list) else [told or "", *[""] * (turns - 1)]
    if len(answers) != turns or not all(isinstance(answer, str) for answer in answers):
        raise InputError(f"{row.place}: 'reference' is {told!r:.60}; give a text, or a list of {turns}, one a turn")
    return answers


def _texts(value: Any) -> list[str]:
    """The value where it is a list of texts; else nothing."""
    return value if isinstance(value, list) and all(isinstance(text, str) and text.strip() for text in value) else []
