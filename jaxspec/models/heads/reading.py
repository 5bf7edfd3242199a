"""Define what a head reads: slots of its target's rows, and in training a whole pass and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import KVHeadConfig
from jaxspec.errors import InputError
from jaxspec.typing import Array, Bool, Float, Int


class HeadRows(struct.PyTreeNode):
    """Hold the slots of the target's prompts that a KV head reads; -1 where a row has fewer."""

    text: Int[Any, "B text"]
    """Slots of text, in order."""
    images: Int[Any, "B I tokens"]
    """Slots of each image, in order."""


def reads_as_text(config: KVHeadConfig, slot_images: np.ndarray) -> np.ndarray:
    """Return the slots of a row that are read unpooled: text, and images with pooling "none"."""
    return (
        np.arange(len(slot_images)) if config.pooling == "none" else np.flatnonzero(slot_images < 0)
    )


def head_rows(
    config: KVHeadConfig, slot_images: Sequence[np.ndarray], width: int, images: int
) -> HeadRows:
    """Return the slots of prompts that a head reads.

    Args:
      slot_images: Index of the image in each slot of each row; -1 for text.
      width: Most text slots.
      images: I, most images.
    """
    rows = no_rows(config, len(slot_images), width, images)
    for row, image in enumerate(slot_images):
        reads = reads_as_text(config, image)
        if len(reads) > width:
            raise InputError(
                f"KV head: {len(reads)} tokens of a prompt, but room for {width}; "
                "use a larger bucket"
            )
        rows.text[row, : len(reads)] = reads
        for i in range(image.max(initial=-1) + 1 if config.pools else 0):
            slots = np.flatnonzero(image == i)[: config.image_tokens]
            if config.pooling != "attention" and len(slots) < config.image_tokens:
                raise InputError(
                    f"KV head: an image of {len(slots)} tokens, but its {config.pooling!r} "
                    f"pooling was made for {config.image_tokens}; "
                    "use a head with 'attention' pooling"
                )
            rows.images[row, i, : len(slots)] = slots
    return rows


def no_rows(config: KVHeadConfig, batch: int, width: int, images: int) -> HeadRows:
    """Return `head_rows` without any slot to read."""
    shape = (batch, images if config.pools else 0, config.image_tokens)
    return HeadRows(np.full((batch, width), -1, np.int32), np.full(shape, -1, np.int32))


class Reading(struct.PyTreeNode):
    """Hold the part of a target's pass over whole rows that a head reads and learns from."""

    hidden: Float[Any, "B L D"]
    """Final-normed hidden states."""
    k: tuple[Float[Any, "B K L H"], ...] = ()
    """Keys: of a KV head one leaf, as `keys_of` returns it; of an assistant one for each layer of
    the target that it reads, in their order."""
    v: tuple[Float[Any, "B K L H"], ...] = ()
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
