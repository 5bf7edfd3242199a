"""Make rows of prompts: a view's slots or ids replace each image's placeholder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from jaxspec.errors import InputError
from jaxspec.models.inputs import TEXT, ImageInputs, PromptRows, Size, Slots
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.views import View


@dataclass(frozen=True)
class PromptRow:
    """Hold one prompt in one form, on the host; `PromptRows` is a batch of them."""

    tokens: np.ndarray
    """Token ids, int32 [L]."""
    sources: np.ndarray | None = None
    """Feature rows that each slot shows, int32 [L, blended]; None without images."""
    blend: np.ndarray | None = None
    """Weights of these feature rows, float32 [L, blended]; None shows one row in each slot."""
    rotary: np.ndarray | None = None
    """Rotary positions on three axes, int32 [3, L]; None where they equal the slots."""
    image: np.ndarray | None = None
    """Index of the image that each slot shows, -1 for text, int32 [L]; None without images."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, slots: slice) -> PromptRow:
        """Return a part of the row."""
        rotary = None if self.rotary is None else self.rotary[:, slots]
        sources = None if self.sources is None else self.sources[slots]
        blend = None if self.blend is None else self.blend[slots]
        image = None if self.image is None else self.image[slots]
        return PromptRow(self.tokens[slots], sources, blend, rotary, image)

    @property
    def positions(self) -> np.ndarray:
        """Return the rotary positions, int32 [3, L]; the slots where `rotary` is None."""
        slots = np.arange(len(self), dtype=np.int32)
        return np.tile(slots, (3, 1)) if self.rotary is None else self.rotary

    @property
    def shift(self) -> int:
        """Return the rotary position minus the slot of a token after the row."""
        return int(self.positions.max(initial=-1)) + 1 - len(self)

    @property
    def images(self) -> np.ndarray:
        """Return the index of the image that each slot shows, -1 for text, int32 [L]."""
        return np.full(len(self), -1, np.int32) if self.image is None else self.image

    def followed_by(self, tokens: Sequence[int]) -> PromptRow:
        """Return the row with more text after it."""
        return concatenated([self, PromptRow(np.asarray(tokens, np.int32))])


def concatenated(parts: Sequence[PromptRow], anew: bool = False) -> PromptRow:
    """Return the rows joined. Each row's positions begin after the largest of the row before.

    A slot of text has the source TEXT and three equal rotary positions: after an image at the
    positions 1 to 4, two tokens take 5 and 6.

    anew: Whether each row's positions begin at 0 instead.
    """

    def column(name: str, text: np.ndarray) -> np.ndarray | None:
        """Return a field of all parts; a part without it repeats the value of a text slot."""
        columns = [getattr(part, name) for part in parts]
        if all(x is None for x in columns):
            return None
        return np.concatenate(
            [text.repeat(len(p), axis=0) if x is None else x for p, x in zip(parts, columns)]
        )

    width = max(0 if part.sources is None else part.sources.shape[1] for part in parts)
    rotary = None
    if any(part.rotary is not None for part in parts):
        spans = [0 if anew else len(part) + part.shift for part in parts]
        starts = accumulate(spans, initial=0)
        rotary = np.concatenate([a + part.positions for a, part in zip(starts, parts)], axis=1)
    sources = column("sources", np.full((1, width), TEXT, np.int32))
    blend = column("blend", np.eye(1, width, dtype=np.float32))
    image = column("image", np.full(1, -1, np.int32))
    return PromptRow(np.concatenate([part.tokens for part in parts]), sources, blend, rotary, image)


def same_slots(first: PromptRow, second: PromptRow) -> int:
    """Return how many slots at the start of two rows show the same tokens and images.

    An image counts as a whole: its tower may read it differently where only its last slots differ.
    """
    count = min(len(first), len(second))
    first, second = first[:count], second[:count]
    same = (first.tokens == second.tokens) & (first.positions == second.positions).all(0)
    pair = concatenated([first, second])
    for part in (pair.sources, pair.blend):
        if part is not None:
            same &= (part[:count] == part[count:]).all(1)
    common = count if same.all() else int(np.argmin(same))
    while 0 < common < count and pair.sources is not None and pair.sources[common - 1, 0] != TEXT:
        common -= 1
    return common


