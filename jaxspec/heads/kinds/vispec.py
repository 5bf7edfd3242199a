"""Define ViSpec's head (Kang et al. 2025, arXiv 2509.15235): EAGLE-1 on compressed images.

Two learned queries attend to the embeddings of an image. The first makes the only slot of the image
that the head reads, at the position of its last token; a bias of -inf hides the others. The second
makes a vector, which `img_fc` joins to the hidden states of all tokens after the image. Images
without text between them are one.

Its files are an EAGLE-1 head's, and a compressor's:

| tensor                                     | shape                                |
|--------------------------------------------|--------------------------------------|
| those of an EAGLE-1 head                   | see `eagle1.py`                      |
| `imadpt.q`                                 | [queries, heads, D / heads]          |
| `imadpt.{k,v}_proj.weight`                 | [D, D], with biases as the layer's   |
| `imadpt.o_proj.weight`                     | [D, D]                               |
| `img_fc.weight`, `img_fc.bias`             | [D, 2 D], optional [D]               |

`img_fc` reads a hidden state and, behind it, an image's vector.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.heads.files import Stored
from jaxspec.heads.head import Prompt, Reading, cache_of
from jaxspec.heads.kinds.eagle1 import FC, Eagle1Config, Eagle1Head, Eagle1Kind
from jaxspec.heads.states import ImageRule
from jaxspec.models.layers import INIT, Dense
from jaxspec.typing import Array, Bool, Float, Int, Vectors


@dataclass(frozen=True)
class VispecConfig(Eagle1Config):
    """Describe an EAGLE-1 head with a compressor of images, whose files have an EAGLE-1 head's
    config.json."""

    images: ImageRule = "compressed"
    queries: int = 2
    """Learned queries: all except the last make slots of an image, and the last makes a vector that
    joins the hidden states of the text after it."""

    title: ClassVar = "ViSpec head"
    name: ClassVar = "vispec"
    reads_spans: ClassVar = True
    packs: ClassVar = False  # all blocks of a row read its last image's vector
    model_type: ClassVar = title
    rules: ClassVar = ("compressed",)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"architectures": ["LlamaForCausalLMViSpec"]}


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


class ImageCache(KVCache):
    """Hold a head's keys with the vector of each row's last image."""

    image: Float[Array, "B one D"] | None = None


class VispecHead(Eagle1Head):
    """Hold a ViSpec head's `fc`, `img_fc`, compressor and layer."""

    config: VispecConfig

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.imadpt = Compressor(self.config)
        self.img_fc = Dense(text.hidden_size, text.fc_bias)

    def context(self, reading: Reading, prompt: Prompt) -> ImageCache:
        """Make the keys of prompts, with the compressor's vectors in the last slots of images.

        With 3 vectors an image in slots 2 to 6 gets two of them, in slots 5 and 6; a bias of -inf
        masks slots 2 to 4.
        """
        states, embeds = reading.states, prompt.embeds
        assert states is not None
        assert embeds is not None
        states, tokens = states[:, : embeds.shape[1]], jnp.roll(embeds, -1, axis=1)
        if prompt.images is None:
            nothing = jnp.zeros((len(states), 1, states.shape[-1]), states.dtype)
            x, bias = self._joined(tokens, states, nothing), jnp.zeros(states.shape[:2])
            return self._image_cache(x, prompt, bias, nothing)
        mask, ends, vectors = self._compressed(prompt)
        x = self._joined(tokens, states, _vector_before(vectors, ends))
        number = jnp.cumsum(ends, axis=1) - ends
        filled = jnp.zeros_like(mask)
        for i in range(self.config.queries - 1):  # from an image's last slot to the ones before
            slots = mask & jnp.roll(ends, -i, axis=1)
            x = jnp.where(slots[..., None], _image_vector(vectors[:, :, -2 - i], number), x)
            filled |= slots
        last = _vector_before(vectors, jnp.pad(ends, ((0, 0), (0, 1))))[:, -1:]
        return self._image_cache(x, prompt, jnp.where(mask & ~filled, -jnp.inf, 0.0), last)

    def fuse(self, embeds: Vectors, before: Vectors, context: Any, slots: Any) -> Vectors:
        return self._joined(embeds, before, context.image)

    def _joined(
        self, embeds: Float[Array, "B T D"], before: Float[Array, "B T D"], image: Array
    ) -> Float[Array, "B T D"]:
        """Return the layer's inputs.

        image: Vector of the last image before each token, [B, 1 or T, D].
        """
        image = jnp.broadcast_to(image, before.shape)
        joined = self.img_fc(jnp.concatenate([before, image], axis=-1))
        return self.fc(jnp.concatenate([embeds, joined], axis=-1))

    def _image_cache(self, x: Array, prompt: Prompt, bias: Array, image: Array) -> ImageCache:
        cache = cache_of([layer.keys_values(x, prompt.rotary) for layer in self.layers], bias=bias)
        return ImageCache(**vars(cache), image=image)

    def _compressed(
        self, prompt: Prompt
    ) -> tuple[Bool[Array, "B L"], Bool[Array, "B L"], Float[Array, "B I queries D"]]:
        """Return the head's slots of images, the last slot of each image, and its vectors."""
        assert prompt.image_embeds is not None
        assert prompt.images is not None
        assert prompt.spans is not None
        mask = jnp.roll(prompt.images, -1, axis=1).at[:, -1].set(False)
        ends = mask & ~jnp.roll(mask, -1, axis=1)
        number = jnp.cumsum(ends, axis=1) - ends
        inside = mask[:, None] & (number[:, None] == jnp.arange(prompt.spans.shape[1])[:, None])
        return mask, ends, self.imadpt(jnp.roll(prompt.image_embeds, -1, axis=1), inside)


def _image_vector(
    vectors: Float[Array, "B I D"], number: Int[Array, "B L"]
) -> Float[Array, "B L D"]:
    """Return the vector of an image at each slot."""
    return jnp.take_along_axis(vectors, number[..., None], axis=1, mode="clip")


def _vector_before(
    vectors: Float[Array, "B I queries D"], ends: Bool[Array, "B L"]
) -> Float[Array, "B L D"]:
    """Return the vector of the last image that ends before each slot; zeros before the first."""
    before = jnp.cumsum(ends, axis=1) - ends
    return jnp.where((before > 0)[..., None], _image_vector(vectors[:, :, -1], before - 1), 0)


class VispecKind(Eagle1Kind[VispecConfig]):
    """Read and write EAGLE-1 heads with a compressor."""

    def completed(self, config: VispecConfig, stored: Stored) -> tuple[VispecConfig, Stored]:
        config, stored = super().completed(config, stored)
        if "imadpt.q" in stored:
            config = replace(config, queries=stored["imadpt.q"].shape[0])
        return config, stored


KIND = VispecKind(
    config=VispecConfig,
    module=VispecHead,
    titles=("ViSpec",),
    about="ViSpec head: an EAGLE-1 head that reads compressed images",
    names="vispec",
    tensors=r"img_fc\.|imadpt\.",
    axes=(
        *FC,
        (r"imadpt/[kvo]_proj/weight", (None, "embed")),
        (r"imadpt/q", ()),
    ),
)
