"""Define Gemma 4 with images: squares of 48 x 48 pixels are tokens, by a tower or (the 12B) without
one.

The 12B norms the pixels of a square, projects and places them. In sliding layers of 12B and 31B the
tokens of an image read one another, see `Places.reach`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Gemma4Config, Gemma4UnifiedConfig, PixelConfig
from jaxspec.errors import InputError
from jaxspec.models.decoder import CausalLM, Lvlm
from jaxspec.models.inputs import MEND, ImageInputs, Pool, Shapes, Size, Slots
from jaxspec.models.layers import INIT, Dense, LayerNorm, RMSNorm
from jaxspec.models.lvlms.gemma4_tower import VisionTower
from jaxspec.typing import Array, Features, Float, Int

TILE = 70
"""Squares of a tile: all numbers of squares that a processor takes at most are its multiples."""
SOFT_TOKENS = (70, 140, 280, 560, 1120)
"""Maximum squares of an image, which a processor may be set to."""
_EPSILON = 1e-5


class VisionEmbedder(nn.Module):
    """Norm squares of pixels, project them, and add the learned positions of row and column."""

    config: PixelConfig

    @nn.compact
    def __call__(
        self, pixels: Float[Array, "... P values"], position: Int[Array, "... P 2"]
    ) -> Float[Array, "... P E"]:
        c = self.config
        table = self.param("pos_embedding", INIT, (c.mm_posemb_size, 2, c.mm_embed_dim))
        x = LayerNorm(_EPSILON, name="patch_ln1")(pixels.astype(table.dtype))
        x = Dense(c.mm_embed_dim, bias=True, name="patch_dense")(x)
        x = LayerNorm(_EPSILON, name="patch_ln2")(x)
        x += sum(table[jnp.maximum(position[..., axis], 0), axis] for axis in (0, 1))
        return LayerNorm(_EPSILON, name="pos_norm")(x)


class VisionProjection(nn.Module):
    """Norm features, without a weight, and map them to the decoder's width."""

    config: Gemma4Config

    @nn.compact
    def __call__(self, features: Float[Array, "... E"]) -> Float[Array, "... D"]:
        eps, width = self.config.vision_config.rms_norm_eps, self.config.text_config.hidden_size
        normed = RMSNorm(eps, affine=False)(features)
        return Dense(width, bias=False, name="embedding_projection")(normed)


class Gemma4(Lvlm):
    """Compute Hugging Face's `Gemma4ForConditionalGeneration`, without audio."""

    config: Gemma4Config

    reader: ClassVar[tuple[str, Callable[..., Any]]] = ("vision_tower", VisionTower)
    """Name and class of the part that reads squares."""

    def setup(self) -> None:
        name, kind = self.reader
        setattr(self, name, kind(self.config.vision_config))
        self.embed_vision = VisionProjection(self.config)
        self.language_model = CausalLM(self.config.text_config)
        # The files hold the decoder at the level of the tower.
        nn.share_scope(self, self.language_model)

    def encode(
        self, pixels: Float[Array, "B U P values"], position: Int[Array, "B U P 2"]
    ) -> Features:
        """Return features of every square."""
        return getattr(self, self.reader[0])(pixels, position)

    def project(
        self, features: Features, pool: Pool | None = None
    ) -> Float[Array, "B features wide"]:
        """Return the rows of all tiles. View P is refused in `SquareImages.slots`."""
        rows = self.embed_vision(features)
        return self.language_model.shown(rows.reshape(rows.shape[0], -1, rows.shape[-1]))


class Gemma4Unified(Gemma4):
    """Compute Hugging Face's `Gemma4UnifiedForConditionalGeneration`, without audio."""

    config: Gemma4UnifiedConfig

    reader: ClassVar = ("vision_embedder", VisionEmbedder)


@dataclass(frozen=True)
class SquareImages(ImageInputs):
    """Read images as squares, row by row; a tile is `TILE` of them.

    The processor makes patches, which are put together to squares here.
    """

    max_soft_tokens: int | None = None
    """Maximum squares of an image; None leaves it to the processor's settings."""

    @property
    def most(self) -> int:
        """Return the most squares of an image."""
        return self.max_soft_tokens or self.processor.max_soft_tokens

    @staticmethod
    def shapes(config: Gemma4Config) -> Shapes:
        values = 3 * config.vision_config.side**2
        return {"pixels": ((TILE, values), np.float32), "position": ((TILE, 2), np.int32)}

    def grid(self, size: Size) -> tuple[int, int]:
        """Return rows and columns of squares: as many as fit the limit, at the image's shape."""
        most, (height, width) = self.most, size
        vision = self.config.vision_config
        scale = math.sqrt(most * vision.side**2 / (height * width))
        rows, columns = (math.floor(scale * edge / vision.side) for edge in size)
        if not rows and not columns:
            raise InputError(f"image of {width}x{height}: too few tokens, {most}, for its shape")
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        if (longer := max(rows, columns)) > vision.longest:
            raise InputError(
                f"image of {width}x{height}: {longer} squares along a side, and the model places "
                f"{vision.longest}; crop it"
            )
        return rows, columns

    def tiles(self, size: Size, images: int = 1) -> int:
        return -(-math.prod(self.grid(size)) // TILE)

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        if pool is not None:
            raise InputError("view P: Gemma 4's images are not pooled; give M or T")
        count = math.prod(self.grid(size))
        return Slots(np.arange(count, dtype=np.int32)[:, None], self.tiles(size) * TILE)

    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the pixels of each image's squares, which become one token each, in tiles.

        Squares that pad the last tile are at position -1.
        """
        images = list(images)
        out = self.processor(images=images, max_soft_tokens=self.most, return_tensors="np")
        patches, counts = np.asarray(out["pixel_values"]), out["num_soft_tokens_per_image"]
        vision = self.config.vision_config
        kernel, patch = vision.pooling_kernel_size, vision.patch_size
        grids = [self.grid((image.height, image.width)) for image in images]
        expected = [math.prod(grid) for grid in grids], 3 * patch**2
        if (list(map(int, counts)), patches.shape[-1]) != expected:
            raise InputError(
                f"image processor: gives patches {list(patches.shape)} for {counts} tokens, and "
                f"the model reads {expected[1]} values a patch for {expected[0]}; {MEND}"
            )
        tiles = []
        for values, (rows, columns), count in zip(patches, grids, expected[0], strict=True):
            squares = values[: count * kernel**2].reshape(
                rows, kernel, columns, kernel, patch, patch, 3
            )
            pixels = squares.transpose(0, 2, 1, 4, 3, 5, 6).reshape(count, -1)
            row, column = np.indices((rows, columns)).reshape(2, -1)
            room = -count % TILE
            pixels = np.pad(pixels, ((0, room), (0, 0))).astype(np.float32)
            position = np.stack([column, row], 1).astype(np.int32)
            position = np.pad(position, ((0, room), (0, 0)), constant_values=-1)
            tiles.append(
                {
                    "pixels": pixels.reshape(-1, TILE, pixels.shape[-1]),
                    "position": position.reshape(-1, TILE, 2),
                }
            )
        return tiles
