"""Define captions, which view C shows in place of images, and captioners, which write them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL.Image import Image

CAPTION_PREFIX = "image: "
"""Text that TABED's view C writes in front of a caption."""


@dataclass(frozen=True)
class Caption:
    """Hold the caption of one image."""

    text: str
    ms: float = 0.0
    """Share of this caption in the captioner's time for its batch, without compilation."""


class Captioner(Protocol):
    """Write one sentence or more about each image."""

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return one caption for each image (RGB), in order."""
        ...
