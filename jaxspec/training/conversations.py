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
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from absl import flags
from flax import struct

from jaxspec.data.images import StoredImage, to_rgb
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel, image_inputs, prompt_encoder, same_images
from jaxspec.models.inputs import TEXT, PromptRows, Slots
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.prompts.rows import PromptRow, bucket, rewrite, stack_rows, which_image
from jaxspec.prompts.views import VIEWS, View
from jaxspec.typing import Bool, Int, UInt

GROUP = 8
"""Steps whose samples are sorted together."""
SURE = 512
"""Rows to read before their share that teaches nothing is believed."""


class TeacherRows(struct.PyTreeNode):
    """The conversations of a batch as a teacher reads them."""

    rows: PromptRows
    images: dict[str, Any] | None
    """As of the batch; None: the teacher's tower reads the draft's."""
    before: Int[Any, "B L"]
    """The slot of its row at which the teacher tells what comes after slot t of the draft's."""


class ConversationBatch(struct.PyTreeNode):
    """Conversations of one step: numpy arrays where they are made, JAX arrays in the step."""

    rows: PromptRows
    """As the draft's view shows them, cut at the largest bucket."""
    mask: Bool[Any, "B L"]
    """What the assistant wrote."""
    images: dict[str, Any]
    """The tower's inputs [B,U,...], as in `ImageInputs`; empty where no row of the batch has an image."""
    numbers: UInt[Any, " B"]
    """Which rows of the whole training these are: seeds of what is drawn in the step."""
    teacher: TeacherRows | None = None

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.rows.tokens


class Unlearned(NamedTuple):
    """A row without an answer within the buckets, or with more image tiles than theirs."""

    dataset: str
    id: str
    tokens: int
    """That it takes for the first token of an answer to be within them."""
    tiles: int


