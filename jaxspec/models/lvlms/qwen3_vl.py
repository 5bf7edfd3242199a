"""Define dense Qwen3-VL: a tower that reads whole images, DeepStack, decoder with interleaved
M-RoPE.

Bai et al. 2025, "Qwen3-VL Technical Report". Tiles, processor and prompts are those of Qwen2.5-VL,
but a tile is no attention window here: every layer attends within the whole image. DeepStack (Meng
et al. 2024): features of K of the tower's layers are added to the image's slots after the decoder's
first K layers. They follow a token's embedding in its row: a feature row is [embedding, after layer
0, after layer 1, ...], (1 + K) D wide, and text has zeros there.
"""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Qwen3VisionConfig, Qwen3VLConfig
from jaxspec.models.inputs import Shapes
from jaxspec.models.layers import INIT, MLP, Embed, LayerNorm, call_layer
from jaxspec.models.lvlms.qwen_vl import (
    EPSILON,
    PatchEmbed,
    QwenImages,
    QwenVL,
    VisionAttention,
    window_contents,
)
from jaxspec.typing import Array, Float, Int

_NAMES = "linear_fc1", "linear_fc2"


class Merger(MLP):
    """Map each merge group of patches to one token, normed by patch or by group."""

    names: tuple[str, str] = _NAMES
    norm_groups: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B U P E"]) -> Float[Array, "B features D"]:
        norm = LayerNorm(EPSILON, name="norm")
        x = x if self.norm_groups else norm(x)
        x = x.reshape(x.shape[0], -1, self.width)
        return super().__call__(norm(x) if self.norm_groups else x)


class Block(nn.Module):
    """Run a pre-norm transformer layer."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(self, x: Array, rotary: Array, image: Array) -> Array:
        c = self.config
        attention = VisionAttention(c, full=True, name="attn")
        x = x + attention(LayerNorm(EPSILON, name="norm1")(x), rotary, image)
        mlp = MLP(c.intermediate_size, c.hidden_size, c.hidden_act, _NAMES, name="mlp")
        return x + mlp(LayerNorm(EPSILON, name="norm2")(x))


class VisionTower(nn.Module):
    """Compute Hugging Face's `Qwen3VLVisionModel`, in tiles, before the mergers."""

    config: Qwen3VisionConfig

    def setup(self) -> None:
        c = self.config
        group = c.hidden_size * c.spatial_merge_size**2
        self.patch_embed = PatchEmbed(c, bias=True)
        self.pos_embed = Embed(c.num_position_embeddings, c.hidden_size, embedding_init=INIT)
        self.blocks = [Block(c) for _ in range(c.depth)]
        self.merger = Merger(group, c.out_hidden_size)
        self.deepstack_merger_list = [
            Merger(group, c.out_hidden_size, norm_groups=True) for _ in c.deepstack_visual_indexes
        ]

    def __call__(
        self, patches: Float[Array, "B U P pixels"], window: Int[Array, "B U 6"]
    ) -> Float[Array, "B U P stacked"]:
        """Return the last layer's features, followed by the features of DeepStack's layers."""
        rotary, image = window_contents(self.config, window)
        x = self.patch_embed(patches)
        x += self._positions(rotary, window[..., 4:]).astype(x.dtype)
        deep = []
        for i, block in enumerate(self.blocks):
            x = call_layer(block, x, rotary, image)
            if i in self.config.deepstack_visual_indexes:
                deep.append(x)
        return jnp.concatenate([x, *deep], axis=-1)

    def project(self, features: Float[Array, "B U P stacked"]) -> Float[Array, "B features wide"]:
        """Return the merged tokens of all tiles, with the additions of DeepStack."""
        mergers = self.merger, *self.deepstack_merger_list
        parts = jnp.split(features, len(mergers), axis=-1)
        merged = [merger(part) for merger, part in zip(mergers, parts, strict=True)]
        return jnp.concatenate(merged, axis=-1)

    def _positions(
        self, at: Int[Array, "B U 2 P"], grid: Int[Array, "B U 2"]
    ) -> Float[Array, "B U P E"]:
        """Return the learned positions, a square, stretched over the image's grid of patches."""
        table = self.pos_embed.embedding.astype(jnp.float32)
        side = self.config.position_side
        # A grid of 5 rows and a square of 9: rows 0, 2, 4, 6, 8 of the square.
        scaled = at * jnp.float32(side - 1) / jnp.maximum(grid[..., None] - 1, 1)
        scaled = jnp.clip(scaled, 0, side - 1)  # padding is past the grid
        low = jnp.floor(scaled).astype(jnp.int32)
        high, share = jnp.minimum(low + 1, side - 1), scaled - low
        rows = (low[..., 0, :], 1 - share[..., 0, :]), (high[..., 0, :], share[..., 0, :])
        columns = (low[..., 1, :], 1 - share[..., 1, :]), (high[..., 1, :], share[..., 1, :])
        out = jnp.zeros((), jnp.float32)
        for row, vertical in rows:
            for column, horizontal in columns:
                corner = jnp.take(table, row * side + column, axis=0)
                out += (vertical * horizontal)[..., None] * corner
        return out


class Qwen3VL(QwenVL):
    """Compute Hugging Face's `Qwen3VLForConditionalGeneration`."""

    config: Qwen3VLConfig

    tower: ClassVar = VisionTower


class Qwen3Images(QwenImages):
    """Make Qwen2.5-VL's tiles; `window` also has the image's height and width in patches."""

    @staticmethod
    def shapes(config: Any) -> Shapes:
        return {**QwenImages.shapes(config), "window": ((6,), np.int32)}

    def cut(self, patches: np.ndarray, rows: int, columns: int) -> dict[str, np.ndarray]:
        out = super().cut(patches, rows, columns)
        group = self.config.vision_config.spatial_merge_size
        grid = np.full((len(out["window"]), 2), (rows * group, columns * group), np.int32)
        return out | {"window": np.concatenate([out["window"], grid], axis=1)}
