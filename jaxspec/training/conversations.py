"""Make training batches of conversations, as a pure function of the step.

The conversations of a group of steps are sorted by length, so a batch is padded to the bucket of
its own longest one; or they are packed, several into a row. Those of a group that teach nothing are
left out: others take their places. Every process tokenises all conversations of a group, which
makes shapes equal everywhere, and decodes only the images of its own rows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxspec.data.images import Picture, to_rgb
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.loading.images import stack_tiles, tiles_of
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.loading.pairs import same_images
from jaxspec.models.inputs import TEXT, ImageInputs, PromptRows, Slots
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.rows import PromptRow, Showing, bucket, rewrite, stack_rows
from jaxspec.prompts.views import VIEWS, View
from jaxspec.training.packing import joined, lay_out, rounded, stacked
from jaxspec.typing import Bool, Int, UInt

GROUP = 8
"""Steps whose samples are sorted together."""
PARTS = 16
"""The slots of packed rows are multiples of 1 / PARTS of the longest conversation's, and their
tiles of 1 / PARTS of an average row's, so that few shapes are compiled."""
TRIED = 512
"""Rows that may teach nothing one after another."""


class TeacherRows(struct.PyTreeNode):
    """Hold the conversations of a batch as a teacher reads them."""

    rows: PromptRows
    images: dict[str, Any] | None
    """The teacher's image inputs; None where it reads the draft's."""
    before: Int[Any, "B L"]
    """The teacher's slot that predicts what follows the draft's slot t."""


class ConversationBatch(struct.PyTreeNode):
    """Hold the conversations of a step: numpy arrays when made, JAX arrays in the step."""

    rows: PromptRows
    """Rows in the draft's view, cut at the largest bucket."""
    mask: Bool[Any, "B L"]
    """The assistant's tokens."""
    images: dict[str, Any]
    """The tower's inputs [B,U,...], as in `ImageInputs`; empty for a batch without images."""
    numbers: UInt[Any, " B"]
    """Numbers of the rows in the whole training, to seed draws."""
    teacher: TeacherRows | None = None
    answers: Int[Any, "B K"] | None = None
    """Slots before the assistant's tokens, the only ones to score; -1 pads. None with a teacher."""

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.rows.tokens

    @property
    def filled(self) -> tuple[Int[Any, ""], int]:
        """Return the slots that hold a token, and all slots."""
        return self.rows.length.sum(), self.tokens.size


