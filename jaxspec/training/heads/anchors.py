"""Batches of blocks that begin at anchors, which are drawn by row number and seed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from flax import struct

from jaxspec.config import HeadConfig
from jaxspec.errors import check_counts, check_numbers
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.heads.reading import HeadRows, Reading
from jaxspec.training.conversations import ConversationBatch, ConversationBatches
from jaxspec.training.heads.readings import KeptReadings
from jaxspec.typing import Bool, Int

Loss = Literal["kl", "ce"]
"""KL(target || head) at each token of a block, or cross entropy of the tokens themselves."""


@dataclass(frozen=True)
class Anchoring:
    """Set the anchors of blocks in dialogues, and their loss."""

    anchors: int
    """A: sampled blocks of a row. Memory grows with it."""
    loss: Loss = "kl"
    """kl, to the target's distributions, or ce, cross entropy of the answers."""
    decay: float = 0.8
    """Step s has the weight decay^s (EAGLE-3's)."""

    def __post_init__(self) -> None:
        check_counts(anchors=self.anchors)
        check_numbers(decay=self.decay)


class HeadBatch(struct.PyTreeNode):
    """Hold conversations with the anchors of their blocks."""

    conversations: ConversationBatch
    anchors: Int[Any, "B A"]
    """Assistant tokens that another one follows; -1 fills rows with fewer. When a block begins at
    an anchor, the target has not yet computed its key."""
    slots: HeadRows | None
    """Slots of the target's rows that the head reads."""
    reading: Reading | None = None
    """The target's pass; None makes it in the step's program."""

    @property
    def tokens(self) -> Int[Any, "B L"]:
        return self.conversations.tokens


@dataclass(frozen=True)
class HeadBatches:
    """Make this process's rows of a step, with anchors drawn by row number and seed."""

    batches: ConversationBatches
    config: HeadConfig
    anchoring: Anchoring
    seed: int = 0
    readings: KeptReadings | None = None

    def __call__(self, step: int) -> HeadBatch:
        batch = self.batches(step)
        room = next(iter(batch.images.values())).shape[1] if batch.images else 0
        # Rows with more images than the bucket teach nothing.
        slot_images = [np.where(row < room, row, -1) for row in self.batches.shown(step)]
        slots = module_of(self.config).slots(slot_images, batch.tokens.shape[1], room)
        draws = (np.random.default_rng((self.seed, int(number))) for number in batch.numbers)
        anchors = draw_anchors(batch.mask, self.anchoring.anchors, draws)
        return HeadBatch(batch, anchors, slots, self.readings and self.readings(batch))


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
