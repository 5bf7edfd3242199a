"""Compute Gemma 4's vision tower: patches attend within their image, squares are averaged.

Patches of a square follow one another, row by row. Their rotary positions are axial: the first half
of each head is turned by the column, the second by the row.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import Gemma4VisionConfig
from jaxspec.models.attention import attend_within
from jaxspec.models.layers import ACTIVATIONS, INIT, Dense, RMSNorm, call_layer, rotate, wide
from jaxspec.typing import Array, Float, Int


class Linear(nn.Module):
    """Multiply by a matrix, and clip inputs and outputs where the file has bounds."""

    features: int
    config: Gemma4VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... out"]:
        linear = Dense(self.features, bias=False, name="linear")
        if not self.config.use_clipped_linears:
            return linear(x)
        low, high = nn.initializers.constant(-jnp.inf), nn.initializers.constant(jnp.inf)
        x = jnp.clip(x, self.param("input_min", low, ()), self.param("input_max", high, ()))
        x = linear(x)
        return jnp.clip(x, self.param("output_min", low, ()), self.param("output_max", high, ()))


class PatchEmbedder(nn.Module):
    """Project patches, and add the learned positions of column and row."""

    config: Gemma4VisionConfig

    @nn.compact
    def __call__(
        self, patches: Float[Array, "B T values"], position: Int[Array, "B T 2"]
    ) -> Float[Array, "B T E"]:
        c = self.config
        shape = 2, c.position_embedding_size, c.hidden_size
        table = self.param("position_embedding_table", INIT, shape)
        x = Dense(c.hidden_size, bias=False, name="input_proj")(patches.astype(table.dtype))
        return x + sum(table[axis, jnp.maximum(position[..., axis], 0)] for axis in (0, 1))


class Attention(nn.Module):
    config: Gemma4VisionConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T E"], position: Int[Array, "B T 2"], image: Int[Array, "B T"]
    ) -> Float[Array, "B T E"]:
        c = self.config
        width, norm = c.num_attention_heads * c.head_dim, partial(RMSNorm, c.rms_norm_eps)
        q, k, v = (
            Linear(width, c, name=f"{name}_proj")(x).reshape(*x.shape[:2], -1, c.head_dim)
            for name in "qkv"
        )
        # Scores have no factor; `attend_within` multiplies them by head_dim ** -0.5.
        q = self._rotated(norm(0, name="q_norm")(q), position, c.head_dim**0.5)
        k = self._rotated(norm(0, name="k_norm")(k), position)
        out = attend_within(q, k, norm(affine=False)(v), image)
        return Linear(c.hidden_size, c, name="o_proj")(out.reshape(*x.shape[:2], width))

    def _rotated(
        self, heads: Float[Array, "B T N H"], position: Int[Array, "B T 2"], scale: float = 1.0
    ) -> Float[Array, "B T N H"]:
        half = self.config.head_dim // 2
        inverse = self.config.rope_theta ** -(np.arange(0, half, 2) / half)
        parts = (
            rotate(part, position[..., axis], inverse.astype(np.float32), scale)
            for axis, part in enumerate(jnp.split(heads, 2, axis=-1))
        )
        return jnp.concatenate([*parts], axis=-1)


class MLP(nn.Module):
    config: Gemma4VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        c = self.config
        gate = Linear(c.intermediate_size, c, name="gate_proj")(x)
        up = Linear(c.intermediate_size, c, name="up_proj")(x)
        return Linear(c.hidden_size, c, name="down_proj")(
            ACTIVATIONS[c.hidden_activation](gate) * up
        )


class Layer(nn.Module):
    """Run a layer with a norm before and after attention and MLP."""

    config: Gemma4VisionConfig

    def setup(self) -> None:
        c = self.config
        norm = partial(RMSNorm, c.rms_norm_eps, 0)
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def __call__(self, x: Array, position: Array, image: Array) -> Array:
        out = self.self_attn(self.input_layernorm(x), position, image)
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Encoder(nn.Module):
    config: Gemma4VisionConfig

    def setup(self) -> None:
        self.layers = [Layer(self.config) for _ in range(self.config.num_hidden_layers)]

    def __call__(self, x: Array, position: Array, image: Array) -> Array:
        for layer in self.layers:
            x = call_layer(layer, x, position, image)
        return x


class VisionTower(nn.Module):
    """Compute Hugging Face's `Gemma4VisionModel`, in tiles of squares."""

    config: Gemma4VisionConfig

    def setup(self) -> None:
        c = self.config
        self.patch_embedder, self.encoder = PatchEmbedder(c), Encoder(c)
        if c.standardize:
            self.std_bias = self.param("std_bias", nn.initializers.zeros, (c.hidden_size,))
            self.std_scale = self.param("std_scale", nn.initializers.ones, (c.hidden_size,))

    def __call__(
        self, pixels: Float[Array, "B U squares values"], position: Int[Array, "B U squares 2"]
    ) -> Float[Array, "B U squares E"]:
        """Return the average of each square's patches. Positions are columns and rows, or -1."""
        c = self.config
        patches, patch_position, image = patches_of(c, pixels, position)
        x = self.encoder(
            self.patch_embedder(2 * patches - 1, patch_position), patch_position, image
        )
        squares = x.reshape(*position.shape[:3], -1, c.hidden_size).astype(wide(x.dtype))
        out = squares.mean(3).astype(x.dtype).astype(squares.dtype) * c.hidden_size**0.5
        if c.standardize:
            out = (out - self.std_bias) * self.std_scale
        return out.astype(x.dtype)


def patches_of(
    config: Gemma4VisionConfig,
    pixels: Float[Array, "B U squares values"],
    position: Int[Array, "B U squares 2"],
) -> tuple[Float[Array, "B T patch"], Int[Array, "B T 2"], Int[Array, "B T"]]:
    """Return the patches of squares, their columns and rows, and their images.

    A square's values are [row, column, colour], and so are a patch's. An image's first square is at
    column and row 0. The image of padding is -1.
    """
    batch, kernel, patch = len(pixels), config.pooling_kernel_size, config.patch_size
    parts = pixels.reshape(batch, -1, kernel, patch, kernel, patch, 3).swapaxes(3, 4)
    inside = np.indices((kernel, kernel))[::-1].reshape(2, -1).T
    patch_position = (position * kernel)[..., None, :] + inside
    first = jnp.all(position[:, :, :1] == 0, axis=-1)
    image = jnp.where(position[..., 0] < 0, -1, jnp.cumsum(first, axis=1) - 1)
    return (
        parts.reshape(batch, -1, patch * patch * 3),
        patch_position.reshape(batch, -1, 2),
        jnp.repeat(image.reshape(batch, -1), kernel**2, axis=1),
    )
