"""Define the CLIP and SigLIP vision towers, of any resolution and patch size."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import VisionConfig
from jaxspec.models.attention import attend_freely
from jaxspec.models.layers import INIT, MLP, Dense, LayerNorm, call_layer, loop_layers
from jaxspec.sharding import shard_count
from jaxspec.typing import Array, Float

TILE_BLOCK, _PATCHES = 16, 1024
"""Maximum tiles whose attention scores exist at once, and the patches of a tile above which fewer
do. An image may be 37 tiles, and a batch hundreds."""


def tile_block(patches: int) -> int:
    """Return the number of tiles of `patches` patches whose attention scores exist at once."""
    return min(TILE_BLOCK, max(1, TILE_BLOCK * _PATCHES**2 // patches**2))


class Embeddings(nn.Module):
    """Embed patches, and CLIP's class token before them, with learned positions."""

    config: VisionConfig

    @nn.compact
    def __call__(self, pixels: Float[Array, "B Y X 3"]) -> Float[Array, "B P E"]:
        c = self.config
        patch = (c.patch_size, c.patch_size)
        conv = nn.Conv(
            *(c.hidden_size, patch, patch, "VALID"),
            use_bias=not c.class_token,
            kernel_init=INIT,
            name="patch_embedding",
        )
        count = c.side**2 + c.class_token
        positions = nn.Embed(count, c.hidden_size, embedding_init=INIT, name="position_embedding")(
            jnp.arange(count)
        )
        # float32 pixels would make the tower compute in float32, whatever its weights are.
        x = conv(pixels.astype(positions.dtype)).reshape(pixels.shape[0], -1, c.hidden_size)
        if c.class_token:
            cls = self.param("class_embedding", INIT, (c.hidden_size,)).astype(x.dtype)
            x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, c.hidden_size)), x], axis=1)
        return x + positions


class EncoderLayer(nn.Module):
    """Run a pre-norm transformer layer with full attention."""

    config: VisionConfig

    def setup(self) -> None:
        c = self.config
        self.self_attn = SelfAttention(c)
        self.layer_norm1 = LayerNorm(c.layer_norm_eps)
        self.layer_norm2 = LayerNorm(c.layer_norm_eps)
        self.mlp = MLP(c.intermediate_size, c.hidden_size, c.hidden_act)

    def __call__(self, x: Float[Array, "B P E"]) -> Float[Array, "B P E"]:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SelfAttention(nn.Module):
    config: VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B P E"]) -> Float[Array, "B P E"]:
        c = self.config
        q, k, v = (Dense(c.hidden_size, bias=True, name=f"{name}_proj")(x) for name in "qkv")
        attended = attend_pages(c.num_attention_heads, q, k, v)
        return Dense(c.hidden_size, bias=True, name="out_proj")(attended)


def attend_pages(
    heads: int, q: Float[Array, "B Q E"], k: Float[Array, "B P E"], v: Float[Array, "B P E"]
) -> Float[Array, "B Q E"]:
    """Attend within each tile. Many tiles go in blocks of `tile_block` on each device."""
    split = tuple(x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    devices, block = shard_count("batch", len(q)), tile_block(k.shape[1])
    if len(q) <= block * devices:
        return attend_freely(*split).reshape(q.shape)
    tiles = tuple(jnp.swapaxes(x.reshape(devices, -1, *x.shape[1:]), 0, 1) for x in split)
    out = jax.lax.map(lambda tile: attend_freely(*tile), tiles, batch_size=block)
    return jnp.swapaxes(out, 0, 1).reshape(q.shape)


class Encoder(nn.Module):
    config: VisionConfig

    def setup(self) -> None:
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_hidden_layers)]

    def __call__(self, x: Array) -> tuple[Array, ...]:
        """Return the input and the output of every layer."""
        # The last layer is never computed for a caller that reads the one before, as LLaVA does.
        *first, last = self.layers
        states = [x]
        looped = loop_layers(first, x)
        if looped is None:
            for layer in first:
                states.append(call_layer(layer, states[-1]))
        else:
            newest, each = looped
            states += [*each[:-1], newest]
        return *states, call_layer(last, states[-1])


class VisionTransformer(nn.Module):
    config: VisionConfig

    def setup(self) -> None:
        c = self.config
        self.embeddings = Embeddings(c)
        if c.class_token:
            self.pre_layrnorm = LayerNorm(c.layer_norm_eps)  # the checkpoints' own spelling
        self.encoder = Encoder(c)
        self.post_layernorm = LayerNorm(c.layer_norm_eps)

    def __call__(self, pixels: Array) -> tuple[tuple[Array, ...], Array]:
        x = self.embeddings(pixels)
        states = self.encoder(self.pre_layrnorm(x) if self.config.class_token else x)
        last = states[-1][:, 0] if self.config.class_token else states[-1]
        return states, self.post_layernorm(last)


class VisionTower(nn.Module):
    """Compute Hugging Face's `CLIPVisionModel` or `SiglipVisionModel`."""

    config: VisionConfig

    def setup(self) -> None:
        self.vision_model = VisionTransformer(self.config)

    def __call__(
        self, pixels: Float[Array, "B Y X 3"]
    ) -> tuple[tuple[Float[Array, "B P E"], ...], Float[Array, "B *P E"]]:
        """Return all hidden states (the embeddings first), and the normed output.

        The output is CLIP's class token, or all of SigLIP's last states. Under `jit` the layers
        after the one that a caller reads are never computed.
        """
        return self.vision_model(pixels)
