"""What training hands to a head: the target's pass over whole rows, and blocks within them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from jaxspec.models.heads.head_slots import HeadRows
from jaxspec.typing import Array, Bool, Float, Int


class Reading(struct.PyTreeNode):
    """Hold the part of a target's pass over whole rows that a head reads and learns from."""

    hidden: Float[Any, "B L D"]
    """Final-normed hidden states."""
    k: Float[Any, "B K L H"] | None = None
    """Keys that a KV head reads, as `keys_of` returns them."""
    v: Float[Any, "B K L H"] | None = None
    states: Float[Any, "B L fused"] | None = None
    """The hidden states of several layers, for a head that keeps keys of its own."""
    embeds: Float[Any, "B L D"] | None = None
    """The target's embeddings, for a head that reads those of images."""


class Blocks(NamedTuple):
    """Describe A blocks of J tokens of whole rows."""

    at: Int[Array, "B A J"]
    """Slots of the blocks' tokens, of which the first is the anchor."""
    embeds: Float[Array, "B A J D"]
    """Embeddings of the blocks' tokens."""
    slots: HeadRows | None
    """The target's slots that a KV head reads."""
    rotary: Callable[[Int[Array, "B ..."]], Array]
    """Return the rotary positions of slots; with M-RoPE [B, 3, ...]."""
    row: Int[Array, "B L"]
    """All tokens of the rows."""
    embed: Callable[[Int[Array, "B T"]], Float[Array, "B T D"]]
    """Return the embeddings of tokens."""
    images: Bool[Array, "B L"] | None
    """Slots of the rows that show an image; None without images."""

    @property
    def anchors(self) -> Int[Array, "B A"]:
        return self.at[..., 0]


def states_before(
    hidden: Float[Array, "B L D"], anchors: Int[Array, "B A"]
) -> Float[Array, "B A D"]:
    """Return the target's hidden states before the anchors."""
    return jnp.take_along_axis(hidden, jnp.maximum(anchors - 1, 0)[..., None], axis=1)
