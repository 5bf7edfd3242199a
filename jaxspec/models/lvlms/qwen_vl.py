"""Define Qwen2.5-VL: tower of windowed attention -> merger -> merge -> decoder with M-RoPE.

Bai et al. 2025, "Qwen2.5-VL Technical Report". A tile is one attention window: a square of P
patches (8 x 8 in the published models) in the order of their merge groups (2 x 2 patches, which
become one token), padded at the image's right and lower edge. Windowed layers attend within the
tile, the few full ones within the image.

`QwenImages` resizes images of any size to whole merge groups and cuts them into windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import QwenTowerConfig, QwenVisionConfig, QwenVLConfig
from jaxspec.errors import InputError
from jaxspec.models.attention import attend_freely, attend_within
from jaxspec.models.decoder import CausalLM, Lvlm
from jaxspec.models.inputs import MEND, ImageInputs, Pool, Shapes, Size, Slots
from jaxspec.models.layers import INIT, MLP, Dense, GatedMLP, RMSNorm, call_layer, rotate
from jaxspec.typing import Array, Features, Float, Int

MOST_STRETCHED = 200
"""Longest side over the shortest that the processor takes."""
EPSILON, ROPE_THETA = 1e-6, 10000.0
"""Constants of the tower's norms and rotary positions; no configuration names them."""


def patch_positions(config: QwenTowerConfig) -> np.ndarray:
    """Return int32 [2, P]: row and column of a window's patches, merge group by merge group."""
    groups, group = config.window_groups, config.spatial_merge_size
    positions = np.indices((groups * group,) * 2, np.int32)
    return positions.reshape(2, groups, group, groups, group).swapaxes(2, 3).reshape(2, -1)


def window_contents(
    config: QwenTowerConfig, window: Int[Array, "B U fields"]
) -> tuple[Array, Array]:
    """Return rotary positions [B,U,2,P] of the windows' patches, and their images [B,U,P].

    The image of a padding patch is -1. `window` begins with row and column of a window's first
    patch, and its height and width in patches. An image's first window is at row and column 0.
    """
    inside = jnp.asarray(patch_positions(config))
    first, extent = window[..., :2, None], window[..., 2:4, None]
    image = jnp.cumsum(jnp.all(window[..., :2] == 0, axis=-1) & (window[..., 2] > 0), axis=-1) - 1
    return first + inside, jnp.where(jnp.all(inside < extent, axis=-2), image[..., None], -1)


class PatchEmbed(nn.Module):
    """Map flat patches [channel, time, row, column] to tower width, as the file's convolution."""

    config: QwenTowerConfig
    bias: bool = False

    @nn.compact
    def __call__(self, patches: Float[Array, "... pixels"]) -> Float[Array, "... E"]:
        c = self.config
        shape = (c.temporal_patch_size, c.patch_size, c.patch_size, c.in_channels, c.hidden_size)
        bias = {"bias": jnp.zeros(c.hidden_size)} if self.bias else {}
        weights = self.param("proj", lambda key: {"kernel": INIT(key, shape)} | bias)
        matrix = weights["kernel"].transpose(3, 0, 1, 2, 4).reshape(-1, c.hidden_size)
        out = patches.astype(matrix.dtype) @ matrix
        return out + weights["bias"] if self.bias else out


