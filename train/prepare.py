"""Prepare training data: ArrayRecord shards that training reads at random, written once.

    python -m train.prepare llava --data mix.json --images photos --name my_mix
    python -m train.prepare text --data chat.jsonl --name chat
    python -m train.prepare picturebook --samples 20000
    python -m train.prepare picturebook --kinds saga album --images 1 --name stories
    python -m train.prepare llava --data mix.json --name my_mix --target llava-hf/llava-1.5-7b-hf

Each goes to OUT/NAME. Rows and images that cannot be read are skipped, up to a limit, and listed in
OUT/NAME.skipped.jsonl. With --target a table shows how many rows fit in how many tokens.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.cli.options import parse_subcommand
from jaxspec.command import input_errors, script_name
from jaxspec.data.conversations import Skipped, readable
from jaxspec.data.prepared import FileFormat, prepare
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, check_counts, check_seed
from jaxspec.files import forget_trial, trial_of
from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.training.conversations import reach
from picturebook.training import Picturebook

OUT = Path("runs/data")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options of every kind of data."""

    target: str | None = None
    """Directory or hub id of a target, to show how many rows fit in how many of its tokens."""
    out: Path = OUT
    """Folder of prepared data sets."""
    file_format: FileFormat = "array_record"
    """Training reads array_record faster; `tfds.load` reads parquet too."""
    debug: bool = False
    """Try the command out on the first four samples, into runs/debug."""


@dataclass(frozen=True)
class Text(Output):
    """Text without images: JSONL or parquet of questions and answers, messages, or plain text."""

    data: Path
    """The file, or a folder of parquet or JSONL files; or hub:OWNER/NAME, a data set on the hub, or
    hub:OWNER/NAME/FILE."""
    name: str
    """Name of the prepared data set: lower-case words joined by _."""
    skip: int = 100
    """Rows that may be skipped because they cannot be read."""


@dataclass(frozen=True)
class Llava(Text):
    """Conversations about images: LLaVA's JSON, JSONL or parquet, and a folder of images."""

    images: Path | None = None
    """The folder that image paths start from; by default the file's own, or `images/` in it."""
    outside: bool = False
    """Take images outside of that folder, by `..` or absolute paths. Links are always followed."""
    frames: int = 8
    """Maximum frames of a video."""


@dataclass(frozen=True)
class Book(Output):
    """Picturebook's dialogues. Training can also draw them while it runs, unprepared."""

    samples: int = 20_000
    """Number of samples."""
    name: str = "picturebook"
    """Name of the prepared data set: lower-case words joined by _."""
    seed: int = 0
    """Seed of one of its endless splits."""
    kinds: tuple[str, ...] | None = None
    """Kinds of samples; all by default."""
    images: int | None = None
    """Maximum images of a sample; questions about the others stay. The default is all."""


def main(command: Llava | Text | Book) -> Path:
    """Prepare one data set and print its contents."""
    few = 4 if command.debug else None
    if few:
        command = replace(command, out=trial_of(command.out))
        forget_trial(command.out / command.name)
    counts = {"samples": 0, "images": 0, "answers": 0}
    reader = None if command.target is None else LoadedModel.without_weights(command.target)
    reached: list[tuple[int, int]] = []

    def counted(samples: Iterable[Sample]) -> Iterator[Sample]:
        rows = iter(samples)
        while chunk := list(islice(rows, 256)):
            for sample in chunk:
                counts["samples"] += 1
                counts["images"] += len(sample.images)
                counts["answers"] += len(sample.turns)
            reached.extend(reach(reader, chunk) if reader else ())
            yield from chunk

    if isinstance(command, Book):
        check_seed(command.seed)
        check_counts(samples=command.samples)
        if command.images is not None and command.images < 0:
            raise InputError(f"images: {command.images}; give 0 or more")
        number = min(command.samples, few or command.samples)
        samples = (
            with_few_images(sample, command.images)
            for sample in Picturebook(command.seed, command.kinds, number)
        )
        folder = prepare(
            command.name,
            command.out,
            counted(samples),
            number,
            lambda: dict(counts),
            command.file_format,
        )
    else:
        skipped = Skipped(command.skip, command.out / f"{command.name}.skipped.jsonl")
        extra: dict[str, Any] = {}
        if isinstance(command, Llava):
            extra = {"images": command.images, "frames": command.frames, "outside": command.outside}
        samples = islice(readable(command.data, skipped, **extra), few)
        folder = prepare(
            command.name,
            command.out,
            counted(samples),
            metadata=lambda: (
                counts | {"skipped": skipped.count} | ({"fits": _fits(reached)} if reached else {})
            ),
            file_format=command.file_format,
            lost=skipped.summary,
        )
        for line in skipped.lines():
            print(line, file=sys.stderr)
    print(f"wrote {folder}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if reached:
        print(f"in tokens of {command.target}, images as it reads them:\n{_fits(reached)}")
    return folder


def with_few_images(sample: Sample, most: int | None) -> Sample:
    """Return a sample with only its first images, at most `most`."""
    if most is None or len(sample.images) <= most:
        return sample
    marks = count(1)

    def fewer(question: str) -> str:
        return re.sub(
            rf"(?m)^{PLACEHOLDER}\n|{PLACEHOLDER}",
            lambda mark: mark[0] if next(marks) <= most else "",
            question,
        )

    turns = tuple((fewer(question), answer) for question, answer in sample.turns)
    return replace(sample, images=sample.images[:most], turns=turns)


def _fits(reached: Sequence[tuple[int, int]]) -> str:
    """Return a table of buckets: rows with an answer within, and rows that fit whole."""
    first, whole = (np.asarray(column) for column in zip(*reached, strict=True))
    lengths = [size for i in range(4, 40) for size in (2**i, 3 * 2 ** (i - 1))]
    sizes = [
        size
        for i, size in enumerate(lengths)
        if first.min() <= size and (i == 0 or lengths[i - 1] < whole.max())
    ]
    lines = [
        f"{size:>8,} {(first <= size).sum():>16,} {(whole <= size).sum():>12,}" for size in sizes
    ]
    return "\n".join([f"{'bucket':>8} {'rows that teach':>16} {'whole rows':>12}", *lines])


if __name__ == "__main__":
    with input_errors(script_name()):
        kinds = {"llava": Llava, "text": Text, "picturebook": Book}
        main(parse_subcommand(kinds, sys.argv[1:], "python -m train.prepare", __doc__))
