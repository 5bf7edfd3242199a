"""Qwen2.5-VL: a tower of windowed attention over images of any size -> merger -> merge -> decoder with M-RoPE.

Bai et al. 2025, "Qwen2.5-VL Technical Report". A unit is one attention window: a square of P patches (8 x 8 in the
published models) in the order of their merge groups (2 x 2 patches, which become one token), padded at the image's
right and lower edge. Windowed layers attend within the unit, the few full ones within the image.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import QwenVisionConfig, QwenVLConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.inputs import TEXT, Pool, merge
from jaxspec.models.layers import INIT, QUERY_BLOCK, GatedMLP, RMSNorm, call_layer, dense, rotate
from jaxspec.typing import Array, Float, Int

EPSILON, ROPE_THETA = 1e-6, 10000.0
"""Constants of the tower's norms and rotary positions; no configuration names them."""


def window_places(config: QwenVisionConfig) -> np.ndarray:
    """int32 [2, P]: row and column of a window's patches, merge group by merge group."""
    groups, group = config.window_groups, config.spatial_merge_size
    places = np.indices((groups * group,) * 2, np.int32)
    return places.reshape(2, groups, group, groups, group).swapaxes(2, 3).reshape(2, -1)


def window_contents(config: QwenVisionConfig, place: Int[Array, "B U 4"]) -> tuple[Array, Array]:
    """Where a row's windows lie: rotary positions [B,U,2,P] of their patches, and the number [B,U,P] of the image
    that each patch belongs to, -1 where it is padding.

    `place` is row and column of a window's first patch, then its height and width in patches; an image's first
    window is the one at row and column 0.
    """
    inside = jnp.asarray(window_places(config))
    first, extent = place[..., :2, None], place[..., 2:, None]
    image = jnp.cumsum(jnp.all(place[..., :2] == 0, axis=-1) & (place[..., 2] > 0), axis=-1) - 1
    return first + inside, jnp.where(jnp.all(inside < extent, axis=-2), image[..., None], -1)


class PatchEmbed(nn.Module):
    """Flat patches [channel, time, row, column] to tower width; the files hold it as a convolution."""

    config: QwenVisionConfig

    @nn.compact
    def __call__(self, patches: Float[Array, "... pixels"]) -> Float[Array, "... E"]:
        c = self.config
        shape = (c.temporal_patch_size, c.patch_size, c.patch_size, c.in_channels, c.hidden_size)
        kernel = self.param("proj", lambda key: {"kernel": INIT(key, shape)})["kernel"]
        return patches.astype(kernel.dtype) @ kernel.transpose(3, 0, 1, 2, 4).reshape(-1, c.hidden_size)