def rewrite(
    tokens: np.ndarray,
    image_token: int | None,
    images: Sequence[Slots | Sequence[int]],
    before: int = 0,
) -> PromptRow:
    """Return the prompt with its i-th placeholder replaced by `images[i]`: image slots or ids.

    [1, 99, 5] with the placeholder 99 and the ids [7, 8] becomes [1, 7, 8, 5].

    before: Number of times that the table holds features of all images before those to show.
    """
    marks = np.flatnonzero(tokens == image_token)
    if len(marks) != len(images):
        raise InputError(f"prompt: {len(marks)} image placeholders but {len(images)} images")
    start, *texts = np.split(np.asarray(tokens, np.int32), marks)
    parts = [PromptRow(start)]
    first = before * sum(image.rows for image in images if isinstance(image, Slots))
    for number, (image, text) in enumerate(zip(images, texts, strict=True)):
        if isinstance(image, Slots):  # the table holds the images' feature rows in their order
            sources = np.where(image.sources < 0, image.sources, image.sources + first)
            first += image.rows
            ids, numbers = (np.full(len(sources), x, np.int32) for x in (image_token, number))
            columns = sources.astype(np.int32), image.blend, image.positions, numbers
            parts.append(PromptRow(ids, *columns))
        else:
            parts.append(PromptRow(np.asarray(image, np.int32)))
        parts.append(PromptRow(text[1:]))
    return concatenated(parts)


@dataclass(frozen=True)
class Showing:
    """Choose how a model is shown the images of a prompt."""

    view: View
    encoder: PromptEncoder
    images: ImageInputs | None
    """Reader of the model's images; None for a text model."""
    target: ImageInputs | None
    """Reader of the target's images, whose slots view T-slots counts."""
    before: int = 0
    """Number of other changes of the images whose features precede this view's."""

    def __call__(self, size: Size, count: int, caption: str = "") -> Slots | list[int]:
        """Return the slots or ids for an image of this size, one of `count` in its prompt."""
        if self.view.reads_images:
            assert self.images is not None
            return self.images.slots(size, self.view.pool, count)
        slots = 1
        if self.view.counts_slots:
            assert self.target is not None
            slots = len(self.target.slots(size, None, count).sources)
        return self.view.substitute(self.encoder, caption, slots)


def prompt_row(showing: Showing, prompt: Prompt, captions: Sequence[str] = ()) -> PromptRow:
    """Return the prompt as a view shows it to a model.

    captions: Captions that view C shows, one for each image.
    Raises InputError for a prompt that has no tokens in this view.
    """
    view, encoder, count = showing.view, showing.encoder, len(prompt.images)
    texts = captions or ("",) * count
    images = [
        showing((image.height, image.width), count, text)
        for image, text in zip(prompt.images, texts, strict=True)
    ]
    row = rewrite(prompt.tokens, encoder.image_token, images, showing.before)
    if not len(row):
        raise InputError(f"prompt: has no tokens as view {view.name} shows it; say something")
    return row


def stack_rows(rows: Sequence[PromptRow], width: int, mrope: bool = False) -> PromptRows:
    """Return host arrays of prompts, right-padded to `width` slots.

    mrope: Whether to write rotary positions of three axes also if no row has any: a draft's views
      are one batch.
    """
    tokens, length = pad_rows([row.tokens for row in rows], width)
    sources = _pad([row.sources for row in rows], width, TEXT)
    blend = _pad([row.blend for row in rows], width, 0)
    rotary = shift = None
    if mrope or any(row.rotary is not None for row in rows):
        rotary = np.tile(np.arange(width, dtype=np.int32), (len(rows), 3, 1))
        for i, row in enumerate(rows):
            if row.rotary is not None:
                rotary[i, :, : len(row)] = row.rotary
        shift = np.asarray([row.shift for row in rows], np.int32)
    columns: Any = tokens, length, sources, blend, rotary, shift
    return PromptRows(*columns)


def part_of(row: PromptRow, start: int, width: int) -> PromptRows:
    """Return the slots of a row from `start` on, at most `width` and padded to so many."""
    rows = stack_rows([row[start : start + width]], width)
    if rows.rotary is None:
        return rows
    shift: Any = np.asarray([row.shift], np.int32)
    return rows.replace(shift=shift)


def image_spans(slot_images: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Return the first slot and the number of slots of each image, int32 [B, most, 2].

    slot_images: Index of the image in each slot of each row; -1 for text.
    """
    spans = np.zeros((len(slot_images), most, 2), np.int32)
    for row, images in enumerate(slot_images):
        for i in range(images.max(initial=-1) + 1):
            slots = np.flatnonzero(images == i)
            spans[row, i] = slots[0], len(slots)
    return spans


def _pad(rows: Sequence[np.ndarray | None], width: int, fill: int) -> np.ndarray | None:
    """Return [B, L, blended] of rows [l, blended], `fill` for None; None if all are None."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None
    out = np.full((len(rows), width, like.shape[1]), fill, like.dtype)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = row
    return out


def bucket(size: int, buckets: Sequence[int], what: str) -> int:
    """Return the smallest bucket that holds `size`; one compiled program serves each bucket."""
    for limit in sorted(buckets):
        if size <= limit:
            return limit
    raise InputError(f"{what}: {size} is over the largest bucket {max(buckets)}; give less")


def pad_rows(rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ragged int rows as [B, width], right-padded with zeros, and their lengths [B]."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, np.asarray([len(row) for row in rows], np.int32)
