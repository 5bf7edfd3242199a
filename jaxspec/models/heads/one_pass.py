"""Draft a block in one pass of a KV head, as DFlash, P-EAGLE and DSpark do.

Mask embeddings stand for the tokens that it does not know. With gamma = 3 and the newest token x,
it reads x m1 m2, and scores what follows each of them. So it reads its layers and the output matrix
once a block, and a token's scores depend on the tokens drafted before it only by `correction`.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import OnePassConfig
from jaxspec.models.heads.kv_head import KVHead
from jaxspec.models.layers import INIT, times, wide
from jaxspec.typing import Array, Float, Int


class OnePassHead(KVHead):
    """Hold a head's parameters, and run its training pass."""

    config: OnePassConfig

    def setup(self) -> None:
        super().setup()
        c, text = self.config, self.config.text_config
        self.masks = self.param("masks", INIT, (c.gamma - 1, text.hidden_size))
        if c.markov:
            shape = (c.markov, text.scored_tokens)
            self.markov_in = self.param("markov_in", INIT, (text.hidden_size, c.markov))
            self.markov_out = self.param("markov_out", nn.initializers.zeros, shape)

    def masked(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"] | None, count: int
    ) -> Float[Array, "... J D"]:
        """Return the layers' inputs of a block of `count` tokens, of which the first is known.

        Args:
          embeds: Embedding of the known token.
          before: The hidden state that predicted it, for a head that reads hidden states.
        """
        masks = self.masks[: count - 1].astype(embeds.dtype)
        shape = (*embeds.shape[:-1], *masks.shape)
        x = jnp.concatenate([embeds[..., None, :], jnp.broadcast_to(masks, shape)], axis=-2)
        if before is None:
            return x
        return self.fuse(x, jnp.broadcast_to(before[..., None, :], x.shape))

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens with these embeddings add to the scores of their followers."""
        exact = embeds.astype(wide(embeds.dtype))
        # Embeddings of any scale learn at the same rate.
        square = jnp.mean(exact * exact, axis=-1, keepdims=True)
        normed = exact * jax.lax.rsqrt(square + self.config.text_config.rms_norm_eps)
        low = times(normed.astype(embeds.dtype), self.markov_in.T)
        return times(low, self.markov_out.T, exact.dtype).astype(jnp.float32)

    def blocks(
        self,
        read: Callable[[Array, Array], Array],
        embeds: Float[Array, "B A J D"],
        rotary: Array,
        before: Float[Array, "B A D"] | None,
    ) -> Float[Array, "B A J D"]:
        return self.norm(read(self.masked(embeds[:, :, 0], before, embeds.shape[2]), rotary))
