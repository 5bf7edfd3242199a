"""Make batches of blocks that begin at anchors, which are drawn by row number and seed.

The target's passes over rows may be kept in files. Then the target reads a row once, for all epochs
and for all heads that need the same reading.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import struct
from safetensors.flax import load_file, save_file

from jaxspec.errors import InputError, check_counts, check_numbers, reading
from jaxspec.files import whole
from jaxspec.heads.blocks import TargetPass
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.head import Spans
from jaxspec.prompts.rows import image_spans
from jaxspec.training.conversations import ConversationBatch, ConversationBatches
from jaxspec.training.losses import BlockLoss
from jaxspec.typing import Bool, Int


@dataclass(frozen=True)
class Anchoring:
    """Set the anchors of blocks in dialogues, and their loss."""

    anchors: int
    """A: sampled blocks of a row; of packed rows, for each of their samples on average. Memory
    grows with it."""
    loss: BlockLoss = "kl"
    """kl, reverse_kl or tvd, to the target's distributions; lk_alpha or lk_lambda, which raise the
    acceptance of samples; or ce, cross entropy of the answers."""
    decay: float = 0.8
    """Step s has the weight decay^s (EAGLE-3's)."""
    weights: tuple[float, ...] | None = None
    """Weight of each place of a block, instead of the decay's."""

    def __post_init__(self) -> None:
        check_counts(anchors=self.anchors)
        check_numbers(decay=self.decay)
        check_numbers(**{f"weights {i}": weight for i, weight in enumerate(self.weights or ())})
        if self.weights and not sum(self.weights):
            raise InputError("anchoring: all weights are 0; give one above")

    def of_places(self, gamma: int) -> tuple[float, ...]:
        """Return the weights of a block's places; InputError where there are more or fewer."""
        if self.weights is None:
            return tuple(self.decay**place for place in range(gamma))
        if len(self.weights) != gamma:
            raise InputError(
                f"anchoring: {len(self.weights)} weights for the {gamma} places of a block; give "
                f"{gamma}"
            )
        return self.weights


Heads = Mapping[str, tuple[HeadConfig, Anchoring]]
"""Heads of one target by their names."""


class Blocks(struct.PyTreeNode):
    """Hold the blocks of one head in the rows of a batch."""

    anchors: Int[Any, "B A"]
    """Assistant tokens that another one follows; -1 fills rows with fewer. When a block begins at
    an anchor, the target has not yet computed its key."""
    spans: Spans | None
    """Slots of images, for a head that reads which slots show which."""


class HeadBatch(struct.PyTreeNode):
    """Hold conversations with the blocks of each head, by the head's name."""

    conversations: ConversationBatch
    blocks: dict[str, Blocks]
    readings: tuple[TargetPass, ...] | None = None
    """The target's pass as each head reads it; None makes it in the step's program."""

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.conversations.tokens


@dataclass(frozen=True)
class HeadBatches:
    """Make this process's rows of a step, with anchors drawn by row number and seed."""

    batches: ConversationBatches
    heads: Heads
    seed: int = 0
    readings: KeptReadings | None = None
    """Reader of the only head's passes; None makes them in the step's program."""

    def __call__(self, step: int) -> HeadBatch:
        batch = self.batches(step)
        blocks = {name: self._blocks(step, batch, *head) for name, head in self.heads.items()}
        return HeadBatch(batch, blocks, self.readings and (self.readings(batch),))

    def _blocks(
        self, step: int, batch: ConversationBatch, config: HeadConfig, anchoring: Anchoring
    ) -> Blocks:
        """Return the blocks of one head in a step's conversations."""
        room = next(iter(batch.images.values())).shape[1] if batch.images else 0
        spans = image_spans(self.batches.slot_images(step), room) if config.reads_spans else None
        draws = (np.random.default_rng((self.seed, int(number))) for number in batch.numbers)
        count = anchoring.anchors
        if batch.rows.first is not None:  # a packed row has blocks for all of its samples
            count = -(-count * self.batches.batch // self.batches.rows)
        return Blocks(draw_anchors(batch.mask, count, draws), spans)


def draw_anchors(
    mask: Bool[np.ndarray, "B L"], count: int, draws: Iterable[np.random.Generator]
) -> Int[np.ndarray, "B A"]:
    """Draw `count` slots of each row where a block can begin, without replacement.

    They are sorted; -1 fills rows with fewer slots.
    """
    anchors = np.full((len(mask), count), -1, np.int32)
    for row, (starts, rng) in enumerate(zip(mask[:, :-1] & mask[:, 1:], draws, strict=True)):
        (slots,) = np.nonzero(starts)
        sample = np.sort(rng.permutation(slots)[:count])
        anchors[row, : len(sample)] = sample
    return anchors


@dataclass(frozen=True, eq=False)
class KeptReadings:
    """Return the target's reading of a batch; each row is read once, and kept in a file."""

    read: Callable[[ConversationBatch], TargetPass]
    folder: Path
    """Holds a row's reading [1, ...], unpadded, under the digest of its tokens and images."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, batch: ConversationBatch) -> TargetPass:
        rows, width = batch.tokens.shape
        each = [
            self._kept_row(jax.tree.map(itemgetter(slice(i, i + 1)), batch)) for i in range(rows)
        ]
        return jax.tree.map(
            lambda *parts: np.concatenate([_widened(part, width) for part in parts]), *each
        )

    def _kept_row(self, row: ConversationBatch) -> TargetPass:
        """Return the reading of a row from its file, which the first call writes."""
        length, digest = int(row.rows.length[0]), hashlib.blake2b(digest_size=16)
        for leaf in (row.tokens[:, :length], *map(_own_tiles, jax.tree.leaves(row.images))):
            digest.update(leaf.tobytes())
        file = self.folder / f"{digest.hexdigest()}.safetensors"
        with self.lock:
            if not file.exists():
                leaves, _ = jax.tree_util.tree_flatten_with_path(self.read(row))
                with whole(file) as fresh:
                    save_file(
                        {_leaf_name(path): leaf[..., :length, :] for path, leaf in leaves}, fresh
                    )
        parts: dict[str, list[np.ndarray]] = {}
        with reading(f"reading {file}: cannot be read", "remove it"):
            stored = load_file(file)
        for name in sorted(stored, key=lambda name: (len(name), name)):  # k.2 before k.10
            parts.setdefault(name.partition(".")[0], []).append(np.asarray(stored[name]))
        k, v = (tuple(parts.pop(name, ())) for name in ("k", "v"))
        return TargetPass(k=k, v=v, **{name: leaf for name, (leaf,) in parts.items()})


def _own_tiles(leaf: np.ndarray) -> np.ndarray:
    """Return a row's tiles without the zeros behind them, which depend on the row's batch."""
    (filled,) = np.nonzero(leaf[0].reshape(leaf.shape[1], -1).any(axis=1))
    return leaf[:, : filled.max(initial=-1) + 1]


def _leaf_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf in a file: `hidden`, or `k.0`; older files have `k`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _widened(leaf: np.ndarray, width: int) -> np.ndarray:
    """Return the slots padded with zeros, which the loss never reads."""
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 2) + [(0, width - leaf.shape[-2]), (0, 0)])
