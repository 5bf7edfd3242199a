"""Define captions of images, which view C shows in their place, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from PIL.Image import Image

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CAPTION_PREFIX = "image: "
"""Text that TABED's view C writes in front of a caption."""


@dataclass(frozen=True)
class Caption:
    """Hold the caption of one image."""

    text: str
    ms: float = 0.0
    """Its share of the captioner's time for its batch, without compilation."""


class Captioner(Protocol):
    """Write one sentence or more about each image."""

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return one caption an image (RGB), in order."""
        ...


def caption_ids(tokenizer: PreTrainedTokenizerBase, caption: str) -> list[int]:
    """Return the ids that replace an image in view C: "image: " and the caption, without BOS.

    For Llama's tokeniser the first three are TABED's literal [1967, 29901, 29871]. `<image>` and
    `</s>` in a caption are encoded as plain text: they are no placeholder and end nothing.
    """
    return [
        token
        for text in (CAPTION_PREFIX, caption)
        for token in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    ]
