"""Qwen3-VL, dense: a tower that reads whole images, DeepStack, decoder with interleaved M-RoPE.

Bai et al. 2025, "Qwen3-VL Technical Report". Tiles, processor and prompts are those of Qwen2.5-VL,
but a tile is no attention window here: every layer attends within the whole image. DeepStack (Meng
et al. 2024): features of K of the tower's layers are added to the image's slots after the decoder's
first K layers. They follow a token's embedding in its row: a feature row is [embedding, after layer
0, after layer 1, ...], (1 + K) D wide, and text has zeros there.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Qwen3VisionConfig, Qwen3VLConfig
from jaxspec.models.decoder import CausalLM, Lvlm
from jaxspec.models.inputs import Pool, Shapes
from jaxspec.models.layers import INIT, Dense, Embed, LayerNorm, call_layer
from jaxspec.models.lvlms.qwen_vl import (
    EPSILON,
    PatchEmbed,
    QwenImages,
    VisionAttention,
    window_contents,
)
from jaxspec.typing import Array, Float, Int


class MLP(nn.Module):
    """Compute fc2(gelu(fc1(x))); the towers' layers approximate gelu, the mergers do not."""

    width: int
    out: int
    approximate: bool = True

    def setup(self) -> None:
        self.linear_fc1 = Dense(self.width, bias=True)
        self.linear_fc2 = Dense(self.out, bias=True)

    def __call__(self, x: Array) -> Array:
        return self.linear_fc2(nn.gelu(self.linear_fc1(x), approximate=self.approximate))


class Merger(MLP):
    """Map each merge group of patches to one token, normed by patch or by group."""

    norm_groups: bool = False

    def setup(self) -> None:
        super().setup()
        self.norm = LayerNorm(EPSILON)

    def __call__(self, features: Float[Array, "B U P E"]) -> Float[Array, "B features D"]:
        x = features if self.norm_groups else self.norm(features)
        x = x.reshape(x.shape[0], -1, self.width)
        return super().__call__(self.norm(x) if self.norm_groups else x)


class Block(nn.Module):
    """Run a pre-norm transformer layer."""

    config: Qwen3VisionConfig

    @nn.compact
    def __call__(self, x: Array, rotary: Array, image: Array) -> Array:
        c = self.config
        attention = VisionAttention(c, full=True, name="attn")
        x = x + attention(LayerNorm(EPSILON, name="norm1")(x), rotary, image)
        mlp = MLP(c.intermediate_size, c.hidden_size, name="mlp")
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
        self.merger = Merger(group, c.out_hidden_size, approximate=False)
        self.deepstack_merger_list = [
            Merger(group, c.out_hidden_size, approximate=False, norm_groups=True)
            for _ in c.deepstack_visual_indexes
        ]

    def __call__(
        self, patches: Float[Array, "B U P pixels"], window: Int[Array, "B U 6"]
    ) -> Float[Array, "B U P stacked"]:
        """Return the last layer's features, and behind them those of the layers for DeepStack."""
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


class Qwen3VL(Lvlm):
    """Compute Hugging Face's `Qwen3VLForConditionalGeneration`."""

    config: Qwen3VLConfig

    def setup(self) -> None:
        self.visual = VisionTower(self.config.vision_config)
        self.language_model = CausalLM(self.config.text_config)
        nn.share_scope(self, self.language_model)

    def encode(
        self, patches: Float[Array, "B U P pixels"], window: Int[Array, "B U 6"]
    ) -> Float[Array, "B U P stacked"]:
        """Return tower features of every patch of every tile."""
        return self.visual(patches, window)

    def project(
        self, features: Float[Array, "B U P stacked"], pool: Pool | None = None
    ) -> Float[Array, "B features wide"]:
        """Return the merged tokens of all tiles, with the additions of DeepStack."""
        return self.visual.project(features)


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