class VisionAttention(nn.Module):
    """Attend with rotary positions of two axes; within windows or, if `full`, within images."""

    config: QwenTowerConfig
    full: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B U P E"], rotary: Int[Array, "B U 2 P"], image: Int[Array, "B U P"]
    ) -> Float[Array, "B U P E"]:
        c = self.config
        batch, tiles, patches, width = x.shape
        head = width // c.num_heads
        spread = np.arange(0, head // 2, 2) / (head // 2)
        inverse = np.tile(ROPE_THETA**-spread, 2).astype(np.float32)
        qkv = Dense(3 * width, bias=True, name="qkv")(x).reshape(
            batch * tiles, patches, 3, c.num_heads, head
        )
        positions = rotary.reshape(batch * tiles, 2, patches)
        axes = np.repeat([0, 1], head // 4)
        q, k = (rotate(qkv[:, :, i], positions, inverse, axes=axes) for i in range(2))
        shape = (batch, -1) if self.full else (batch, tiles, patches)
        q, k, v = (part.reshape(*shape, *part.shape[2:]) for part in (q, k, qkv[:, :, 2]))
        if self.full:
            out = attend_within(q, k, v, image.reshape(batch, -1))
        else:  # padding reads padding, so that no softmax is empty
            out = attend_freely(q, k, v, image[..., :, None] == image[..., None, :])
        return Dense(width, bias=True, name="proj")(out.reshape(x.shape))


class Block(nn.Module):
    """Run a pre-norm transformer layer."""

    config: QwenVisionConfig
    full: bool

    @nn.compact
    def __call__(self, x: Array, rotary: Array, image: Array) -> Array:
        c = self.config
        x = x + VisionAttention(c, self.full, name="attn")(
            RMSNorm(EPSILON, name="norm1")(x), rotary, image
        )
        return x + GatedMLP(c.intermediate_size, bias=True, name="mlp")(
            RMSNorm(EPSILON, name="norm2")(x)
        )


class PatchMerger(MLP):
    """Map each merge group of patches to one token of decoder width."""

    names: tuple[str, str] = ("mlp_0", "mlp_2")

    @nn.compact
    def __call__(self, x: Float[Array, "B U P E"]) -> Float[Array, "B features D"]:
        normed = RMSNorm(EPSILON, name="ln_q")(x)
        return super().__call__(normed.reshape(len(x), -1, self.width))


class VisionTower(nn.Module):
    """Run Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`, in tiles, before the
    merger.
    """

    config: QwenVisionConfig

    def setup(self) -> None:
        c = self.config
        self.patch_embed = PatchEmbed(c)
        self.blocks = [Block(c, full=i in c.fullatt_block_indexes) for i in range(c.depth)]
        self.merger = PatchMerger(c.hidden_size * c.spatial_merge_size**2, c.out_hidden_size)

    def __call__(
        self, patches: Float[Array, "B U P pixels"], window: Int[Array, "B U 4"]
    ) -> Float[Array, "B U P E"]:
        rotary, image = window_contents(self.config, window)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = call_layer(block, x, rotary, image)
        return x

    def project(self, features: Features) -> Float[Array, "B features D"]:
        return self.merger(features)


class QwenVL(Lvlm):
    """Compute Hugging Face's `Qwen2_5_VLForConditionalGeneration`."""

    config: QwenVLConfig

    tower: ClassVar[Callable[..., Any]] = VisionTower

    def setup(self) -> None:
        self.visual = self.tower(self.config.vision_config)
        self.language_model = CausalLM(self.config.text_config)
        # The files hold `model` and `lm_head` at the level of `visual`.
        nn.share_scope(self, self.language_model)

    def encode(
        self, patches: Float[Array, "B U P pixels"], window: Int[Array, "B U fields"]
    ) -> Features:
        """Return tower features of every patch of every tile."""
        return self.visual(patches, window)

    def project(self, features: Features, pool: Pool | None = None) -> Float[Array, "B features D"]:
        """Return the merged tokens of all tiles, window by window.

        `pool` changes nothing here: view P blends the tokens in `QwenImages.slots`.
        """
        return self.visual.project(features)


@dataclass(frozen=True)
class QwenImages(ImageInputs):
    """Read Qwen2.5-VL's images: a tile is an attention window; larger images have more.

    Grids count merge groups, which are the image's tokens: [Y, X] for an image.
    """

    max_pixels: int | None = None
    """Maximum pixels of an image after resizing; None leaves it to the processor's settings."""
    mrope: ClassVar = True

    @property
    def limits(self) -> dict[str, int]:
        """Return the least and most pixels of an image, in the processor's words."""
        size = self.processor.size
        most = self.max_pixels or size["longest_edge"]
        return {"shortest_edge": min(size["shortest_edge"], most), "longest_edge": most}

    @property
    def side(self) -> int:
        """Return the pixels along a merge group, which is a token."""
        vision = self.config.vision_config
        return vision.patch_size * vision.spatial_merge_size

    @staticmethod
    def shapes(config: Any) -> Shapes:
        vision = config.vision_config
        return {
            "patches": ((vision.window_patches, vision.patch_values), np.float32),
            "window": ((4,), np.int32),
        }

    @staticmethod
    def blended(pool: Pool | None) -> int:
        return 1 if pool is None else 4

    def grid(self, size: Size) -> tuple[int, int]:
        """Return rows and columns of merge groups after the processor's resizing.

        Sides are rounded to whole groups. Images with too few or too many pixels are scaled first.
        """
        height, width = size
        if max(size) > MOST_STRETCHED * min(size):
            raise InputError(
                f"image of {width}x{height}: one side is over {MOST_STRETCHED} times the other; "
                "crop or scale it"
            )
        limits, side = self.limits, self.side
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > limits["longest_edge"]:
            shrink = math.sqrt(height * width / limits["longest_edge"])
            rows, columns = (max(1, math.floor(x / shrink / side)) for x in size)
        elif rows * columns * side**2 < limits["shortest_edge"]:
            grow = math.sqrt(limits["shortest_edge"] / (height * width))
            rows, columns = (math.ceil(x * grow / side) for x in size)
        return rows, columns

    def tiles(self, size: Size, images: int = 1) -> int:
        rows, columns = self.grid(size)
        return self._windows(rows) * self._windows(columns)

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        """Return the merged tokens row by row, at M-RoPE positions (0, row, column).

        View P shows averages of 2x2 tokens (fewer at an odd edge) at the smaller grid's positions.
        """
        rows, columns = grid = self.grid(size)
        side, down, across = self.config.vision_config.window_groups, *map(self._windows, grid)
        features = down * across * side**2
        windows = np.arange(features, dtype=np.int32).reshape(down, across, side, side)
        source = windows.swapaxes(1, 2).reshape(down * side, -1)[:rows, :columns]
        if pool is None:
            return Slots(source.reshape(-1, 1), features, positions=_positions(grid))
        if pool.tokens is not None:
            raise InputError(
                "view P: Qwen2.5-VL's number of image tokens depends on the image, and P pools "
                "squares of 2x2; give P without a number"
            )
        pooled = -(-rows // 2), -(-columns // 2)
        padded = np.pad(source, ((0, rows % 2), (0, columns % 2)), constant_values=-1)
        squares = padded.reshape(pooled[0], 2, pooled[1], 2).swapaxes(1, 2).reshape(-1, 4)
        there = squares >= 0
        blend = (there / there.sum(axis=1, keepdims=True)).astype(np.float32)
        return Slots(
            np.where(there, squares, squares[:, :1]),
            features,
            blend=blend,
            positions=_positions(pooled),
        )

    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the windows of each image; raise InputError for other numbers of patches."""
        out = self.processor(images=list(images), size=self.limits, return_tensors="np")
        patches, sizes = np.asarray(out["pixel_values"]), np.asarray(out["image_grid_thw"])
        merge = self.config.vision_config.spatial_merge_size
        grids = [self.grid((image.height, image.width)) for image in images]
        expected = [[1, rows * merge, columns * merge] for rows, columns in grids]
        if sizes.tolist() != expected or patches.shape[1] != self.config.vision_config.patch_values:
            raise InputError(
                f"image processor: gives patches {list(patches.shape)} in grids {sizes.tolist()}, "
                f"and the tower reads {self.config.vision_config.patch_values} values in "
                f"{expected}; {MEND}"
            )
        pieces = np.split(patches, np.cumsum(sizes.prod(axis=1))[:-1])
        return [self.cut(piece, *grid) for piece, grid in zip(pieces, grids, strict=True)]

    def cut(self, patches: np.ndarray, rows: int, columns: int) -> dict[str, np.ndarray]:
        """Return an image's patches window by window, from the processor's merge-group order."""
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
            "window": (np.concatenate([first, extent], axis=1) * group).astype(np.int32),
        }

    def _windows(self, groups: int) -> int:
        return -(-groups // self.config.vision_config.window_groups)


def _positions(grid: tuple[int, int]) -> np.ndarray:
    """Return int32 [3, P]: time, row and column of a still image's tokens."""
    positions = np.indices(grid, np.int32).reshape(2, -1)
    return np.concatenate([np.zeros_like(positions[:1]), positions])
