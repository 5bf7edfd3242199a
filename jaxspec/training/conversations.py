"""Training batches from conversations, as a pure function of the step; and a checkpointable iterator over them.

Samples of a group of steps are sorted by length, so that a batch is padded to the bucket of its own longest row and
not to that of the longest row there is. Every process tokenises the rows of a whole group and so agrees on the shapes
with all others without a word; it decodes the images of its own rows alone.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import grain
import numpy as np
from absl import flags

from jaxspec.data.images import StoredImage, to_rgb
from jaxspec.data.prompts import PLACEHOLDER, PromptEncoder, bucket
from jaxspec.data.samples import Sample
from jaxspec.decoding.loading import LoadedModel, image_inputs, same_images
from jaxspec.decoding.requests import prompt_encoder
from jaxspec.decoding.views import VIEWS, Row, View, rewrite, stack_rows, which_image
from jaxspec.errors import InputError
from jaxspec.models.inputs import TEXT, Slots
from jaxspec.training.batches import Batch
from jaxspec.training.unlearned import CountedBatches, Unlearned

GROUP = 8
"""Steps whose samples are sorted together."""
TEACHER = "teacher/"
"""Stands before the names of what a teacher reads."""


@dataclass(frozen=True, eq=False)
class ConversationBatches:
    """Calling it with a step gives this process's rows of that step's batch as numpy arrays:

    tokens [B,L], mask [B,L] of what the assistant wrote, length [B]; with images also sources and blend [B,L,K] and
    the tower's inputs [B,U,...], as in `PromptRows` and `ImageInputs`. Rows are cut at the largest bucket; what has no
    answer left then, or more image units than their largest, counts nothing and is one of the step's `unlearned`.

    With a `teacher`, also the same conversations as it reads them, named alike after `teacher/`, and `before` [B,L]:
    the slot of its row at which it tells what comes after slot t of the draft's. Its images are left out where they
    are the draft's. And `seed` [B], for what is drawn in the step.

    Raises InputError for a sample without answers, and for a batch of which the buckets leave none.
    """

    samples: Any
    """Random access: sample i of the endless training order, as `mixture` gives it."""
    encoder: PromptEncoder
    """The target's: a text draft reads its prompts too."""
    model: LoadedModel
    """Whose images are read; its parameters are not."""
    batch: int
    """Rows of a step, over all processes."""
    buckets: tuple[int, ...]
    """Buckets of row lengths."""
    units: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    """Buckets of the most image units of one row."""
    view: View = VIEWS["M"]
    """How conversations are shown: as drafting will show them."""
    plain: bool = False
    """Without questions and roles, images and what is said of them alone (LLaVA's first stage)."""
    teacher: LoadedModel | None = None
    """Whose distributions are to be learned. It reads view M."""
    seed: int = 0
    process: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal parts of the rows are this process's."""

    def __post_init__(self) -> None:
        if self.batch % self.process[1]:
            raise InputError(f"batch: {self.batch} rows over {self.process[1]} processes; give a multiple of these")

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        rows, own = self._rows(step)
        pictures = [[to_rgb(image) for image in row.images] for row in rows[own]]
        out = self._read(self.model, self.view, [row.forms[0] for row in rows], own, pictures)
        mask = np.zeros((len(rows), out["tokens"].shape[1]), bool)
        for i, row in enumerate(rows):
            mask[i, row.forms[0].places[row.learned]] = True
        if not mask.any():
            limit = max(self.buckets)
            raise InputError(f"training step {step}: no row has an answer within {limit} tokens; give longer --buckets")
        out["mask"] = mask[own]
        return out | (self._taught(step, rows, own, pictures, out) if self.teacher else {})

    def numbers(self, step: int) -> np.ndarray:
        """uint32 [B]: which rows of the whole training this process's rows of a step are; seeds of what is drawn."""
        return np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.uint32)[self._own()]

    def shown(self, step: int) -> list[np.ndarray]:
        """Return, for this process's rows of a step, not padded, which of its images each slot shows, -1 for text."""
        rows, own = self._rows(step)
        return [row.forms[0].shown for row in rows[own]]

    def unlearned(self, step: int) -> list[Unlearned]:
        """The rows of a step, of all processes, of which nothing is learned."""
        return [row.name for row in self._rows(step)[0] if not len(row.learned)]

    def _rows(self, step: int) -> tuple[list[_TrainingRow], slice]:
        """The rows of a step, and which of them are this process's."""
        group, place = divmod(step, GROUP)
        with _GROUPING:  # threads that ask for the same group make it once
            rows = _group(self, group)
        order = np.random.default_rng((self.seed, group)).permutation(GROUP)
        return rows[order[place] * self.batch :][: self.batch], self._own()

    def _own(self) -> slice:
        part, parts = self.process
        return slice(part * self.batch // parts, (part + 1) * self.batch // parts)

    def _taught(
        self, step: int, rows: list[_TrainingRow], own: slice, pictures: list[list[Any]], read: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        assert self.teacher is not None
        before = np.zeros(read["tokens"].shape, np.int32)
        for i, row in enumerate(rows[own]):
            mine, theirs = (form.places[row.learned] - 1 for form in row.forms)
            before[i, mine] = theirs
        shown = None if self.view.reads_images and same_images(self.teacher, self.model) else pictures
        taught = self._read(self.teacher, VIEWS["M"], [row.forms[1] for row in rows], own, shown)
        drawn = {"before": before, "seed": self.numbers(step)}
        return drawn | {f"{TEACHER}{name}": value for name, value in taught.items()}

    def _read(
        self, model: LoadedModel, view: View, forms: list[_Form], own: slice, pictures: list[list[Any]] | None
    ) -> dict[str, np.ndarray]:
        """The fields of `PromptRows` of this process's rows, and their images. Shapes are those of all rows."""
        width = bucket(max(len(form.row) for form in forms), self.buckets, "training row")
        most = max(form.units for form in forms)
        units = bucket(most, self.units, "image units of a training row") if view.reads_images else 0
        fields = vars(stack_rows([[form.row] for form in forms], width)[0])
        if units and fields["sources"] is None:  # a batch without images is no program of its own
            blended = model.model.blended(view.pool)
            fields["sources"] = np.full((len(forms), width, blended), TEXT, np.int32)
            fields["blend"] = np.zeros(fields["sources"].shape, np.float32) if blended > 1 else None
        images = None if pictures is None else image_inputs(model, pictures, units)
        return {name: value[own] for name, value in fields.items() if value is not None} | (images or {})


@dataclass(frozen=True)
class _Form:
    """A conversation as one model reads it."""

    row: Row
    shown: np.ndarray
    """Which image each slot shows, -1 for text."""
    places: np.ndarray
    """int32: the (first) slot of each of the conversation's tokens."""
    units: int


@dataclass(frozen=True)
class _TrainingRow:
    forms: tuple[_Form, ...]
    """The draft's, and the teacher's if there is one."""
    learned: np.ndarray
    """The conversation's tokens that the assistant wrote and that lie within the buckets."""
    images: tuple[Any, ...]
    name: Unlearned
    """Who it is where nothing is learned."""


_GROUPING = threading.Lock()


@lru_cache(maxsize=2)
def _group(batches: ConversationBatches, group: int) -> list[_TrainingRow]:
    """All rows of a group of steps, sorted by length."""
    count = GROUP * batches.batch
    rows = _read_rows(batches, [batches.samples[group * count + i] for i in range(count)])
    return sorted(rows, key=lambda row: len(row.forms[0].row))


def _read_rows(batches: ConversationBatches, samples: Sequence[Sample]) -> list[_TrainingRow]:
    encoded = batches.encoder.dialogues([_turns(batches, sample) for sample in samples])
    return [_row(batches, sample, *pair) for sample, pair in zip(samples, encoded, strict=True)]


def _turns(batches: ConversationBatches, sample: Sample) -> Sequence[tuple[str, str]]:
    if not batches.plain:
        return sample.turns
    return [(PLACEHOLDER * len(sample.images), sample.turns[0][1])]


def _row(batches: ConversationBatches, sample: Sample, tokens: np.ndarray, mask: np.ndarray) -> _TrainingRow:
    readers = [(batches.model, batches.view)] + ([(batches.teacher, VIEWS["M"])] if batches.teacher else [])
    sizes = [_size(image) for image in sample.images]
    forms = tuple(_form(batches, *reader, tokens, sizes) for reader in readers)
    limit = max(batches.buckets)
    within = np.logical_and.reduce([form.places < limit for form in forms])
    if not mask.any():
        raise InputError(f"sample {sample.id} of {sample.dataset}: no answer in it to learn; leave it out")
    first = max(int(form.places[mask.argmax()]) for form in forms)
    name = Unlearned(sample.dataset, sample.id, first + 1, max(form.units for form in forms))
    if name.units > max(batches.units):
        forms, within = tuple(replace(form, units=0) for form in forms), np.zeros_like(mask)
    images = sample.images if any(form.units for form in forms) else ()
    return _TrainingRow(forms, np.flatnonzero(mask & within), images, name)


def _form(
    batches: ConversationBatches, model: LoadedModel, view: View, tokens: np.ndarray, sizes: list[tuple[int, int]]
) -> _Form:
    encoder, count = batches.encoder, len(sizes)
    reader = model.images if view.reads_images else None
    shown = [reader.slots(size, view.pool, count) if reader else view.substitute(encoder, "") for size in sizes]
    copies = np.ones(len(tokens), np.int32)
    copies[tokens == encoder.image_token] = [len(x.sources) if isinstance(x, Slots) else len(x) for x in shown]
    row, limit = rewrite(tokens, encoder.image_token, shown), max(batches.buckets)
    images = which_image(row, [len(x.sources) for x in shown if isinstance(x, Slots)])
    units = sum(reader.units(size, count) for size in sizes) if reader else 0
    return _Form(row[:limit], images[:limit], np.cumsum(copies) - copies, units)


def _size(image: Any) -> tuple[int, int]:
    """Height and width of an image."""
    if isinstance(image, StoredImage) and image.size is not None:
        return image.size
    picture = to_rgb(image)
    return picture.height, picture.width


def iterate(
    rows: ConversationBatches,
    steps: int,
    workers: int = 0,
    threads: int = 2,
    ahead: int = 4,
    read: Callable[[int], Batch] | None = None,
) -> CountedBatches:
    """An iterator over the batches of the steps [0, `steps`), made ahead; its state, Grain's, is the next step.

    Args:
      workers: processes that make batches, for hosts of many cores; 0: this process's threads.
      threads: of each process.
      ahead: batches made in advance, of each process.
      read: what makes the batch of a step from these rows; by default they themselves.
    """
    dataset = grain.MapDataset.range(steps).map(partial(_counted, rows, read or rows))
    made = dataset.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))
    if workers:
        flags.FLAGS.mark_as_parsed()  # Grain reads its flags, and nobody here parses any
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=ahead)
        made = made.mp_prefetch(options, worker_init_fn=_leave_interrupts)
    return CountedBatches(iter(made), (max(rows.buckets), max(rows.units)), rows.batch)


def _leave_interrupts(worker: int, workers: int) -> None:
    """A terminal sends Ctrl-C to all processes; the one that trains saves first, and needs its batches until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _counted(rows: ConversationBatches, read: Callable[[int], Batch], step: int) -> tuple[Batch, list[Unlearned]]:
    return read(step), rows.unlearned(step)


def reach(model: LoadedModel, samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """(tokens that it takes to the first of an answer, tokens in all) of each conversation, as the model reads it."""
    whole = (sys.maxsize,)
    batches = ConversationBatches(samples, prompt_encoder(model), model, len(samples), whole, whole)
    return [(row.name.tokens, len(row.forms[0].row)) for row in _read_rows(batches, samples)]
