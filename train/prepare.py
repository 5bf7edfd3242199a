"""Prepares training data: ArrayRecord shards that training reads at random, written once.

    python train/prepare.py llava --data mix.json --images photos --name my_mix
    python train/prepare.py text --data chat.jsonl --name chat
    python train/prepare.py picturebook --samples 20000

Each goes to OUT/NAME. Rows and images that cannot be read are skipped, up to a limit, and told in
OUT/NAME.skipped.jsonl.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro

from jaxspec.data.builders import prepare
from jaxspec.data.conversations import Skipped, readable
from jaxspec.data.samples import Sample
from jaxspec.data.sources import Picturebook
from jaxspec.runtime import input_errors

OUT = Path("runs/data")


@dataclass(frozen=True)
class Llava:
    """Conversations about images: LLaVA's JSON, JSONL or parquet, and a folder of images; text too."""

    data: Path
    """The file, or a folder of parquet or JSONL files."""
    name: str
    """Of the prepared data set: lower-case words joined by _."""
    images: Path | None = None
    """The folder that image paths start from; by default the file's own, or `images/` in it."""
    outside: bool = False
    """Take images that lie outside of that folder too, by `..`, by links or by whole paths."""
    frames: int = 8
    """Most frames of a video."""
    skip: int = 100
    """Rows that may be skipped because they cannot be read."""
    out: Path = OUT
    """Where prepared data sets lie."""


@dataclass(frozen=True)
class Text:
    """Text without images: JSONL or parquet of questions and answers, messages, or plain text."""

    data: Path
    """The file, or a folder of parquet or JSONL files."""
    name: str
    """Of the prepared data set: lower-case words joined by _."""
    skip: int = 100
    """Rows that may be skipped because they cannot be read."""
    out: Path = OUT
    """Where prepared data sets lie."""


@dataclass(frozen=True)
class Book:
    """Picturebook's dialogues; training reads them without this too, drawing them as it goes."""

    samples: int = 20_000
    """How many."""
    name: str = "picturebook"
    """Of the prepared data set: lower-case words joined by _."""
    seed: int = 0
    """Names one of its endless splits."""
    kinds: tuple[str, ...] | None = None
    """Kinds of samples to keep; all by default."""
    out: Path = OUT
    """Where prepared data sets lie."""


def main(command: Llava | Text | Book) -> Path:
    """Prepares one data set and tells what is in it."""
    counts = {"samples": 0, "images": 0, "answers": 0}

    def counted(samples: Iterable[Sample]) -> Iterator[Sample]:
        for sample in samples:
            counts["samples"] += 1
            counts["images"] += len(sample.images)
            counts["answers"] += len(sample.turns)
            yield sample

    if isinstance(command, Book):
        samples = Picturebook(command.seed, command.kinds, command.samples)
        folder = prepare(command.name, command.out, counted(samples), command.samples, lambda: dict(counts))
    else:
        skipped = Skipped(command.skip, command.out / f"{command.name}.skipped.jsonl")
        shown: dict[str, Any] = {}
        if isinstance(command, Llava):
            shown = {"images": command.images, "frames": command.frames, "outside": command.outside}
        samples = readable(command.data, skipped, **shown)
        folder = prepare(
            command.name, command.out, counted(samples), metadata=lambda: counts | {"skipped": skipped.count}
        )
        if skipped.count:
            print(f"skipped {skipped.count} rows that cannot be read: {skipped.log}", file=sys.stderr)
    print(f"wrote {folder}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return folder


if __name__ == "__main__":
    with input_errors("prepare"):
        main(
            tyro.extras.subcommand_cli_from_dict(
                {"llava": Llava, "text": Text, "picturebook": Book}, description=__doc__
            )
        )
