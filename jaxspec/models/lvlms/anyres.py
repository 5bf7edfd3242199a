"""Read images of any resolution: LLaVA-NeXT's and LLaVA-OneVision's tiles.

An image is scaled into the best of some grids of tiles and padded to fill it. The tower reads a
base tile (the whole image) and then the grid's tiles, row by row. The prompt shows the base tile's
features, then the grid's, joined and without the padding; a learned embedding closes each line.
Section 3 of the LLaVA-NeXT post (2024-01-30), section 3.1 of LLaVA-OneVision (arXiv 2408.03326);
rounding as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.errors import InputError
from jaxspec.models.inputs import NEWLINE, Pool, Size, Slots
from jaxspec.models.lvlms.llava import LlavaImages


class LlavaNextImages(LlavaImages):
    """Read LLaVA-NeXT's base tile and the best grid's tiles. View P pools the base tile."""

    def tiles(self, size: Size, images: int = 1) -> int:
        rows, columns = self._tiles(size)
        return 1 + rows * columns

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        per_tile, tiles = self.config.image_tokens, self.tiles(size, images)
        if pool is not None:
            count = pool.count(per_tile)
            return Slots(np.arange(count, dtype=np.int32)[:, None], tiles * count)
        lines = np.pad(self._grid(size), ((0, 0), (0, 1)), constant_values=NEWLINE)
        return Slots(
            np.append(np.arange(per_tile, dtype=np.int32), lines)[:, None], tiles * per_tile
        )

    def _processed(self, images: Sequence[Any]) -> list[np.ndarray]:
        return [
            np.asarray(self.processor(images=[i], return_tensors="np")["pixel_values"])[0]
            for i in images
        ]

    def _tiles(self, size: Size) -> Size:
        """Return rows and columns of tiles of an image's grid."""
        height, width = best_resolution(size, self.config.image_grid_pinpoints)
        side = self.config.vision_config.image_size
        return height // side, width // side

    def _grid(self, size: Size) -> np.ndarray:
        """Return feature rows int32 [Y, X] of the grid's patches that show the image."""
        rows, columns = self._tiles(size)
        per_tile, side = self.config.image_tokens, self.config.vision_config.side
        tiles = per_tile + np.arange(rows * columns * per_tile, dtype=np.int32).reshape(
            rows, columns, side, side
        )
        return unpadded(tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side), size)


class LlavaOnevisionImages(LlavaNextImages):
    """Read images as LLaVA-NeXT does, with the features of large grids scaled down.

    In a prompt with several images, each is its base tile (padded to a square, not stretched) and
    one end-of-line embedding.
    """

    @staticmethod
    def blended(pool: Pool | None) -> int:
        return 4 if pool is None else 1

    def tiles(self, size: Size, images: int = 1) -> int:
        return super().tiles(size) if images == 1 else 1

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        """Return the slots of the base tile, then of the grid, each line with a newline behind it.

        A grid that is too large is scaled down, so that each of its slots blends four patches.
        """
        if pool is not None:
            return super().slots(size, pool, images)
        per_tile = self.config.image_tokens
        empty = np.zeros((1, 0), np.int32)  # several images: one line without patches
        grid = self._grid(size) if images == 1 else empty
        over = math.sqrt(grid.size / (self.config.most_tiles * per_tile))
        height, width = (int(length // over) if over > 1.1 else length for length in grid.shape)
        if over > 1.1 and not (height and width):
            raise _too_thin(size)
        sources, blend = bilinear(grid, height, width)
        ends = ((0, 0), (0, 1), (0, 0))
        sources, blend = np.pad(sources, ends, constant_values=NEWLINE), np.pad(blend, ends)
        blend[:, -1, 0] = 1
        base = np.repeat(np.arange(per_tile, dtype=np.int32)[:, None], 4, axis=1)
        return Slots(
            np.concatenate([base, sources.reshape(-1, 4)]),
            self.tiles(size, images) * per_tile,
            np.concatenate(
                [np.eye(1, 4, dtype=np.float32).repeat(per_tile, axis=0), blend.reshape(-1, 4)]
            ),
        )

    def _processed(self, images: Sequence[Any]) -> list[np.ndarray]:
        # A nested list holds the images of one prompt; a flat list, one image per prompt.
        return list(
            np.asarray(self.processor(images=[list(images)], return_tensors="np")["pixel_values"])
        )


def best_resolution(size: Size, pinpoints: Sequence[Size]) -> Size:
    """Return the pinpoint that keeps most of an image's pixels, and then has the least padding."""
    original = size[0] * size[1]

    def merit(pinpoint: Size) -> tuple[int, int]:
        scale = min(pinpoint[1] / size[1], pinpoint[0] / size[0])
        pixels = min(int(size[1] * scale) * int(size[0] * scale), original)
        return pixels, pixels - pinpoint[0] * pinpoint[1]

    best = max(pinpoints, key=merit)  # the first, of equals
    if merit(best)[0] == 0:
        raise _too_thin(size)
    return best


def _too_thin(size: Size) -> InputError:
    return InputError(
        f"image of {size[0]}x{size[1]} pixels: too thin to be scaled into tiles; crop or pad it"
    )


def unpadded(grid: np.ndarray, size: Size) -> np.ndarray:
    """Return a grid of patches without the padding around an image of that size."""
    height, width = grid.shape
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return grid[padding : height - padding]
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return grid[:, padding : width - padding]


def bilinear(grid: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sources [height, width, 4] and weights that scale a grid to height and width.

    They are those of PyTorch's `interpolate` with `align_corners=False`.
    """
    (top, bottom, low), (left, right, near) = (
        _neighbours(length, scaled)
        for length, scaled in zip(grid.shape, (height, width), strict=True)
    )
    sources = [grid[y][:, x] for y in (top, bottom) for x in (left, right)]
    weights = [wy[:, None] * wx for wy in (1 - low, low) for wx in (1 - near, near)]
    return np.stack(sources, axis=-1), np.stack(weights, axis=-1)


def _neighbours(length: int, scaled: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each sample's two neighbours on a line, and the weight of the second one."""
    step = np.float32(length) / np.float32(max(scaled, 1))  # float32 throughout, as PyTorch
    at = np.maximum(
        step * (np.arange(scaled, dtype=np.float32) + np.float32(0.5)) - np.float32(0.5), 0
    )
    first = at.astype(np.int32)
    return first, np.minimum(first + 1, length - 1), at - first.astype(np.float32)
