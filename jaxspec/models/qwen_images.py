"""How Qwen2.5-VL reads images: any size, resized to whole merge groups, cut into attention windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxspec.errors import InputError
from jaxspec.models.inputs import Pool, Shapes, Size, Slots

MOST_STRETCHED = 200
"""Longer sides over shorter ones that the processor takes."""


@dataclass(frozen=True)
class QwenImages:
    """Qwen2.5-VL: a unit is an attention window of the tower; as many as the image is large.

    Grids are counted in merge groups, which are the image's tokens: [Y, X] of them for an image.
    """

    config: Any
    processor: Any
    turns: ClassVar = True

    @staticmethod
    def shapes(config: Any) -> Shapes:
        vision = config.vision_config
        return {"patches": ((vision.window_patches, vision.patch_values), np.float32), "place": ((4,), np.int32)}

    @staticmethod
    def blended(pool: Pool | None) -> int:
        return 1 if pool is None else 4

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of merge groups after the processor's resizing: sides are rounded to whole groups, or
        scaled so that the image has at least the fewest pixels and at most the most."""
        height, width = size
        if max(size) > MOST_STRETCHED * min(size):
            raise InputError(
                f"image of {width}x{height}: one side is over {MOST_STRETCHED} times the other; crop or scale it"
            )
        vision, limits = self.config.vision_config, self.processor.size
        side = vision.patch_size * vision.spatial_merge_size
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > limits["longest_edge"]:
            shrink = math.sqrt(height * width / limits["longest_edge"])
            rows, columns = (max(1, math.floor(x / shrink / side)) for x in size)
        elif rows * columns * side**2 < limits["shortest_edge"]:
            grow = math.sqrt(limits["shortest_edge"] / (height * width))
            rows, columns = (math.ceil(x * grow / side) for x in size)
        return rows, columns

    def units(self, size: Size, images: int = 1) -> int:
        rows, columns = self.grid(size)
        return self._windows(rows) * self._windows(columns)

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        """The merged tokens row by row, at M-RoPE positions (0, row, column); for view P averages of squares of 2x2
        of them (fewer at an odd edge), at the positions of the smaller grid."""
        rows, columns = grid = self.grid(size)
        row, column = np.indices(grid)
        source = self._source(row, column, columns)
        known = {"rows": self.units(size) * self.config.vision_config.window_groups**2}
        if pool is None:
            return Slots(source.reshape(-1, 1), positions=_positions(grid), **known)
        if pool.tokens is not None or pool.kind != "avg2d":
            raise InputError(
                "view P: images of Qwen2.5-VL have as many tokens as they are large, pooled in squares of 2x2; "
                "give P without a number and without -1d"
            )
        pooled = -(-rows // 2), -(-columns // 2)
        padded = np.full((2 * pooled[0], 2 * pooled[1]), -1, np.int32)
        padded[:rows, :columns] = source
        squares = padded.reshape(pooled[0], 2, pooled[1], 2).swapaxes(1, 2).reshape(-1, 4)
        there = squares >= 0
        blend = (there / there.sum(axis=1, keepdims=True)).astype(np.float32)
        return Slots(np.where(there, squares, squares[:, :1]), blend=blend, positions=_positions(pooled), **known)

    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        out = self.processor(images=list(images), return_tensors="np")
        patches, sizes = np.asarray(out["pixel_values"]), np.asarray(out["image_grid_thw"])
        merge = self.config.vision_config.spatial_merge_size
        grids = [self.grid((image.height, image.width)) for image in images]
        expected = [[1, rows * merge, columns * merge] for rows, columns in grids]
        if sizes.tolist() != expected or patches.shape[1] != self.config.vision_config.patch_values:
            raise InputError(
                f"image processor: gives patches {list(patches.shape)} in grids {sizes.tolist()}, and the tower reads "
                f"{self.config.vision_config.patch_values} values in {expected}; "
                "use the preprocessor_config.json that belongs to the model"
            )
        pieces = np.split(patches, np.cumsum(sizes.prod(axis=1))[:-1])
        return [self._cut(piece, *grid) for piece, grid in zip(pieces, grids, strict=True)]

    def _cut(self, patches: np.ndarray, rows: int, columns: int) -> dict[str, np.ndarray]:
        """An image's patches, merge group by merge group as the processor gives them, window by window."""
        vision = self.config.vision_config
        side, group = vision.window_groups, vision.spatial_merge_size
        down, across = self._windows(rows), self._windows(columns)
        padded = np.zeros((down * side, across * side, group**2, patches.shape[1]), np.float32)
        padded[:rows, :columns] = patches.reshape(rows, columns, group**2, -1)
        windows = padded.reshape(down, side, across, side, *padded.shape[2:]).swapaxes(1, 2)
        first = np.indices((down, across)).reshape(2, -1).T * side
        extent = np.minimum((rows, columns) - first, side)
        return {
            "patches": windows.reshape(down * across, -1, patches.shape[1]),
            "place": (np.concatenate([first, extent], axis=1) * group).astype(np.int32),
        }

    def _windows(self, groups: int) -> int:
        return -(-groups // self.config.vision_config.window_groups)

    def _source(self, row: np.ndarray, column: np.ndarray, columns: int) -> np.ndarray:
        """The feature row that shows the token in that place of a grid."""
        side = self.config.vision_config.window_groups
        window = row // side * self._windows(columns) + column // side
        return (window * side**2 + row % side * side + column % side).astype(np.int32)


def _positions(grid: tuple[int, int]) -> np.ndarray:
    """int32 [3, P]: time, row and column of a still image's tokens."""
    places = np.indices(grid, np.int32).reshape(2, -1)
    return np.concatenate([np.zeros_like(places[:1]), places])
