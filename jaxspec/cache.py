"""The key-value cache: rows of one batch, each with its own length.

Rows are padded on the right, so the slot of a token is its index in the row, and a query in slot p may read
exactly the slots 0..p. Slots at or past a row's length hold rubbish that no query can see before it is
overwritten: rolling a row back is setting its length, nothing is ever cleared.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxspec.config import TextConfig
from jaxspec.typing import Array, Float, Int


class KVCache(struct.PyTreeNode):
    """One pair of leaves a layer: XLA updates them in place, where one stacked leaf is copied every step."""

    k: tuple[Float[Array, "B S K H"], ...]
    v: tuple[Float[Array, "B S K H"], ...]
    length: Int[Array, " B"]
    """Tokens of each row that are valid."""
    shift: Int[Array, " B"]
    """Rotary position of a new token less its slot: 0, but where images take other positions than slots (M-RoPE)."""

    @property
    def slots(self) -> int:
        return self.k[0].shape[1]


def init_cache(config: TextConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `slots` tokens for `batch` rows."""
    shape = (batch, slots, config.num_key_value_heads, config.head_dim)
    layers = range(config.num_hidden_layers)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in layers),
        v=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(batch, jnp.int32),
        shift=jnp.zeros(batch, jnp.int32),
    )


def write(
    leaf: Float[Array, "B S K H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B S K H"]:
    """Puts T new entries a row at their positions; entries past the last slot are dropped.

    A scatter, because `dynamic_update_slice` would clamp at the end and overwrite valid slots.
    """
    rows = jnp.arange(leaf.shape[0])[:, None]
    return leaf.at[rows, positions].set(new.astype(leaf.dtype), mode="drop", unique_indices=True)
