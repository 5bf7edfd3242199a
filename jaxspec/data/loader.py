"""Training batches of picturebook dialogues, and of texts, as a pure function of (seed, step).

Samples of a group of steps are sorted by length, so that a batch is padded to the bucket of its own longest row
and not to that of the longest row there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxspec.config import LlavaConfig
from jaxspec.data.picturebook import train_sample
from jaxspec.data.prompts import PromptEncoder, bucket, pad_rows

GROUP = 8
"""Steps whose samples are sorted together."""


@dataclass(frozen=True)
class DialogueBatches:
    """Calling it with a step gives {tokens [B,L], mask [B,L], pixels [B,I,Y,X,3]}; the mask marks what the
    assistant wrote. Rows are cut at the largest bucket."""

    encoder: PromptEncoder
    config: LlavaConfig
    batch: int
    seed: int
    buckets: tuple[int, ...]
    images: tuple[int, ...]
    """Buckets of I, the most images of one sample."""
    kinds: tuple[str, ...] | None = None
    """Names of picturebook's mixture to keep; None keeps all."""

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        group, place = divmod(step, GROUP)
        rows = _group(self, group)
        order = np.random.default_rng((self.seed, group)).permutation(GROUP)
        rows = rows[order[place] * self.batch :][: self.batch]
        longest = max(self.buckets)
        rows = [(tokens[:longest], mask[:longest], images) for tokens, mask, images in rows]
        width = bucket(max(len(tokens) for tokens, _, _ in rows), self.buckets, "training row")
        size = self.config.vision_config.image_size
        count = bucket(max(len(images) for _, _, images in rows), self.images, "images of a sample")
        pixels = np.zeros((self.batch, count, size, size, 3), np.float32)
        for i, (_, _, images) in enumerate(rows):
            if images:
                pixels[i, : len(images)] = normalise(np.stack(images))
        tokens, _ = pad_rows([tokens for tokens, _, _ in rows], width)
        mask, _ = pad_rows([mask for _, mask, _ in rows], width)
        return {"tokens": tokens, "mask": mask.astype(bool), "pixels": pixels}


def normalise(images: np.ndarray) -> np.ndarray:
    """uint8 pages to float32 in [-1, 1]: what the mini models' image processor does (mean and deviation 0.5)."""
    return (images.astype(np.float32) / 255 - 0.5) / 0.5


Row = tuple[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]


@lru_cache(maxsize=2)
def _group(batches: DialogueBatches, group: int) -> list[Row]:
    """All rows of a group of steps, sorted by length."""
    count = GROUP * batches.batch
    samples = [train_sample(batches.seed, group * count + i, batches.kinds) for i in range(count)]
    encoded = batches.encoder.dialogues([sample.turns for sample in samples])
    rows: list[Row] = []
    for sample, (tokens, mask) in zip(samples, encoded, strict=True):
        copies = np.where(tokens == batches.config.image_token_index, batches.config.image_tokens, 1)
        rows.append((np.repeat(tokens, copies), np.repeat(mask, copies), sample.images))
    return sorted(rows, key=lambda row: len(row[0]))


@dataclass(frozen=True, eq=False)
class TextBatches:
    """Calling it with a step gives {tokens [B,L], mask [B,L]} of texts of token ids; every epoch is shuffled anew.

    The mask marks what is no padding. Rows are cut at the largest bucket.
    """

    rows: tuple[np.ndarray, ...]
    batch: int
    seed: int
    buckets: tuple[int, ...]

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        group, place = divmod(step, GROUP)
        count = GROUP * self.batch
        chosen = sorted((self._row(group * count + i) for i in range(count)), key=len)
        order = np.random.default_rng((self.seed, 1, group)).permutation(GROUP)
        rows = [row[: max(self.buckets)] for row in chosen[order[place] * self.batch :][: self.batch]]
        tokens, length = pad_rows(rows, bucket(max(map(len, rows)), self.buckets, "training row"))
        return {"tokens": tokens, "mask": np.arange(tokens.shape[1]) < length[:, None]}

    def _row(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, len(self.rows))
        return self.rows[_shuffled(self.seed, epoch, len(self.rows))[place]]


@lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.random.default_rng((seed, 0, epoch)).permutation(size)
