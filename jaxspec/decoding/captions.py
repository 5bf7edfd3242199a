"""Captions for view C: what a captioner is, captions kept on disk, and captions read from a file.

A caption belongs to an image, not to a prompt, so one that was made is never made again: it is kept under the
hash of the image's pixels and of the captioner's identity. `captioners.py` has those that run a model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image

from jaxspec.data.images import image_hash, load_image
from jaxspec.data.rows import Row, local_rows
from jaxspec.errors import InputError
from jaxspec.files import write_text

PREFIX = "image: "
"""What TABED's view C writes in front of a caption."""


@dataclass(frozen=True)
class Caption:
    """What is said of one image."""

    text: str
    ms: float = 0.0
    """Its share of the captioner's time for the batch that it was made in, compilation not counted."""


class Captioner(Protocol):
    """Says one sentence or more about each image."""

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """One caption an image (RGB), in order."""
        ...


class ModelCaptioner(Captioner, Protocol):
    """A captioner whose captions are worth keeping."""

    @property
    def identity(self) -> str:
        """Differs wherever captions may differ: names the weights, the prompt and the way of decoding."""
        ...


def caption_ids(tokenizer: Any, caption: str) -> list[int]:
    """The ids that stand for an image in view C: those of "image: ", then the caption's, both without BOS.

    For Llama's tokeniser the first three are TABED's literal [1967, 29901, 29871]. Words such as `<image>` or
    `</s>` in a caption are spelt out: they are nobody's placeholder and end nothing.
    """
    return [
        token
        for text in (PREFIX, caption)
        for token in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    ]


@dataclass(frozen=True)
class CachedCaptions:
    """A captioner whose captions are kept on disk, one small JSON file an image.

    The time kept with a caption is that of making it: a caption found again reports the same `ms`.
    """

    captioner: ModelCaptioner
    directory: Path

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Captions from the disk, and of each image that has none there, once, from the captioner."""
        files = [self._file(image) for image in images]
        known = {file: _read(file) for file in set(files)}
        missing = {file: image for file, image in zip(files, images, strict=True) if known[file] is None}
        made = self.captioner.caption(list(missing.values())) if missing else []
        for file, caption in zip(missing, made, strict=True):
            _write(file, caption)
            known[file] = caption
        return [caption for file in files if (caption := known[file]) is not None]

    def _file(self, image: Image) -> Path:
        key = hashlib.sha256(f"{self.captioner.identity}\n{image_hash(image)}".encode()).hexdigest()
        return self.directory / key[:2] / f"{key}.json"


def _read(file: Path) -> Caption | None:
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Caption(str(kept["caption"]), float(kept["ms"]))
    except (OSError, ValueError, KeyError, TypeError):  # absent, or not one of ours: made (again)
        return None


def _write(file: Path, caption: Caption) -> None:
    write_text(file, json.dumps({"caption": caption.text, "ms": caption.ms}) + "\n")


@dataclass(frozen=True)
class CaptionFile:
    """Captions written beforehand, by whatever program: one JSON object a line.

    `{"image": "pages/a.png", "caption": "..."}` names an image file, relative to the JSONL;
    `{"sha256": "...", "caption": "..."}` gives its `jaxspec.data.images.image_hash` instead.
    """

    path: Path

    @cached_property
    def captions(self) -> dict[str, str]:
        """Captions by image hash. Raises InputError at the first line that is not as above."""
        return dict(map(self._entry, local_rows(self.path)))

    def _entry(self, row: Row) -> tuple[str, str]:
        text, key, name = (row.values.get(column) for column in ("caption", "sha256", "image"))
        if not isinstance(text, str) or not isinstance(key or name, str):
            raise InputError(
                f"captions {row.place}: {row.values!r:.60} is wrong; "
                "give an object with 'caption' and 'image' or 'sha256'"
            )
        return key or image_hash(load_image((row.folder or Path()) / str(name))), text

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """The captions on file. Raises InputError for an image that has none."""
        keys = [image_hash(image) for image in images]
        for key, image in zip(keys, images, strict=True):
            if key not in self.captions:
                size = f"{image.width}x{image.height}"
                raise InputError(
                    f"captions {self.path}: none for the {size} image with sha256 {key}; add a line for it"
                )
        return [Caption(self.captions[key]) for key in keys]
