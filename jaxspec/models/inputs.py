"""Hold the inputs of models: token ids, tiles of images, and the features that slots show.

A tower reads an image as one or more *tiles* of one shape: the whole image for LLaVA-1.5, crops for
LLaVA-NeXT, attention windows for Qwen2.5-VL. Images of any size are a number of tiles, and a bucket
of tiles is one compiled program. Each image slot of a prompt is a blend of rows of the table of
projected features. Unpadding, end-of-line embeddings, interpolation and pooling are blends too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.errors import InputError
from jaxspec.typing import Array, Bool, Float, Int

MEND = "use the preprocessor_config.json that belongs to the model"
"""Advice for an image processor that does not make what a tower reads."""
TEXT, NEWLINE = -1, -2
"""Sources of a slot with its own token, and of one with the learned end-of-line embedding."""

Size = tuple[int, int]
"""Height and width of an image in pixels."""
Shapes = Mapping[str, tuple[tuple[int, ...], Any]]
"""Name -> shape and dtype."""


class PromptRows(struct.PyTreeNode):
    """Hold right-padded prompts in one form: the target's, or a view for the draft."""

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    sources: Int[Array, "B L blended"] | None = None
    """Feature rows of each slot; TEXT for a slot with its token. None without image slots."""
    blend: Float[Array, "B L blended"] | None = None
    """Their weights; None for a single source."""
    rotary: Int[Array, "B 3 L"] | None = None
    """Rotary positions (time, height, width) where they are not the slots (M-RoPE)."""
    shift: Int[Array, " B"] | None = None
    """With `rotary`: position minus slot of the token after the prompt."""
    first: Int[Array, "B L"] | None = None
    """First slot of each slot's conversation, in training rows that hold several; None: slot 0."""

    @property
    def places(self) -> Int[Array, "B L"]:
        """Return the place of each slot in its own conversation."""
        slots = jnp.broadcast_to(jnp.arange(self.tokens.shape[1]), self.tokens.shape)
        return slots if self.first is None else slots - self.first

    @property
    def angles(self) -> Int[Array, "B L"] | Int[Array, "B 3 L"] | None:
        """Return the rotary positions; None where they are the slots."""
        return self.rotary if self.rotary is not None or self.first is None else self.places

    @property
    def images(self) -> Bool[Array, "B L"] | None:
        """Return which slots show an image; None without image slots."""
        if self.sources is None or not self.sources.shape[-1]:
            return None
        return self.sources[..., 0] != TEXT

    @property
    def reach(self) -> Int[Array, "B L"] | None:
        """Return `image_ends` of the rows; None without image slots."""
        return None if self.images is None else image_ends(self.images, self.first)


@dataclass(frozen=True)
class Slots:
    """Hold one image's prompt slots: blends of feature rows, counted from the image's first."""

    sources: np.ndarray
    """int32 [P, K], or NEWLINE. K is the same for all images of a family and view."""
    rows: int
    """Number of the image's feature rows in the table."""
    blend: np.ndarray | None = None
    """float32 [P, K]; None for K = 1."""
    positions: np.ndarray | None = None
    """int32 [3, P], M-RoPE positions from the image's first; text continues after the largest."""


@dataclass(frozen=True)
class Pool:
    """Pool an image's features by averages (view P)."""

    tokens: int | None = None
    """Tokens of a pooled tile; None means the nearest square at or below a quarter."""
    kind: Literal["avg2d", "avg1d"] = "avg2d"
    """Averages over squares of the tile, or over runs of features in reading order."""

    def count(self, tokens: int) -> int:
        """Return the number of tokens of a pooled tile of `tokens`."""
        count = math.isqrt(tokens // 4) ** 2 if self.tokens is None else self.tokens
        square = self.kind == "avg1d" or math.isqrt(count) ** 2 == count
        if (
            not 0 < count <= tokens
            or not square
            or (self.kind == "avg2d" and math.isqrt(tokens) ** 2 != tokens)
        ):
            raise InputError(
                f"view P: a tile of {tokens} image tokens cannot be pooled to {count} by "
                f"{self.kind}; give a square number below, such as a quarter"
            )
        return count

    def matrix(self, tokens: int) -> np.ndarray:
        """Return the averages as float32 [P', P], in the windows of PyTorch's adaptive pooling."""
        count = self.count(tokens)
        if self.kind == "avg1d":
            return _windows(tokens, count)
        side = _windows(math.isqrt(tokens), math.isqrt(count))
        return np.kron(side, side)


def _windows(size: int, count: int) -> np.ndarray:
    out = np.zeros((count, size), np.float32)
    for i in range(count):
        start, stop = i * size // count, -(-(i + 1) * size // count)
        out[i, start:stop] = 1 / (stop - start)
    return out


@dataclass(frozen=True)
class ImageInputs(ABC):
    """Read a family's images on the host, with transformers' image processor."""

    config: Any
    processor: Any

    mrope: ClassVar[bool] = False
    """Whether `slots` have positions (M-RoPE)."""

    @staticmethod
    @abstractmethod
    def shapes(config: Any) -> Shapes:
        """Return the arrays of one tile."""

    @staticmethod
    def blended(pool: Pool | None) -> int:
        """Return the number of feature rows that a slot blends, pooled or not."""
        return 1

    @abstractmethod
    def tiles(self, size: Size, images: int = 1) -> int:
        """Return the tiles of an image of that size, one of `images` in its prompt."""

    @abstractmethod
    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        """Return the image's prompt slots, pooled for view P."""

    @abstractmethod
    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the tiles [U, ...] of each of a prompt's RGB PIL images."""


def in_order(is_image: Array) -> Int[Array, "B L 1"]:
    """Return the sources of prompts whose image slots show their row's features in order."""
    return jnp.where(is_image, jnp.cumsum(is_image, axis=1) - 1, TEXT)[..., None]


def image_ends(
    is_image: Bool[Array, "B L"], first: Int[Array, "B L"] | None = None
) -> Int[Array, "B L"]:
    """Return the last slot of each slot's image; a text slot is its own.

    Neighbouring image slots are one image: text, image, image, text is [0, 2, 2, 3].

    first: First slot of each slot's conversation, at which an image ends.
    """
    width = is_image.shape[1]
    slots = jnp.arange(width)
    ends = ~is_image if first is None else ~is_image | (first == slots)
    after = jnp.pad(jnp.where(ends, slots, width)[:, 1:], ((0, 0), (0, 1)), constant_values=width)
    return jnp.where(is_image, jax.lax.cummin(after, axis=1, reverse=True) - 1, slots)


def show_images(
    embeds: Float[Array, "B L D"],
    table: Float[Array, "B features D"],
    sources: Int[Array, "B L blended"],
    blend: Float[Array, "B L blended"] | None,
) -> Float[Array, "B L D"]:
    """Return prompt embeddings with the features of image slots. NEWLINE is the last row."""
    at = jnp.clip(jnp.where(sources == NEWLINE, table.shape[1] - 1, sources), 0, table.shape[1] - 1)
    features = jnp.take_along_axis(table, at[..., 0, None], axis=1)
    if blend is not None:
        features = features * blend[..., 0, None]
        for k in range(1, at.shape[-1]):
            features += blend[..., k, None] * jnp.take_along_axis(table, at[..., k, None], axis=1)
    return jnp.where(sources[..., :1] == TEXT, embeds, features.astype(embeds.dtype))
