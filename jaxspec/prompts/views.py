"""Define views: the forms of a prompt that drafts read; a request's views are rows of a batch.

| view | each image becomes                                    | paper        |
|------|-------------------------------------------------------|--------------|
| M    | its image tokens, as the target sees them             | multimodal   |
| T    | one newline token                                     | text-only    |
| T-literal | the tokens of the written-out placeholder        | TABED I.2    |
| T-slots | the placeholder, once for each of the target's image tokens | vLLM   |
| C    | "image: " and its caption                             | caption      |
| P    | its features average-pooled to a quarter, before the projector | pooled |
| P36  | the same, to 36 tokens                                | IbED         |

For images in tiles, view P shows only the base tile, which is the whole image. Where a quarter of
its tokens is no square, P keeps the nearest square below (169 of OneVision's 729 tokens).
Every view keeps the template's tokens around an image (Qwen2.5-VL's <|vision_start|> and
<|vision_end|>). There P is the mean of 2x2 image tokens: the projector merges patches, so nothing
can be pooled before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from jaxspec.errors import InputError, is_number
from jaxspec.models.inputs import Pool
from jaxspec.prompts.captions import CAPTION_PREFIX
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.placeholders import PLACEHOLDER

if TYPE_CHECKING:
    from PIL.Image import Image

Change: TypeAlias = "Callable[[Image], Image] | None"
"""Function that returns another image of the same size; None: the image as it is."""


@dataclass(frozen=True)
class View:
    """Describe one way to show a prompt to the draft. Static: part of the compiled program."""

    name: str
    reads_images: bool
    pool: Pool | None = None
    """How the image features are pooled (view P)."""
    reads_captions: bool = False
    counts_slots: bool = False
    """The draft is shown as many tokens for an image as the target, without its features."""
    pixels: Change = None
    """Change of each image before the tower reads it."""

    def substitute(self, encoder: PromptEncoder, caption: str, slots: int = 1) -> list[int]:
        """Return the ids that replace one image in a view without images.

        Args:
          caption: Caption that view C shows.
          slots: Number of the target's slots of the image, for view T-slots.
        """
        if self.reads_captions:  # encoded apart, which gives TABED's literal [1967, 29901, 29871]
            return [*encoder.text_ids(CAPTION_PREFIX), *encoder.text_ids(caption)]
        if self.name == "T":
            return encoder.text_ids("\n")[-1:]
        if self.name == "T-literal":
            return encoder.text_ids(PLACEHOLDER)
        assert encoder.image_token is not None, "a text model has no images to stand for"
        return [encoder.image_token] * slots


_POOLED = re.compile(r"P([1-9]\d*)?")
VIEWS = {
    "M": View("M", reads_images=True),
    "T": View("T", reads_images=False),
    "T-literal": View("T-literal", reads_images=False),
    "T-slots": View("T-slots", reads_images=False, counts_slots=True),
    "C": View("C", reads_images=False, reads_captions=True),
}


def parse_views(names: Sequence[str]) -> tuple[View, ...]:
    """Return the named views, in order."""
    if not names or len(set(names)) < len(names):
        raise InputError(f"views: {','.join(names)!r} must name at least one view, each once")
    return tuple(parse_view(name) for name in names)


def is_view(name: str) -> bool:
    """Return whether a view has this name."""
    return name in VIEWS or _POOLED.fullmatch(name) is not None


def parse_view(name: str) -> View:
    """Return the view of a name; InputError for unknown ones."""
    if pooled := _POOLED.fullmatch(name):
        return View(name, reads_images=True, pool=Pool(int(pooled[1]) if pooled[1] else None))
    if name not in VIEWS:
        names = ", ".join((*VIEWS, "P", "P36"))
        raise InputError(f"views: {name!r} is unknown; choose from {names}, and lookup, the last")
    return VIEWS[name]


def needs_captioner(views: Sequence[View], captioner: object | None) -> bool:
    """Return whether a view shows captions. Raises InputError if so and there is no captioner."""
    shows_captions = any(view.reads_captions for view in views)
    if shows_captions and captioner is None:
        raise InputError("view C: there is no captioner; give one, such as jax:DIR")
    return shows_captions


def parse_weights(weights: Sequence[float] | None, views: int) -> tuple[float, ...]:
    """Return weights of the views, scaled to sum to one; uniform when none are given."""
    if weights is None:
        return (1.0 / views,) * views
    if not isinstance(weights, list | tuple) or not all(map(is_number, weights)):
        raise InputError(f"weights: {weights!r}; give a tuple of numbers, as (0.5, 0.5)")
    if len(weights) != views:
        raise InputError(f"weights: {len(weights)} given for {views} views; give one a view")
    if any(not np.isfinite(w) or w < 0 for w in weights) or max(weights) == 0:
        raise InputError(f"weights: {','.join(map(str, weights))} must be 0 or more, not all 0")
    shares = [w / max(weights) for w in weights]  # of which the sum cannot overflow
    return tuple(share / sum(shares) for share in shares)
