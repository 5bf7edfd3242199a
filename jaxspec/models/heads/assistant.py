"""Compute Gemma 4's assistants: layers of queries on the target's keys and values.

An assistant has no keys. All drafted tokens take the position of the newest token, and what
distinguishes them is the state before each: the target's last hidden state, then the assistant's
own output, projected back to the target's width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.config import AssistantConfig
from jaxspec.models.decoder import Decoder, Places
from jaxspec.models.heads.anchored import one_by_one
from jaxspec.models.heads.borrowed import drawn
from jaxspec.models.heads.reading import Blocks, Reading, states_before
from jaxspec.models.layers import Dense, wide
from jaxspec.typing import Array, Float, Int, Params


class MaskedEmbedding(nn.Module):
    """Score the tokens of the likeliest groups, and give the others -inf."""

    config: AssistantConfig

    def setup(self) -> None:
        tokens = self.config.text_config.vocab_size
        self.centroids = Dense(self.config.num_centroids, bias=False)
        self.token_ordering = self.param(
            "token_ordering", lambda _: jnp.arange(tokens, dtype=jnp.int32)
        )

    def __call__(
        self, hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        groups = self.token_ordering.reshape(self.config.num_centroids, -1)
        _, best = jax.lax.top_k(self.centroids(hidden), self.config.centroid_intermediate_top_k)
        tokens = groups[best].reshape(*hidden.shape[:2], -1)
        exact = wide(hidden.dtype)
        scores = jnp.einsum(
            "BTD,BTGD->BTG", hidden, embedding[tokens], preferred_element_type=exact
        )
        rows, columns = jnp.arange(len(hidden))[:, None, None], jnp.arange(hidden.shape[1])[:, None]
        whole = jnp.full((*hidden.shape[:2], len(embedding)), -jnp.inf, exact)
        return whole.at[rows, columns, tokens].set(scores)


class AssistantHead(nn.Module):
    """Hold an assistant's parameters, score the tokens after those that it reads, and run its
    training pass."""

    config: AssistantConfig

    def setup(self) -> None:
        c, layers = self.config, self.config.text_config
        if layers.sliding_window is not None:
            # As in transformers, a window's width is the distance to the newest key, not a count.
            layers = replace(layers, sliding_window=layers.sliding_window + 1)
        self.model = Decoder(layers)
        self.pre_projection = Dense(c.text_config.hidden_size, bias=False)
        self.post_projection = Dense(c.backbone_hidden_size, bias=False)
        if c.num_centroids:
            self.masked_embedding = MaskedEmbedding(c)

    def read(
        self,
        embeds: Float[Array, "B T backbone"],
        before: Float[Array, "B T backbone"],
        newest: Int[Array, "B T"],
        rotary: Int[Array, "B T"],
        keys: KVCache,
    ) -> Float[Array, "B T D"]:
        """Return the final-normed hidden states of T tokens.

        Args:
          embeds, before: See `draft`.
          newest: Slot of the newest token of each token's block; the slots before it are read.
          rotary: Position of that token.
          keys: Keys and values that each layer reads; its lengths are not read.
        """
        x = self.pre_projection(jnp.concatenate([embeds, before], axis=-1))
        return self.model(x, Places(jnp.maximum(newest - 1, 0), rotary), keys)[0]

    def draft(
        self,
        embeds: Float[Array, "B T backbone"],
        before: Float[Array, "B T backbone"],
        target: KVCache,
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T backbone"]]:
        """Return the scores of the token after each of T tokens, and the states that they leave.

        Args:
          embeds: The target's embeddings of the tokens.
          before: State before each token.
          target: The target's cache, of the layers that are read.
        """
        newest = jnp.broadcast_to(target.length[:, None], embeds.shape[:2])
        hidden = self.read(embeds, before, newest, newest + target.shift[:, None], target)
        table = self.model.embed_tokens
        if self.config.num_centroids:
            scores = self.masked_embedding(hidden, table.embedding)
        else:
            scores = table.attend(hidden)
        return scores.astype(jnp.float32), self.post_projection(hidden)

    def __call__(
        self,
        embeds: Float[Array, "B A J backbone"],
        anchors: Int[Array, "B A"],
        rotary: Int[Array, "B A"],
        before: Float[Array, "B A backbone"],
        keys: KVCache,
    ) -> Float[Array, "B A J D"]:
        """Return the final-normed hidden states of blocks of J tokens that begin at the anchors.

        Args:
          embeds: The target's embeddings of the blocks' tokens.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the anchors, which all tokens of their blocks take.
          before: The target's hidden states before the anchors.
          keys: See `read`.
        """

        def step(token: Array, state: Array, rotary: Array) -> tuple[Array, Array]:
            hidden = self.read(token[:, :, 0], state[:, :, 0], anchors, rotary[..., 0], keys)
            return hidden[:, :, None], self.post_projection(hidden)[:, :, None]

        constant = jnp.broadcast_to(rotary[..., None], embeds.shape[:3])
        return one_by_one(step, embeds, before[:, :, None], constant)

    @nn.nowrap
    def slots(self, slot_images: Sequence[np.ndarray], width: int, images: int) -> None:
        """Return no slots: it reads all slots of the target."""

    @nn.nowrap
    def reading(self, read: Callable[[tuple[int, ...] | None], tuple[Array, KVCache]]) -> Reading:
        """Return what training keeps of a target's pass, see `KVHead.reading`."""
        hidden, cache = read(None)
        layers = sorted({*self.config.key_layers})
        k, v = (tuple(leaf[i] for i in layers) for leaf in (cache.k, cache.v))
        return Reading(hidden=hidden, k=k, v=v)

    @nn.nowrap
    def inputs(self, blocks: Blocks, reading: Reading) -> tuple[Any, ...]:
        """Return the arguments of `__call__` for blocks of whole rows."""
        read = self.config.key_layers
        layers, unused = sorted({*read}), jnp.zeros(len(reading.hidden), jnp.int32)
        k, v = (tuple(leaf[layers.index(i)] for i in read) for leaf in (reading.k, reading.v))
        keys = KVCache(k=k, v=v, length=unused, shift=unused)
        before = states_before(reading.hidden, blocks.anchors)
        return blocks.embeds, blocks.anchors, blocks.rotary(blocks.anchors), before, keys

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return random parameters, float32."""
        del target
        text, row = self.config.text_config, jnp.zeros((1, 1, self.config.backbone_hidden_size))
        layers = map(text.of_layer, range(text.num_hidden_layers))
        leaves = tuple(jnp.zeros((1, 1, 1, layer.head_dim)) for layer in layers)
        count = jnp.ones(1, jnp.int32)
        keys = KVCache(leaves, leaves, count, count - 1)
        return drawn(self, key, row, row, keys, method="draft")


def keys_of(config: AssistantConfig, target: KVCache) -> KVCache:
    """Return the part of the target's cache that an assistant's layers read."""
    k, v = (tuple(leaves[i] for i in config.key_layers) for leaves in (target.k, target.v))
    return KVCache(k, v, target.length, target.shift)