@dataclass(frozen=True, eq=False)
class ConversationBatches:
    """Make this process's rows of a step's batch, as a function of the step.

    Raises InputError where `TRIED` rows in turn teach nothing.
    """

    samples: Any
    """Samples by their index in the endless training order, as from `mixture`."""
    encoder: PromptEncoder
    """Encoder of the target, also for text drafts."""
    model: LoadedModel
    """Model that reads the images; its parameters are not used."""
    batch: int
    """Conversations of a step in all processes; of packed ones, on average."""
    buckets: tuple[int, ...]
    """Buckets of row lengths."""
    tile_buckets: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    """Buckets of the most image tiles of a row."""
    view: View = VIEWS["M"]
    """View in which drafting will show prompts."""
    target_images: ImageInputs | None = None
    """Reader of the target's images, whose slots view T-slots counts."""
    plain: bool = False
    """Leave out questions and roles: only images and captions stay (LLaVA's first stage)."""
    teacher: LoadedModel | None = None
    """Model whose distributions are learned. It reads view M."""
    seed: int = 0
    process: tuple[int, int] = (0, 1)
    """(i, n): this process takes the i-th of n equal parts of the rows."""
    packing: bool = False
    """Lay several conversations into a row, see `packing.py`."""

    def __call__(self, step: int) -> ConversationBatch:
        """Return this process's rows of a step, with images, and the same rows for the teacher."""
        (rows, alike), local = self._rows(step), self._own_rows()
        pictures = [
            [[to_rgb(image) for image in talk.images] for talk in row] for row in rows[local]
        ]
        prompts, images = self._stack(rows, alike, 0, self.model, self.view, pictures)
        mask = np.zeros((len(rows), prompts.tokens.shape[1]), bool)
        for i, row in enumerate(rows):
            for talk, (start, *_) in zip(row, _first_slots(row), strict=True):
                mask[i, start + talk.forms[0].places[talk.learned]] = True
                mask[i, start] &= not self.packing  # what is before is another conversation
        numbers = np.arange(step * self.rows, (step + 1) * self.rows, dtype=np.uint32)
        width = mask.shape[1]
        taught = self.teacher and self._taught_by(self.teacher, rows, alike, width, pictures)
        answers = None if self.teacher else slots_before(mask)[local]
        return ConversationBatch(prompts, mask[local], images, numbers[local], taught, answers)

    @property
    def rows(self) -> int:
        """Return the rows of a step in all processes."""
        return _shape(self)[0] if self.packing else self.batch

    def slot_images(self, step: int) -> list[np.ndarray]:
        """Return which image each slot of this process's rows shows, -1 for text, not padded."""
        rows = self._rows(step)[0][self._own_rows()]
        return [joined([talk.forms[0].part for talk in row]).images for row in rows]

    def unlearned(self, step: int) -> int:
        """Count the conversations of a step that stand in for rows that teach nothing."""
        return sum(talk.replaces for row in self._rows(step)[0] for talk in row)

    def filled(self, step: int) -> tuple[int, int]:
        """Return the filled slots of a step's rows, in all processes, and its slots."""
        rows, alike = self._rows(step)
        width, _ = self._sizes(alike, 0)
        return sum(_size(row, 0)[0] for row in rows), width * len(rows)

    def _rows(self, step: int) -> tuple[list[_Row], list[_Row]]:
        """Return the rows of a step, of all processes, and those that are padded like them."""
        number, offset = divmod(step, GROUP)
        with _GROUPING:  # so that threads make a group once
            group = _group(self, number)
        order = np.random.default_rng((self.seed, number)).permutation(GROUP)
        rows = group[order[offset] * self.rows :][: self.rows]
        return rows, group if self.packing else rows

    def _own_rows(self) -> slice:
        (part, parts), count = self.process, self.rows
        return slice(part * count // parts, (part + 1) * count // parts)

    def _sizes(self, alike: Sequence[_Row], form: int) -> tuple[int, int]:
        """Return the slots and the image tiles that each row is padded to."""
        slots, tiles = map(max, zip(*(_size(row, form) for row in alike), strict=True))
        if self.packing:
            _, (of_slots, of_tiles) = _shape(self)
            return rounded(slots, of_slots), rounded(tiles, of_tiles)
        width = bucket(slots, self.buckets, "training row")
        return width, bucket(tiles, self.tile_buckets, "image tiles of a training row")

    def _taught_by(
        self,
        teacher: LoadedModel,
        rows: Sequence[_Row],
        alike: Sequence[_Row],
        width: int,
        pictures: list[Any],
    ) -> TeacherRows:
        """Return this process's rows in the teacher's form."""
        local = rows[self._own_rows()]
        before = np.zeros((len(local), width), np.int32)
        for i, row in enumerate(local):
            for talk, starts in zip(row, _first_slots(row), strict=True):
                draft_slots, teacher_slots = (
                    start + form.places[talk.learned] - 1
                    for start, form in zip(starts, talk.forms, strict=True)
                )
                before[i, draft_slots] = teacher_slots
        shows = self.view.reads_images and self.view.pixels is None
        shared = shows and same_images(teacher, self.model)
        own_pictures = () if shared else pictures
        prompts, images = self._stack(rows, alike, 1, teacher, VIEWS["M"], own_pictures)
        return TeacherRows(prompts, None if shared else images, before)

    def _stack(
        self,
        rows: Sequence[_Row],
        alike: Sequence[_Row],
        form: int,
        model: LoadedModel,
        view: View,
        pictures: Sequence[Any],
    ) -> tuple[PromptRows, dict[str, Any]]:
        """Return this process's rows in one form, in the shapes of all rows, and their images."""
        width, tiles = self._sizes(alike, form)
        parts = [[talk.forms[form].part for talk in row] for row in rows]
        if self.packing:
            whole = stacked(parts, width, model.model.mrope)
        else:
            whole = stack_rows([row for ((row, _),) in parts], width)
        tiles *= view.reads_images and model.images is not None
        if tiles and whole.sources is None:  # so that rows without images share the program
            blended = model.model.blended(view.pool)
            sources = np.full((len(parts), width, blended), TEXT, np.int32)
            whole = whole.replace(
                sources=sources, blend=np.zeros(sources.shape, np.float32) if blended > 1 else None
            )
        images = {}
        if tiles and pictures:
            reader, change = model.images, view.pixels
            read = [[x for talk in row for x in tiles_of(reader, talk, change)] for row in pictures]
            images = stack_tiles(model, read, tiles)
        return jax.tree.map(lambda values: values[self._own_rows()], whole), images


def slots_before(mask: Bool[np.ndarray, "B L"]) -> Int[np.ndarray, "B K"]:
    """Return the slots before the masked ones, -1 where a row has fewer.

    K is a quarter, half or all of L, so that few programs serve all batches.
    """
    rows = [np.flatnonzero(row[1:]) for row in mask]
    most, width = max(len(row) for row in rows), mask.shape[1]
    count = bucket(most, (-(-width // 4), -(-width // 2), width), "answers")
    return np.stack(
        [np.pad(row, (0, count - len(row)), constant_values=-1) for row in rows]
    ).astype(np.int32)


@dataclass(frozen=True)
class _Form:
    """Hold a conversation as one model reads it."""

    row: PromptRow
    places: np.ndarray
    """First slot of each of the conversation's tokens, int32."""
    tiles: int
    features: int
    """Feature rows of its images."""

    @property
    def part(self) -> tuple[PromptRow, int]:
        return self.row, self.features


@dataclass(frozen=True)
class _Conversation:
    forms: tuple[_Form, ...]
    """The draft's form, and the teacher's if there is one."""
    learned: np.ndarray
    """Tokens of the assistant within the buckets."""
    images: tuple[Any, ...]
    first: int
    """Tokens up to the first one of an answer."""
    replaces: bool = False
    """Whether it takes the place of one that teaches nothing within the buckets."""


_Row = tuple[_Conversation, ...]


def _size(row: _Row, form: int) -> tuple[int, int]:
    """Return the slots and the image tiles of a row."""
    forms = [talk.forms[form] for talk in row]
    return sum(len(each.row) for each in forms), sum(each.tiles for each in forms)


def _first_slots(row: _Row) -> list[tuple[int, ...]]:
    """Return the first slot of each conversation of a row in each form."""
    lengths = np.asarray([[len(form.row) for form in talk.forms] for talk in row])
    return [tuple(starts) for starts in np.cumsum(lengths, axis=0) - lengths]


_GROUPING = threading.Lock()


@lru_cache(maxsize=2)
def _group(batches: ConversationBatches, group: int) -> list[_Row]:
    """Return all rows of a group of steps: conversations sorted by length, or packed."""
    talks = _conversations(batches, group)
    if not batches.packing:
        return [(talk,) for talk in talks]
    rows, units = _shape(batches)
    layout = lay_out(_lengths(talks), GROUP * rows, units)
    packed = [tuple(talks[i] for i in row) for row in layout]
    order = np.random.default_rng((batches.seed, group)).permutation(len(packed))
    return [packed[i] for i in order]


@lru_cache(maxsize=2)
def _shape(batches: ConversationBatches) -> tuple[int, tuple[int, int]]:
    """Return the number of packed rows of a step, and the divisors of a row's slots and tiles.

    They depend on the first group, not on the mesh. A row has at least the slots of the longest
    conversation, and less than twice as many.
    """
    sizes = _lengths(_conversations(batches, 0))
    rows, longest, (slots, tiles) = batches.batch, int(sizes[:, 0].max()), sizes.sum(0)
    while rows % 2 == 0 and slots < GROUP * rows * longest:
        rows //= 2
    return rows, (8 * -(-longest // (8 * PARTS)), max(-(-int(tiles) // (GROUP * rows * PARTS)), 1))


def _lengths(talks: Sequence[_Conversation]) -> Int[np.ndarray, "N two"]:
    """Return the slots and the image tiles of conversations, in the form with the most."""
    sizes = [(max(len(form.row), 1), form.tiles) for talk in talks for form in talk.forms]
    return np.asarray(sizes).reshape(len(talks), -1, 2).max(1)


def _conversations(batches: ConversationBatches, group: int) -> list[_Conversation]:
    """Return all conversations of a group of steps, sorted by length.

    Those that teach replace the others by turns; where none does, those of a later group.
    """
    count = GROUP * batches.batch
    rows: list[_Conversation] = []
    teaching: list[_Conversation] = []
    while not teaching:
        if len(rows) >= TRIED:
            tokens, tiles = max(batches.buckets), max(batches.tile_buckets)
            raise InputError(
                f"data: {len(rows)} rows in turn have no answer within {tokens} tokens, or over "
                f"{tiles} image tiles; give longer --buckets, or show fewer images"
            )
        first = group * count + len(rows)
        rows += _read(batches, [batches.samples[first + i] for i in range(count)])
        teaching = [row for row in rows if len(row.learned)]
    spare = (replace(row, replaces=True) for row in cycle(teaching))
    taught = [row if len(row.learned) else next(spare) for row in rows[:count]]
    return sorted(taught, key=lambda row: len(row.forms[0].row))


def _read(batches: ConversationBatches, samples: Sequence[Sample]) -> list[_Conversation]:
    conversations = [_caption(each) if batches.plain else each.messages for each in samples]
    encoded = batches.encoder.dialogues(conversations)
    return [_talk_of(batches, sample, *pair) for sample, pair in zip(samples, encoded, strict=True)]


def _caption(sample: Sample) -> tuple[Message, ...]:
    """Return a sample's images and its first answer."""
    images = Message("user", (None,) * len(sample.images), sample.images)
    return images, Message("assistant", (sample.turns[0][1],))


def _talk_of(
    batches: ConversationBatches, sample: Sample, tokens: np.ndarray, mask: np.ndarray
) -> _Conversation:
    """Return a sample as each model reads it; nothing is learned of one with too many tiles."""
    readers = [(batches.model, batches.view)]
    readers += [(batches.teacher, VIEWS["M"])] if batches.teacher else []
    sizes = [(picture.height, picture.width) for picture in map(Picture.of, sample.images)]
    forms = tuple(_as_form(batches, *reader, tokens, sizes) for reader in readers)
    within = np.logical_and.reduce([form.places < max(batches.buckets) for form in forms])
    first = max(int(form.places[mask.argmax()]) for form in forms)
    if max(form.tiles for form in forms) > max(batches.tile_buckets):
        forms, within = tuple(replace(form, tiles=0) for form in forms), np.zeros_like(mask)
    images = sample.images if any(form.tiles for form in forms) else ()
    return _Conversation(forms, np.flatnonzero(mask & within), images, first + 1)


def _as_form(
    batches: ConversationBatches,
    model: LoadedModel,
    view: View,
    tokens: np.ndarray,
    sizes: list[tuple[int, int]],
) -> _Form:
    """Return a conversation as a view shows it to a model, cut at the largest bucket."""
    encoder, count = batches.encoder, len(sizes)
    reader = model.images if view.reads_images else None
    showing = Showing(view, encoder, reader, batches.target_images)
    images = [showing(size, count) for size in sizes]
    row, limit = rewrite(tokens, encoder.image_token, images), max(batches.buckets)
    copies = np.ones(len(tokens), np.int32)
    copies[tokens == encoder.image_token] = [
        len(x.sources) if isinstance(x, Slots) else len(x) for x in images
    ]
    tiles = sum(reader.tiles(size, count) for size in sizes) if reader else 0
    features = sum(x.rows for x in images if isinstance(x, Slots))
    return _Form(row[:limit], np.cumsum(copies) - copies, tiles, features)


def reach(model: LoadedModel, samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return (tokens up to an answer's first, tokens in all) of each conversation."""
    whole = (sys.maxsize,)
    batches = ConversationBatches(samples, prompt_encoder(model), model, len(samples), whole, whole)
    return [(row.first, len(row.forms[0].row)) for row in _read(batches, samples)]
