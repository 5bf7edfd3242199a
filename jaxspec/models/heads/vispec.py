"""Compute ViSpec's head (Kang et al. 2025, arXiv 2509.15235): EAGLE-1 on compressed images.

Two learned queries attend to the embeddings of an image. The first makes the only slot of the image
that the head reads, at the position of its last token; a bias of -inf hides the others. The second
makes a vector, which `img_fc` joins to the hidden states of all tokens after the image. Images
without text between them are one.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import VispecConfig
from jaxspec.models.heads.eagle1 import Eagle1Head
from jaxspec.models.heads.states import ShownImages
from jaxspec.models.layers import INIT, Dense
from jaxspec.typing import Array, Bool, Float, Int, Params


class Compressor(nn.Module):
    """Attend from the learned queries to the embeddings of each image."""

    config: VispecConfig

    def setup(self) -> None:
        c, text = self.config, self.config.text_config
        heads, width = text.num_attention_heads, text.head_dim
        self.q = self.param("q", INIT, (c.queries, heads, width))
        self.k_proj = Dense(heads * width, text.qkv_bias)
        self.v_proj = Dense(heads * width, text.qkv_bias)
        self.o_proj = Dense(text.hidden_size, bias=False)

    def __call__(
        self, embeds: Float[Array, "B L D"], images: Bool[Array, "B I L"]
    ) -> Float[Array, "B I queries D"]:
        """Return vectors of each image, for the slots that it takes."""
        k, v = (
            project(embeds).reshape(*embeds.shape[:2], *self.q.shape[1:])
            for project in (self.k_proj, self.v_proj)
        )
        scores = jnp.einsum("QNH,BLNH->BQNL", self.q, k, preferred_element_type=jnp.float32)
        scores = (scores * self.q.shape[-1] ** -0.5)[:, None]
        inside = images[:, :, None, None]
        scores = jnp.where(inside, scores, jnp.finfo(scores.dtype).min)  # absent ones: the mean
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("BIQNL,BLNH->BIQNH", probs, v)
        return self.o_proj(out.reshape(*out.shape[:3], -1))


class VispecHead(Eagle1Head):
    """Hold a ViSpec head's `fc`, `img_fc`, compressor and layer."""

    config: VispecConfig

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.imadpt = Compressor(self.config)
        self.img_fc = Dense(text.hidden_size, text.fc_bias)

    def fuse(
        self,
        embeds: Float[Array, "... D"],
        before: Float[Array, "... D"],
        image: Float[Array, "... D"] | None = None,
    ) -> Float[Array, "... D"]:
        """Return the layer's inputs.

        image: Vector of the last image before each token; None before any image.
        """
        image = jnp.zeros_like(before) if image is None else jnp.broadcast_to(image, before.shape)
        return super().fuse(embeds, self.img_fc(jnp.concatenate([before, image], axis=-1)))

    def layer_inputs(
        self,
        embeds: Float[Array, "B L D"],
        states: Float[Array, "B L D"],
        images: ShownImages | None,
    ) -> tuple[Float[Array, "B L D"], Float[Array, "B L"] | None]:
        tokens = jnp.roll(embeds, -1, axis=1)
        if images is None:
            return self.fuse(tokens, states), jnp.zeros(states.shape[:2])
        mask, ends, vectors = self._compressed(images)
        x = self.fuse(tokens, states, _last(vectors, ends))
        number = jnp.cumsum(ends, axis=1) - ends
        filled = jnp.zeros_like(mask)
        for i in range(self.config.queries - 1):  # from an image's last slot to the ones before
            slots = mask & jnp.roll(ends, -i, axis=1)
            x = jnp.where(slots[..., None], _pick(vectors[:, :, -2 - i], number), x)
            filled |= slots
        return x, jnp.where(mask & ~filled, -jnp.inf, 0.0)

    def last_image(self, images: ShownImages, length: Int[Array, " B"]) -> Float[Array, "B one D"]:
        """Return the vector of each row's last image; zeros for a row without any."""
        _, ends, vectors = self._compressed(images)
        ends &= jnp.arange(ends.shape[1]) < length[:, None]
        return _last(vectors, jnp.pad(ends, ((0, 0), (0, 1))))[:, -1:]

    def _compressed(
        self, images: ShownImages
    ) -> tuple[Bool[Array, "B L"], Bool[Array, "B L"], Float[Array, "B I queries D"]]:
        """Return the head's slots of images, the last slot of each image, and its vectors."""
        assert images.embeds is not None
        mask = jnp.roll(images.mask, -1, axis=1).at[:, -1].set(False)
        ends = mask & ~jnp.roll(mask, -1, axis=1)
        number = jnp.cumsum(ends, axis=1) - ends
        inside = mask[:, None] & (number[:, None] == jnp.arange(images.most)[:, None])
        return mask, ends, self.imadpt(jnp.roll(images.embeds, -1, axis=1), inside)

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        width = self.config.text_config.hidden_size
        image = ShownImages(jnp.zeros((1, 1), bool), jnp.zeros((1, 1, width)), 1)
        return self.random(key, width, image)


def _pick(vectors: Float[Array, "B I D"], number: Int[Array, "B L"]) -> Float[Array, "B L D"]:
    """Return the vector of an image at each slot."""
    return jnp.take_along_axis(vectors, number[..., None], axis=1, mode="clip")


def _last(
    vectors: Float[Array, "B I queries D"], ends: Bool[Array, "B L"]
) -> Float[Array, "B L D"]:
    """Return the vector of the last image that ends before each slot; zeros before the first."""
    before = jnp.cumsum(ends, axis=1) - ends
    return jnp.where((before > 0)[..., None], _pick(vectors[:, :, -1], before - 1), 0)