class VisionAttention(nn.Module):
    """Attention with rotary positions of two axes; within windows or, if `full`, within images."""

    config: QwenVisionConfig
    full: bool

    @nn.compact
    def __call__(
        self, x: Float[Array, "B U P E"], rotary: Int[Array, "B U 2 P"], image: Int[Array, "B U P"]
    ) -> Float[Array, "B U P E"]:
        c = self.config
        batch, units, patches, width = x.shape
        head = width // c.num_heads
        spread = np.arange(0, head // 2, 2) / (head // 2)
        inverse = np.tile(ROPE_THETA**-spread, 2).astype(np.float32)
        qkv = dense(3 * width, bias=True, name="qkv")(x).reshape(batch * units, patches, 3, c.num_heads, head)
        places = rotary.reshape(batch * units, 2, patches)
        q, k = (rotate(qkv[:, :, i], places, inverse, sections=(head // 4,) * 2) for i in range(2))
        q, k, v = (part.reshape(batch, units, *part.shape[1:]) for part in (q, k, qkv[:, :, 2]))
        out = self._within_images(q, k, v, image) if self.full else _attend(q, k, v, image, image)
        return dense(width, bias=True, name="proj")(out.reshape(x.shape))

    @staticmethod
    def _within_images(q: Array, k: Array, v: Array, image: Array) -> Array:
        """Queries go in blocks of about `QUERY_BLOCK`: five large images never hold a square of scores."""
        keys, values, owners = (part.reshape(part.shape[0], -1, *part.shape[3:]) for part in (k, v, image))
        block = max(1, QUERY_BLOCK // q.shape[2])
        units = jnp.moveaxis(q, 1, 0), jnp.moveaxis(image, 1, 0)
        out = jax.lax.map(lambda unit: _attend(unit[0], keys, values, unit[1], owners), units, batch_size=block)
        return jnp.moveaxis(out, 0, 1)


def _attend(q: Array, k: Array, v: Array, mine: Array, theirs: Array) -> Array:
    """Patches read those of the same image (padding reads padding, so that no softmax is empty)."""
    scores = jnp.einsum("...QNH,...PNH->...NQP", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    same = mine[..., None, :, None] == theirs[..., None, None, :]
    probs = jax.nn.softmax(jnp.where(same, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("...NQP,...PNH->...QNH", probs, v)


class Block(nn.Module):
    """Pre-norm transformer layer."""

    config: QwenVisionConfig
    full: bool

    @nn.compact
    def __call__(self, x: Array, rotary: Array, image: Array) -> Array:
        c = self.config
        x = x + VisionAttention(c, self.full, name="attn")(RMSNorm(EPSILON, name="norm1")(x), rotary, image)
        return x + GatedMLP(c.intermediate_size, bias=True, name="mlp")(RMSNorm(EPSILON, name="norm2")(x))


class PatchMerger(nn.Module):
    """Each merge group of patches to one token of decoder width."""

    config: QwenVisionConfig

    def setup(self) -> None:
        c = self.config
        self.ln_q = RMSNorm(EPSILON)
        self.mlp_0 = dense(c.hidden_size * c.spatial_merge_size**2, bias=True)
        self.mlp_2 = dense(c.out_hidden_size, bias=True)

    def __call__(self, features: Float[Array, "B U P E"]) -> Float[Array, "B features D"]:
        c = self.config
        groups = self.ln_q(features).reshape(features.shape[0], -1, c.hidden_size * c.spatial_merge_size**2)
        return self.mlp_2(nn.gelu(self.mlp_0(groups), approximate=False))


class VisionTower(nn.Module):
    """Hugging Face's `Qwen2_5_VisionTransformerPretrainedModel`, in units; the merger is called apart."""

    config: QwenVisionConfig

    def setup(self) -> None:
        c = self.config
        self.patch_embed = PatchEmbed(c)
        self.blocks = [Block(c, full=i in c.fullatt_block_indexes) for i in range(c.depth)]
        self.merger = PatchMerger(c)

    def __call__(self, patches: Float[Array, "B U P pixels"], place: Int[Array, "B U 4"]) -> Float[Array, "B U P E"]:
        rotary, image = window_contents(self.config, place)
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = call_layer(block, x, rotary, image)
        return x


class QwenVL(nn.Module):
    """Hugging Face's `Qwen2_5_VLForConditionalGeneration`."""

    config: QwenVLConfig

    def setup(self) -> None:
        self.visual = VisionTower(self.config.vision_config)
        self.language_model = CausalLM(self.config.text_config)
        nn.share_scope(self, self.language_model)  # the files hold `model` and `lm_head` beside `visual`

    def encode(self, patches: Float[Array, "B U P pixels"], place: Int[Array, "B U 4"]) -> Float[Array, "B U P E"]:
        """Tower features of every patch of every unit."""
        return self.visual(patches, place)

    def project(self, features: Float[Array, "B U P E"], pool: Pool | None = None) -> Float[Array, "B features D"]:
        """The merged tokens of all units, window by window. View P blends them: `pool` changes nothing here."""
        return self.visual.merger(features)

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        patches: Float[Array, "B U P pixels"],
        place: Int[Array, "B U 4"],
        sources: Int[Array, "B L 1"] | None = None,
        rotary: Int[Array, "B 3 L"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Logits of a whole right-padded batch, no cache. `sources` and `rotary` are those of its `PromptRows`;
        without them no slot shows an image."""
        table = self.project(self.encode(patches, place))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        sources = jnp.full((*tokens.shape, 1), TEXT) if sources is None else sources
        embeds = merge(self.language_model.embed(tokens), table, sources, None)
        return self.language_model.logits(self.language_model.hidden(embeds, positions, rotary=rotary)[0])
