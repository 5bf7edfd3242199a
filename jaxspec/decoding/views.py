"""Views: the same prompt as the draft may be shown it. The views of a request are rows of one ragged batch.

| view | each image becomes                                    | paper        |
|------|-------------------------------------------------------|--------------|
| M    | its image tokens, as the target sees them             | multimodal   |
| T    | one newline token                                     | text-only    |
| T-literal | the tokens of the written-out placeholder        | TABED I.2    |
| T-special | the bare placeholder token, with no image behind | TABED I.2    |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxspec.data.prompts import PLACEHOLDER, PromptEncoder
from jaxspec.errors import InputError


@dataclass(frozen=True)
class View:
    """One way to show a prompt to the draft; hashable, part of the compiled program."""

    name: str
    reads_images: bool

    def substitute(self, encoder: PromptEncoder, image_tokens: int) -> list[int]:
        """The ids that stand for one image of `image_tokens` tower features."""
        tokenizer = encoder.tokenizer
        if self.name == "M":
            return [encoder.image_token] * image_tokens
        if self.name == "T":
            return tokenizer.encode("\n", add_special_tokens=False)[-1:]
        if self.name == "T-literal":
            return tokenizer.encode(PLACEHOLDER, add_special_tokens=False, split_special_tokens=True)
        return [encoder.image_token]


VIEWS = {
    "M": View("M", reads_images=True),
    "T": View("T", reads_images=False),
    "T-literal": View("T-literal", reads_images=False),
    "T-special": View("T-special", reads_images=False),
}


def parse_views(names: Sequence[str]) -> tuple[View, ...]:
    """The named views, in order."""
    for name in names:
        if name not in VIEWS:
            raise InputError(f"views: {name!r} is unknown; choose from {', '.join(VIEWS)}")
    if not names or len(set(names)) < len(names):
        raise InputError(f"views: {','.join(names)!r} must name at least one view, each once")
    return tuple(VIEWS[name] for name in names)


def rewrite(
    tokens: np.ndarray, image_token: int, substitutes: Sequence[Sequence[int]], images: int
) -> np.ndarray:
    """The prompt with its i-th placeholder replaced by `substitutes[i]`, int32."""
    here = int((tokens == image_token).sum())
    if here != images:
        raise InputError(f"prompt: {here} image placeholders but {images} images; give one a placeholder")
    out: list[int] = []
    following = iter(substitutes)
    for token in tokens.tolist():
        out += next(following) if token == image_token else [token]
    return np.asarray(out, np.int32)


def parse_weights(weights: Sequence[float] | None, views: int) -> tuple[float, ...]:
    """Weights of the views, scaled to sum to one; uniform when none are given."""
    if weights is None:
        return (1.0 / views,) * views
    if len(weights) != views:
        raise InputError(f"weights: {len(weights)} given for {views} views; give one a view")
    if any(not np.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise InputError(f"weights: {','.join(map(str, weights))} must be at least 0, and not all 0")
    return tuple(w / sum(weights) for w in weights)
