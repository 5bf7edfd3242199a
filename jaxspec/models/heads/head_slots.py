"""Choose the slots of a target's rows that a KV head reads, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import struct

from jaxspec.config import KVHeadConfig
from jaxspec.errors import InputError
from jaxspec.typing import Int


class HeadRows(struct.PyTreeNode):
    """Slots of the target's prompts that a KV head reads; -1 where a row has fewer."""

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
                f"KV head: {len(reads)} tokens of a prompt, and room for {width}; "
                "use a larger bucket"
            )
        rows.text[row, : len(reads)] = reads
        for i in range(image.max(initial=-1) + 1 if config.pools else 0):
            slots = np.flatnonzero(image == i)[: config.image_tokens]
            if config.pooling != "attention" and len(slots) < config.image_tokens:
                raise InputError(
                    f"KV head: an image of {len(slots)} tokens, and its {config.pooling!r} "
                    f"pooling was made for {config.image_tokens}; "
                    "use a head with 'attention' pooling"
                )
            rows.images[row, i, : len(slots)] = slots
    return rows


def no_rows(config: KVHeadConfig, batch: int, width: int, images: int) -> HeadRows:
    """Return `head_rows` without any slot to read."""
    shape = (batch, images if config.pools else 0, config.image_tokens)
    return HeadRows(np.full((batch, width), -1, np.int32), np.full(shape, -1, np.int32))
