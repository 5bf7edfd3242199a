"""Make training batches of conversations, as a pure function of the step.

The samples of a group of steps are sorted by length, so a batch is padded to the bucket of its own
longest row. Rows of a group that teach nothing are left out: those that do take their places. Every
process tokenises all rows of a group, which makes shapes equal everywhere, and decodes only the
images of its own rows.
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
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.data.images import Picture, to_rgb
from jaxspec.data.samples import Sample
from jaxspec.engine.memory import prompt_zeros
from jaxspec.errors import InputError
from jaxspec.loading.images import image_inputs
from jaxspec.loading.models import LoadedModel, prompt_encoder
from jaxspec.loading.pairs import same_images
from jaxspec.models.families import image_zeros
from jaxspec.models.inputs import TEXT, ImageInputs, PromptRows, Slots
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.rows import PromptRow, Showing, bucket, rewrite, stack_rows
from jaxspec.prompts.views import VIEWS, View
from jaxspec.typing import Bool, Int, UInt

GROUP = 8
"""Steps whose samples are sorted together."""
TRIED = 512
"""Rows in turn that may teach nothing, whatever share of rows may."""


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

    @classmethod
    def zeros(
        cls, draft: LanguageModel, target: LanguageModel, batch: int, length: int, shared: bool
    ) -> ConversationBatch:
        """Return blank rows of one image each for a draft that a target teaches, for `eval_shape`.

        Args:
          shared: Whether target and draft read the same image inputs.
        """
        rows, read = (
            prompt_zeros(m, None, batch, length, m.has_vision, m.has_vision and m.mrope)
            for m in (draft, target)
        )
        separate = not shared and target.has_vision
        images = image_zeros(target.config, batch, 1) if separate else None
        return cls(
            rows,
            rows.tokens > 0,
            image_zeros(draft.config, batch, 1),
            rows.length.astype(jnp.uint32),
            TeacherRows(read, images, rows.tokens),
        )


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
    """Rows of a step in all processes."""
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

    def __call__(self, step: int) -> ConversationBatch:
        rows, local = self._rows(step), self._own
        pictures = [[to_rgb(image) for image in row.images] for row in rows[local]]
        prompts, tiles = self._stack([row.forms[0] for row in rows], self.model, self.view)
        mask = np.zeros((len(rows), prompts.tokens.shape[1]), bool)
        for i, row in enumerate(rows):
            mask[i, row.forms[0].places[row.learned]] = True
        images = image_inputs(self.model, pictures, tiles, changes=(self.view.pixels,)) or {}
        numbers = np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.uint32)
        width = prompts.tokens.shape[1]
        taught = self.teacher and self._taught(self.teacher, rows, width, pictures)
        answers = None if self.teacher else slots_before(mask)[local]
        return ConversationBatch(prompts, mask[local], images, numbers[local], taught, answers)

    def shown(self, step: int) -> list[np.ndarray]:
        """Return which image each slot of this process's rows shows, -1 for text, not padded."""
        return [row.forms[0].row.images for row in self._rows(step)[self._own]]

    def unlearned(self, step: int) -> int:
        """Count the rows of a step, in all processes, that replace rows which teach nothing."""
        return sum(row.replaces for row in self._rows(step))

    def filled(self, step: int) -> tuple[int, int]:
        """Return the filled slots of a step's rows, in all processes, and its slots."""
        lengths = [len(row.forms[0].row) for row in self._rows(step)]
        width = bucket(max(lengths), self.buckets, "training row")
        return sum(lengths), width * len(lengths)

    def _rows(self, step: int) -> list[_TrainingRow]:
        """Return the rows of a step, of all processes."""
        group, offset = divmod(step, GROUP)
        with _GROUPING:  # so that threads make a group once
            rows = _group(self, group)
        order = np.random.default_rng((self.seed, group)).permutation(GROUP)
        return rows[order[offset] * self.batch :][: self.batch]

    @property
    def _own(self) -> slice:
        part, parts = self.process
        return slice(part * self.batch // parts, (part + 1) * self.batch // parts)

    def _taught(
        self, teacher: LoadedModel, rows: list[_TrainingRow], width: int, pictures: list[list[Any]]
    ) -> TeacherRows:
        local = rows[self._own]
        before = np.zeros((len(local), width), np.int32)
        for i, row in enumerate(local):
            draft_slots, teacher_slots = (form.places[row.learned] - 1 for form in row.forms)
            before[i, draft_slots] = teacher_slots
        prompts, tiles = self._stack([row.forms[1] for row in rows], teacher, VIEWS["M"])
        shows = self.view.reads_images and self.view.pixels is None
        shared = shows and same_images(teacher, self.model)
        return TeacherRows(
            prompts, None if shared else image_inputs(teacher, pictures, tiles) or {}, before
        )

    def _stack(self, forms: list[_Form], model: LoadedModel, view: View) -> tuple[PromptRows, int]:
        """Return this process's rows, in the shapes of all rows, and the bucket of image tiles."""
        width = bucket(max(len(form.row) for form in forms), self.buckets, "training row")
        most = max(form.tiles for form in forms)
        tiles = 0
        if view.reads_images:
            tiles = bucket(most, self.tile_buckets, "image tiles of a training row")
        (rows,) = stack_rows([[form.row for form in forms]], width)
        if tiles and rows.sources is None:  # so that rows without images share the program
            blended = model.model.blended(view.pool)
            sources = np.full((len(forms), width, blended), TEXT, np.int32)
            rows = rows.replace(
                sources=sources, blend=np.zeros(sources.shape, np.float32) if blended > 1 else None
            )
        return jax.tree.map(lambda values: values[self._own], rows), tiles


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


@dataclass(frozen=True)
class _TrainingRow:
    forms: tuple[_Form, ...]
    """The draft's form, and the teacher's if there is one."""
    learned: np.ndarray
    """Tokens of the assistant within the buckets."""
    images: tuple[Any, ...]
    first: int
    """Tokens up to the first one of an answer."""
    replaces: bool = False
    """Whether it takes the place of a row without an answer, or with too many images, in the
    buckets.
    """


_GROUPING = threading.Lock()


@lru_cache(maxsize=2)
def _group(batches: ConversationBatches, group: int) -> list[_TrainingRow]:
    """Return all rows of a group of steps, sorted by length.

    The rows that teach replace the others by turns; where none does, those of a later group.
    """
    count = GROUP * batches.batch
    rows: list[_TrainingRow] = []
    teaching: list[_TrainingRow] = []
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


def _read(batches: ConversationBatches, samples: Sequence[Sample]) -> list[_TrainingRow]:
    conversations = [sample.messages for sample in samples]
    if batches.plain:
        conversations = [_caption(sample) for sample in samples]
    encoded = batches.encoder.dialogues(conversations)
    return [_row(batches, sample, *pair) for sample, pair in zip(samples, encoded, strict=True)]


def _caption(sample: Sample) -> tuple[Message, ...]:
    """Return a sample's images and its first answer."""
    images = Message("user", (None,) * len(sample.images), sample.images)
    return images, Message("assistant", (sample.turns[0][1],))


def _row(
    batches: ConversationBatches, sample: Sample, tokens: np.ndarray, mask: np.ndarray
) -> _TrainingRow:
    readers = [(batches.model, batches.view)]
    readers += [(batches.teacher, VIEWS["M"])] if batches.teacher else []
    sizes = [(picture.height, picture.width) for picture in map(Picture.of, sample.images)]
    forms = tuple(_form(batches, *reader, tokens, sizes) for reader in readers)
    within = np.logical_and.reduce([form.places < max(batches.buckets) for form in forms])
    first = max(int(form.places[mask.argmax()]) for form in forms)
    if max(form.tiles for form in forms) > max(batches.tile_buckets):
        forms, within = tuple(replace(form, tiles=0) for form in forms), np.zeros_like(mask)
    images = sample.images if any(form.tiles for form in forms) else ()
    return _TrainingRow(forms, np.flatnonzero(mask & within), images, first + 1)


def _form(
    batches: ConversationBatches,
    model: LoadedModel,
    view: View,
    tokens: np.ndarray,
    sizes: list[tuple[int, int]],
) -> _Form:
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
    return _Form(row[:limit], np.cumsum(copies) - copies, tiles)


def reach(model: LoadedModel, samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return (tokens up to an answer's first, tokens in all) of each conversation."""
    whole = (sys.maxsize,)
    batches = ConversationBatches(samples, prompt_encoder(model), model, len(samples), whole, whole)
    return [(row.first, len(row.forms[0].row)) for row in _read(batches, samples)]


def frequent_tokens(
    encoder: PromptEncoder, samples: Any, count: int, ends: Sequence[int]
) -> Int[np.ndarray, " V"]:
    """Return all tokens, the assistant's most frequent ones in `count` samples first, ties by id.

    Tokens that end its answers come before all others.
    """
    written = np.zeros(len(encoder.tokenizer), np.int64)
    for start in range(0, count, GROUP):
        chunk = [samples[i].messages for i in range(start, min(start + GROUP, count))]
        for tokens, mask in encoder.dialogues(chunk):
            counts = np.bincount(tokens[mask])
            written = np.pad(written, (0, max(len(counts) - len(written), 0)))
            written[: len(counts)] += counts
    written[[*ends]] = np.iinfo(np.int64).max
    return np.argsort(-written, kind="stable")
