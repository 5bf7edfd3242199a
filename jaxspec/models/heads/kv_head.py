"""Compute AASD's KV head: decoder layers that read the target's keys and values.

It embeds a token, runs it through its own layers and scores the next token. Embedding and output
head are the target's, frozen. Its queries attend to three kinds of keys and values: the target's
for text, unchanged; the target's for each image, pooled from n to k slots by the KV projector
(K* = W_K K and V* = W_V V); and its own for the tokens that it drafts.

Cached keys are rotated already, and pooling them pools scores: q . (sum_j W_cj K_j) =
sum_j W_cj (q . K_j). So queries and the head's own keys take the tokens' positions in the target's
row, with uncompressed images.

Decoding and training use the same parameters in two ways:

- decoding: `decoding/sources/` makes an ordinary `KVCache`, and the head is a `CausalLM` over
  it (`joined`);
- training: `KVHead` runs blocks of J tokens from A anchors at once (`anchored.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.config import KVHeadConfig
from jaxspec.models.decoder import Layer
from jaxspec.models.heads.anchored import (
    NEVER,
    AnchoredAttention,
    Context,
    TargetAttention,
    block_reader,
    one_by_one,
)
from jaxspec.models.heads.borrowed import drawn, in_float32
from jaxspec.models.heads.reading import Blocks, HeadRows, Reading, head_rows, states_before
from jaxspec.models.inputs import Pool
from jaxspec.models.layers import INIT, Dense, text_norm, wide
from jaxspec.typing import Array, Bool, Float, Int, Params


class KVProjector(nn.Module):
    """Pool the keys and values of images from n slots to k."""

    config: KVHeadConfig

    @nn.compact
    def __call__(
        self,
        k: Float[Array, "B I tokens K H"],
        v: Float[Array, "B I tokens K H"],
        there: Bool[Array, "B I tokens"],
    ) -> tuple[Float[Array, "B I slots K H"], Float[Array, "B I slots K H"]]:
        c = self.config
        if c.pooling == "attention":
            shape = (c.image_slots, *k.shape[-2:])
            queries = self.param("queries", INIT, shape)
            scores = jnp.einsum(
                "cKH,BInKH->BIKcn", queries, k, preferred_element_type=wide(k.dtype)
            )
            # Finite, because all slots of an absent image are masked.
            scores = jnp.where(there[:, :, None, None], scores * k.shape[-1] ** -0.5, -1e30)
            weights = jax.nn.softmax(scores, axis=-1).astype(k.dtype)
            return jnp.einsum("BIKcn,BInKH->BIcKH", weights, k), jnp.einsum(
                "BIKcn,BInKH->BIcKH", weights, v
            )

        def pooled(name: str, x: Array) -> Array:
            matrix = self.param(name, lambda _: jnp.asarray(average_pooling(c)))
            out = jnp.einsum(
                "cn,BInKH->BIcKH", matrix.astype(x.dtype), x, preferred_element_type=wide(x.dtype)
            )
            return out.astype(x.dtype)

        return pooled("k", k), pooled("v", v)


def average_pooling(config: KVHeadConfig) -> np.ndarray:
    """Return float32 [k, n] of averages over squares of the image, or over runs.

    Squares need square numbers n and k.
    """
    square = math.isqrt(config.image_tokens) ** 2 == config.image_tokens
    square &= math.isqrt(config.image_slots) ** 2 == config.image_slots
    return Pool(config.image_slots, "avg2d" if square else "avg1d").matrix(config.image_tokens)


class KVHead(nn.Module):
    """Hold a head's parameters, and run its training pass."""

    config: KVHeadConfig

    def setup(self) -> None:
        c, text = self.config, self.config.text_config
        layers = map(text.of_layer, range(text.num_hidden_layers))
        attention = AnchoredAttention if c.own_keys else TargetAttention
        self.layers = [Layer(layer, attention) for layer in layers]
        self.norm = text_norm(text)
        if c.reads_hidden:
            self.fc = Dense(text.hidden_size, bias=False)
        if c.pools:
            self.kv_projector = KVProjector(c)
        if c.pools and c.slot_bias:
            weight = math.log(c.image_tokens / c.image_slots)
            self.slot_bias = self.param("slot_bias", lambda _: jnp.full((1,), weight, jnp.float32))

    def context(
        self, k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], rows: HeadRows
    ) -> Context:
        """Return the slots that the head reads of the target, of what `keys_of` returns."""
        c = self.config
        batch, kv_heads, _, width = k.shape
        since = (
            jnp.where(rows.text < 0, NEVER, rows.text)
            if c.reads_text
            else jnp.full_like(rows.text, NEVER)
        )
        k_text, v_text = (_gather(leaf, rows.text) for leaf in (k, v))
        if not c.pools:
            return Context(k_text, v_text, since, None)
        at = rows.images.reshape(batch, -1)
        shape = (*rows.images.shape, kv_heads, width)
        k_image, v_image = self.kv_projector(
            _gather(k, at).reshape(shape), _gather(v, at).reshape(shape), rows.images >= 0
        )
        slots = k_image.shape[1] * c.image_slots
        last = rows.images.max(-1)
        since = jnp.concatenate(
            [jnp.repeat(jnp.where(last < 0, NEVER, last), c.image_slots, axis=1), since], axis=1
        )
        bias = None
        if c.slot_bias:
            bias = jnp.where(jnp.arange(since.shape[1]) < slots, self.slot_bias, 0.0)
            bias = jnp.broadcast_to(bias, since.shape)
        flat = (batch, slots, kv_heads, width)
        return Context(
            jnp.concatenate([k_image.reshape(flat), k_text], axis=1),
            jnp.concatenate([v_image.reshape(flat), v_text], axis=1),
            since,
            bias,
        )

    def contexts(self, context: Context) -> list[Context]:
        """Return the context of each of the head's layers."""
        layers = self.config.key_layers
        return context.split(len(layers)) if layers else [context] * len(self.layers)

    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """Return the layers' inputs from embeddings and the hidden states that predicted them."""
        return self.fc(jnp.concatenate([embeds, before], axis=-1))

    def __call__(
        self,
        embeds: Float[Array, "B A J D"],
        anchors: Int[Array, "B A"],
        rotary: Int[Array, "B A J"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S H"],
        rows: HeadRows,
        before: Float[Array, "B A D"] | None = None,
    ) -> Float[Array, "B A J D"]:
        """Return the final-normed hidden states of blocks of J tokens that begin at the anchors.

        Args:
          embeds: The target's embeddings of the blocks' tokens.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the tokens.
          k, v: What `keys_of` returns.
          rows: Slots to read.
          before: The target's hidden states before the anchors, for a head that reads them.
        """
        contexts = self.contexts(self.context(k, v, rows))
        read = block_reader(self.layers, contexts, anchors)
        return self.blocks(read, embeds, rotary, before)

    def blocks(
        self,
        read: Callable[[Array, Array], Array],
        embeds: Float[Array, "B A J D"],
        rotary: Array,
        before: Float[Array, "B A D"] | None,
    ) -> Float[Array, "B A J D"]:
        """Return what `__call__` does, by a `block_reader`."""
        if before is None:
            return self.norm(read(embeds, rotary))

        def step(token: Array, state: Array, rotary: Array) -> tuple[Array, Array]:
            normed = self.norm(read(self.fuse(token, state), rotary))
            return normed, normed

        return one_by_one(step, embeds, before[:, :, None], rotary)

    @nn.nowrap
    def slots(self, slot_images: Sequence[np.ndarray], width: int, images: int) -> HeadRows | None:
        """Return the slots of whole rows that the head reads, see `head_rows`."""
        return head_rows(self.config, slot_images, width, images)

    @nn.nowrap
    def reading(self, read: Callable[[tuple[int, ...] | None], tuple[Array, KVCache]]) -> Reading:
        """Return what training keeps of a target's pass.

        read: Returns the final hidden states of whole rows, and the cache, in which the hidden
          states of the given layers are kept.
        """
        hidden, cache = read(None)
        k, v = keys_of(self.config, cache)
        return Reading(hidden, (k,), (v,))

    @nn.nowrap
    def inputs(self, blocks: Blocks, reading: Reading) -> tuple[Any, ...]:
        """Return the arguments of `__call__` for blocks of whole rows."""
        before = None
        if self.config.reads_hidden:
            before = states_before(reading.hidden, blocks.anchors)
        starts = blocks.anchors, blocks.rotary(blocks.at)
        return blocks.embeds, *starts, *reading.k, *reading.v, blocks.slots, before

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32.

        Layers are copies of the target's last ones, or of those whose keys they read, and the norm
        is its norm; without a target all are random. The KV projector averages.
        """
        c, text = self.config, self.config.text_config
        images = jnp.zeros((1, 1, max(c.image_tokens, 1)), jnp.int32)
        layer = text.of_layer(0)
        heads = max(len(c.key_layers), 1) * layer.num_key_value_heads
        leaf = jnp.zeros((1, heads, 1, layer.head_dim))
        zero = jnp.zeros((1, 1), jnp.int32)
        embeds = jnp.zeros((1, 1, 1, text.hidden_size))
        before = embeds[:, :, 0] if c.reads_hidden else None
        rows = HeadRows(zero, images)
        params = drawn(self, key, embeds, zero, zero[..., None], leaf, leaf, rows, before)
        if c.reads_hidden:  # at first only the embedding
            params["fc"] = {"weight": jnp.eye(text.hidden_size, 2 * text.hidden_size)}
        if target is None:
            return params
        decoder = target["model"]
        layers = sorted(
            (name for name in decoder if name.startswith("layers_")),
            key=lambda name: int(name.split("_")[1]),
        )
        makers = [decoder[name] for name in layers if "k_proj" in decoder[name]["self_attn"]]
        like = c.key_layers or range(-text.num_hidden_layers, 0)
        for i, at in enumerate(like):
            parts = params[f"layers_{i}"]
            params[f"layers_{i}"] = in_float32({name: makers[at][name] for name in parts})
        return params | in_float32({"norm": decoder["norm"]})


def keys_of(
    config: KVHeadConfig, cache: KVCache
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Return the keys and values that a head reads of its target's cache.

    Those of several layers stand one behind the other on the axis of heads: K is their sum.
    """
    layers = config.key_layers or (-1,)
    k, v = (jnp.concatenate([leaf[i] for i in layers], axis=1) for leaf in (cache.k, cache.v))
    return k, v


def _gather(leaf: Float[Array, "B K S H"], at: Int[Array, "B text"]) -> Float[Array, "B text K H"]:
    """Return the slots `at`; zeros for -1, so that masked values are finite."""
    rows = jnp.take_along_axis(leaf, jnp.maximum(at, 0)[:, None, :, None], axis=2).swapaxes(1, 2)
    return jnp.where((at < 0)[..., None, None], 0, rows)