@dataclass(frozen=True, eq=False)
class ConversationBatches:
    """Calling it with a step gives this process's rows of that step's batch.

    A row that has no answer left within the largest bucket, or more image tiles than their largest, counts nothing
    and is one of the step's `unlearned`. Raises InputError for a sample without answers, and for a batch of which the
    buckets leave none.
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
    tile_buckets: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    """Buckets of the most image tiles of one row."""
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
            raise InputError(
                f"batch: {self.batch} rows over {self.process[1]} processes; give a multiple of these"
            )

    def __call__(self, step: int) -> ConversationBatch:
        rows, own = self._rows(step), self._own
        pictures = [[to_rgb(image) for image in row.images] for row in rows[own]]
        shown, tiles = self._stack([row.forms[0] for row in rows], self.model, self.view)
        mask = np.zeros((len(rows), shown.tokens.shape[1]), bool)
        for i, row in enumerate(rows):
            mask[i, row.forms[0].places[row.learned]] = True
        if not mask.any():
            limit = max(self.buckets)
            raise InputError(
                f"training step {step}: no row has an answer within {limit} tokens; give longer --buckets"
            )
        return ConversationBatch(
            shown,
            mask[own],
            image_inputs(self.model, pictures, tiles) or {},
            np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.uint32)[own],
            None
            if self.teacher is None
            else self._taught(self.teacher, rows, shown.tokens.shape[1], pictures),
        )

    def shown(self, step: int) -> list[np.ndarray]:
        """Return, for this process's rows of a step, not padded, which of its images each slot shows, -1 for text."""
        return [row.forms[0].shown for row in self._rows(step)[self._own]]

    def unlearned(self, step: int) -> list[Unlearned]:
        """Return the rows of a step, of all processes, of which nothing is learned."""
        return [row.name for row in self._rows(step) if not len(row.learned)]

    def _rows(self, step: int) -> list[_TrainingRow]:
        """Return the rows of a step, of all processes."""
        group, place = divmod(step, GROUP)
        with _GROUPING:  # threads that ask for the same group make it once
            rows = _group(self, group)
        order = np.random.default_rng((self.seed, group)).permutation(GROUP)
        return rows[order[place] * self.batch :][: self.batch]

    @property
    def _own(self) -> slice:
        part, parts = self.process
        return slice(part * self.batch // parts, (part + 1) * self.batch // parts)

    def _taught(
        self, teacher: LoadedModel, rows: list[_TrainingRow], width: int, pictures: list[list[Any]]
    ) -> TeacherRows:
        own = rows[self._own]
        before = np.zeros((len(own), width), np.int32)
        for i, row in enumerate(own):
            mine, theirs = (form.places[row.learned] - 1 for form in row.forms)
            before[i, mine] = theirs
        shown, tiles = self._stack([row.forms[1] for row in rows], teacher, VIEWS["M"])
        shared = self.view.reads_images and same_images(teacher, self.model)
        return TeacherRows(
            shown, None if shared else image_inputs(teacher, pictures, tiles) or {}, before
        )

    def _stack(self, forms: list[_Form], model: LoadedModel, view: View) -> tuple[PromptRows, int]:
        """This process's rows, in shapes that are those of all rows; and the bucket of image tiles."""
        width = bucket(max(len(form.row) for form in forms), self.buckets, "training row")
        most = max(form.tiles for form in forms)
        tiles = (
            bucket(most, self.tile_buckets, "image tiles of a training row")
            if view.reads_images
            else 0
        )
        (rows,) = stack_rows([[form.row] for form in forms], width)
        if tiles and rows.sources is None:  # a batch without images is no program of its own
            blended = model.model.blended(view.pool)
            sources = np.full((len(forms), width, blended), TEXT, np.int32)
            rows = rows.replace(
                sources=sources, blend=np.zeros(sources.shape, np.float32) if blended > 1 else None
            )
        return jax.tree.map(lambda values: values[self._own], rows), tiles


@dataclass(frozen=True)
class _Form:
    """A conversation as one model reads it."""

    row: PromptRow
    shown: np.ndarray
    """Which image each slot shows, -1 for text."""
    places: np.ndarray
    """int32: the (first) slot of each of the conversation's tokens."""
    tiles: int


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
    """Return all rows of a group of steps, sorted by length."""
    count = GROUP * batches.batch
    rows = _read(batches, [batches.samples[group * count + i] for i in range(count)])
    return sorted(rows, key=lambda row: len(row.forms[0].row))


def _read(batches: ConversationBatches, samples: Sequence[Sample]) -> list[_TrainingRow]:
    def turns(sample: Sample) -> Sequence[tuple[str, str]]:
        return (
            [(PLACEHOLDER * len(sample.images), sample.turns[0][1])]
            if batches.plain
            else sample.turns
        )

    encoded = batches.encoder.dialogues([turns(sample) for sample in samples])
    return [_row(batches, sample, *pair) for sample, pair in zip(samples, encoded, strict=True)]


def _row(
    batches: ConversationBatches, sample: Sample, tokens: np.ndarray, mask: np.ndarray
) -> _TrainingRow:
    if not mask.any():
        raise InputError(
            f"sample {sample.id} of {sample.dataset}: no answer in it to learn; leave it out"
        )
    readers = [(batches.model, batches.view)] + (
        [(batches.teacher, VIEWS["M"])] if batches.teacher else []
    )
    sizes = [_size(image) for image in sample.images]
    forms = tuple(_form(batches, *reader, tokens, sizes) for reader in readers)
    within = np.logical_and.reduce([form.places < max(batches.buckets) for form in forms])
    first = max(int(form.places[mask.argmax()]) for form in forms)
    name = Unlearned(sample.dataset, sample.id, first + 1, max(form.tiles for form in forms))
    if name.tiles > max(batches.tile_buckets):
        forms, within = tuple(replace(form, tiles=0) for form in forms), np.zeros_like(mask)
    images = sample.images if any(form.tiles for form in forms) else ()
    return _TrainingRow(forms, np.flatnonzero(mask & within), images, name)


def _form(
    batches: ConversationBatches,
    model: LoadedModel,
    view: View,
    tokens: np.ndarray,
    sizes: list[tuple[int, int]],
) -> _Form:
    encoder, count = batches.encoder, len(sizes)
    reader = model.images if view.reads_images else None
    shown = [
        reader.slots(size, view.pool, count) if reader else view.substitute(encoder, "")
        for size in sizes
    ]
    copies = np.ones(len(tokens), np.int32)
    copies[tokens == encoder.image_token] = [
        len(x.sources) if isinstance(x, Slots) else len(x) for x in shown
    ]
    row, limit = rewrite(tokens, encoder.image_token, shown), max(batches.buckets)
    images = which_image(row, [len(x.sources) for x in shown if isinstance(x, Slots)])
    tiles = sum(reader.tiles(size, count) for size in sizes) if reader else 0
    return _Form(row[:limit], images[:limit], np.cumsum(copies) - copies, tiles)


def _size(image: Any) -> tuple[int, int]:
    """Height and width of an image."""
    if isinstance(image, StoredImage) and image.size is not None:
        return image.size
    picture = to_rgb(image)
    return picture.height, picture.width


def reach(model: LoadedModel, samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """(tokens that it takes to the first of an answer, tokens in all) of each conversation, as the model reads it."""
    whole = (sys.maxsize,)
    batches = ConversationBatches(samples, prompt_encoder(model), model, len(samples), whole, whole)
    return [(row.name.tokens, len(row.forms[0].row)) for row in _read(batches, samples)]


def frequent_tokens(
    encoder: PromptEncoder, samples: Any, count: int, ends: Sequence[int]
) -> Int[np.ndarray, " V"]:
    """Return all tokens, those first that the assistant wrote most often in the first `count` samples, equals by id.

    Before all come those that end its answers.
    """
    written = np.zeros(len(encoder.tokenizer), np.int64)
    for start in range(0, count, GROUP):
        chunk = [samples[i].turns for i in range(start, min(start + GROUP, count))]
        for tokens, mask in encoder.dialogues(chunk):
            found = np.bincount(tokens[mask])
            written = np.pad(written, (0, max(len(found) - len(written), 0)))
            written[: len(found)] += found
    written[[*ends]] = np.iinfo(np.int64).max
    return np.argsort(-written, kind="stable")


@dataclass
class CountedBatches:
    """An iterator over batches that Grain makes with their unlearned rows; closing it tells of these.

    Its state, Grain's, is the next step. Raises InputError once more than the share `limit` of what was read has taught
    nothing, over at least `SURE` rows.
    """

    made: Any
    rows: ConversationBatches
    limit: float
    _seen: set[Unlearned] = field(default_factory=set)
    _lost: int = 0
    _read: int = 0

    def __next__(self) -> Any:
        batch, lost = next(self.made)
        self._seen.update(Unlearned(*row) for row in lost)
        self._lost += len(lost)
        self._read += self.rows.batch
        if self._read >= SURE and self._lost > self.limit * self._read:
            reason = self._told()
            self._seen.clear()
            raise InputError(f"{reason}; or let more than {self.limit:.0%} be with --unlearned")
        return batch

    def get_state(self) -> Any:
        return self.made.get_state()

    def set_state(self, state: Any) -> None:
        self.made.set_state(state)

    def close(self) -> None:
        """Print how many rows taught nothing, each counted once, and what would mend it."""
        if self._seen and not jax.process_index():
            print(self._told(), file=sys.stderr)

    def _told(self) -> str:
        tokens, tiles = max(self.rows.buckets), max(self.rows.tile_buckets)
        large = [row for row in self._seen if row.tiles > tiles]
        late = [row for row in self._seen if row.tiles <= tiles]
        reasons = []
        if late:
            reasons.append(
                f"{len(late):,} without an answer in the first {tokens} tokens (the first {max(r.tokens for r in late)}"
                " would do: give longer --buckets; python -m train.prepare --target tells what fits)"
            )
        if large:
            most = max(row.tiles for row in large)
            reasons.append(
                f"{len(large):,} with over {tiles} image tiles (up to {most}: show fewer images)"
            )
        names, share = (
            ", ".join(sorted({row.dataset for row in self._seen})),
            self._lost / self._read,
        )
        return f"rows of {names} that taught nothing, {share:.1%} of what was read: {'; '.join(reasons)}"


def iterate(
    rows: ConversationBatches,
    steps: int,
    workers: int = 0,
    read: Callable[[int], Any] | None = None,
    limit: float = 1.0,
) -> CountedBatches:
    """An iterator over the batches of the steps [0, `steps`), of which four are made ahead.

    Args:
      workers: processes that make batches, for hosts of many cores; 0: two of this process's threads.
      read: what makes the batch of a step from these rows; by default they themselves.
      limit: the share of rows that may teach nothing, as `CountedBatches` has it.
    """
    dataset = grain.MapDataset.range(steps).map(partial(_with_unlearned, rows, read or rows))
    made = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if workers:
        flags.FLAGS.mark_as_parsed()  # Grain reads its flags, and nobody here parses any
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=4)
        made = made.mp_prefetch(options, worker_init_fn=_leave_interrupts)
    return CountedBatches(iter(made), rows, limit)


def _leave_interrupts(worker: int, workers: int) -> None:
    """A terminal sends Ctrl-C to all processes; the one that trains saves first, and needs its batches until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _with_unlearned(
    rows: ConversationBatches, read: Callable[[int], Any], step: int
) -> tuple[Any, list[Unlearned]]:
    return read(step), rows.unlearned(step)
