"""Record log probabilities of new tokens, and of the likeliest tokens in the place of each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import resized
from jaxspec.sampling import largest
from jaxspec.typing import Array, Float, Int


class LogProbs(struct.PyTreeNode):
    """Hold natural logarithms at temperature 1, unfiltered. Entries past `count` are undefined."""

    new: Float[Array, "B C"]
    """Log probability of each new token."""
    top: Float[Array, "B C K"]
    """The K largest log probabilities in the place of each new token."""
    top_tokens: Int[Array, "B C K"]
    """Their tokens."""

    @classmethod
    def zeros(cls, batch: int, slots: int, top: int) -> LogProbs:
        new, values = jnp.zeros((batch, slots)), jnp.zeros((batch, slots, top))
        return cls(new, values, values.astype(jnp.int32))

    def fitted(self, other: LogProbs) -> LogProbs:
        """Return the record with as many places for new tokens as another."""
        return jax.tree.map(lambda leaf: resized(leaf, 1, other.new.shape[1]), self)

    def extended(
        self, count: Int[Array, " B"], tokens: Int[Array, "B C"], logits: Float[Array, "B T V"]
    ) -> LogProbs:
        """Return the record extended by one block.

        Args:
          count: Number of tokens before the block.
          tokens: Tokens after the block.
          logits: Logits for the token at each place of the block.
        """
        slots = count[:, None] + jnp.arange(logits.shape[1])
        rows = jnp.arange(len(count))[:, None]
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        written = jnp.take_along_axis(tokens, jnp.minimum(slots, tokens.shape[1] - 1), axis=1)
        new = jnp.take_along_axis(logs, written[..., None], axis=-1)[..., 0]
        top, top_tokens = largest(logs, self.top.shape[-1]) if self.top.size else (0.0, 0)
        return LogProbs(
            new=self.new.at[rows, slots].set(new, mode="drop"),
            top=self.top.at[rows, slots].set(top, mode="drop"),
            top_tokens=self.top_tokens.at[rows, slots].set(top_tokens, mode="drop"),
        )

    def of_row(self, row: int, new: slice, top: int) -> dict[str, Any]:
        """Return fields of a `Result` for new tokens of a row, with `top` likeliest of each."""
        leaves = (self.top_tokens, self.top)
        tokens, values = (np.asarray(leaf)[row, new, :top].tolist() for leaf in leaves)
        return {
            "logprobs": tuple(np.asarray(self.new)[row, new].tolist()),
            "top_logprobs": tuple(dict(zip(*pair)) for pair in zip(tokens, values)),
        }
