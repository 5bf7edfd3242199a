"""Compute Gemma 4's assistants: layers of queries on the target's keys and values.

An assistant has no keys. All drafted tokens take the position of the newest token, and what
distinguishes them is the state before each: the target's last hidden state, then the assistant's
own output, projected back to the target's width.
"""

from __future__ import annotations

from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.config import AssistantConfig
from jaxspec.models.decoder import Decoder, Places
from jaxspec.models.heads.borrowed import drawn
from jaxspec.models.layers import Dense, wide
from jaxspec.typing import Array, Float, Params


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
    """Hold an assistant's parameters, and score the tokens after those that it reads."""

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

    def __call__(
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
        at = Places(jnp.maximum(newest - 1, 0), newest + target.shift[:, None])
        x = self.pre_projection(jnp.concatenate([embeds, before], axis=-1))
        hidden, _ = self.model(x, at, target)
        table = self.model.embed_tokens
        if self.config.num_centroids:
            scores = self.masked_embedding(hidden, table.embedding)
        else:
            scores = table.attend(hidden)
        return scores.astype(jnp.float32), self.post_projection(hidden)

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return random parameters, float32."""
        del target
        text, row = self.config.text_config, jnp.zeros((1, 1, self.config.backbone_hidden_size))
        layers = map(text.of_layer, range(text.num_hidden_layers))
        leaves = tuple(jnp.zeros((1, 1, 1, layer.head_dim)) for layer in layers)
        count = jnp.ones(1, jnp.int32)
        return drawn(self, key, row, row, KVCache(leaves, leaves, count, count - 1))


def keys_of(config: AssistantConfig, target: KVCache) -> KVCache:
    """Return the part of the target's cache that an assistant's layers read."""
    k, v = (tuple(leaves[i] for i in config.key_layers) for leaves in (target.k, target.v))
    return KVCache(k, v, target.length, target.shift)
