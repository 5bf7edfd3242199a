"""Views: the same prompt as the draft may be shown it. The views of a request are rows of one ragged batch.

| view | each image becomes                                    | paper        |
|------|-------------------------------------------------------|--------------|
| M    | its image tokens, as the target sees them             | multimodal   |
| T    | one newline token                                     | text-only    |
| T-literal | the tokens of the written-out placeholder        | TABED I.2    |
| T-special | the bare placeholder token, with no image behind | TABED I.2    |
| C    | "image: " and its caption                             | caption      |
| P    | its features average-pooled to a quarter, before the projector | pooled |
| P36  | the same, to 36 tokens                                | IbED         |
| P-1d, P-after | pooled in reading order; pooled after the projector    |     |
| kv   | no prompt: a KV head's reading of the target's cache  | AASD         |

Of images in tiles, view P shows the base tile alone, that is the whole image; where a quarter of its tokens is no
square, P leaves the nearest square below (169 of OneVision's 729).
Tokens that the template puts around an image (Qwen2.5-VL's <|vision_start|> and <|vision_end|>) stay in every view.
There P is the mean of 2x2 image tokens: its projector merges patches, so that nothing is pooled before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from PIL.Image import Image

from jaxspec.data.prompts import PLACEHOLDER, PromptEncoder, pad_rows
from jaxspec.errors import InputError
from jaxspec.models.inputs import TEXT, Pool, PromptRows, Slots

CAPTION_PREFIX = "image: "
"""What TABED's view C writes in front of a caption."""


@dataclass(frozen=True)
class Caption:
    """What is said of one image."""

    text: str
    ms: float = 0.0
    """Its share of the captioner's time for the batch that it was made in, compilation not counted."""


class Captioner(Protocol):
    """Says one sentence or more about each image."""

    def caption(self, images: Sequence[Image]) -> list[Caption]:
        """Return one caption an image (RGB), in order."""
        ...


def caption_ids(tokenizer: Any, caption: str) -> list[int]:
    """Return the ids that stand for an image in view C: those of "image: ", then the caption's, both without BOS.

    For Llama's tokeniser the first three are TABED's literal [1967, 29901, 29871]. Words such as `<image>` or
    `</s>` in a caption are spelt out: they are nobody's placeholder and end nothing.
    """
    return [
        token
        for text in (CAPTION_PREFIX, caption)
        for token in tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    ]


@dataclass(frozen=True)
class View:
    """One way to show a prompt to the draft; hashable, part of the compiled program."""

    name: str
    reads_images: bool
    pool: Pool | None = None
    """How the image features are pooled (view P)."""
    reads_captions: bool = False
    reads_target: bool = False
    """No view of the prompt: what a KV head makes of the target's cache."""

    def substitute(self, encoder: PromptEncoder, caption: str) -> list[int]:
        """Return the ids that stand for one image in a view that reads none; `caption` is read by view C alone."""
        tokenizer = encoder.tokenizer
        if self.reads_captions:
            return caption_ids(tokenizer, caption)
        if self.name == "T":
            return tokenizer.encode("\n", add_special_tokens=False)[-1:]
        if self.name == "T-literal":
            return tokenizer.encode(
                PLACEHOLDER, add_special_tokens=False, split_special_tokens=True
            )
        assert encoder.image_token is not None, "a text model has no images to stand for"
        return [encoder.image_token]


VIEWS = {
    "M": View("M", reads_images=True),
    "T": View("T", reads_images=False),
    "T-literal": View("T-literal", reads_images=False),
    "T-special": View("T-special", reads_images=False),
    "C": View("C", reads_images=False, reads_captions=True),
    "kv": View("kv", reads_images=False, reads_target=True),
}


@dataclass(frozen=True)
class PromptRow:
    """One prompt in one form, on the host; `PromptRows` is a batch of them."""

    tokens: np.ndarray
    """int32 [L]."""
    sources: np.ndarray | None = None
    """int32 [L, blended]."""
    blend: np.ndarray | None = None
    """float32 [L, blended]."""
    rotary: np.ndarray | None = None
    """int32 [3, L]."""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, kept: slice) -> PromptRow:
        """Return a part of the row."""
        rotary = None if self.rotary is None else self.rotary[:, kept]
        blend, sources = (
            None if part is None else part[kept] for part in (self.blend, self.sources)
        )
        return PromptRow(self.tokens[kept], sources, blend, rotary)

    def followed_by(self, tokens: Sequence[int]) -> PromptRow:
        """Return the row with more text behind it."""
        return _concatenated([self, PromptRow(np.asarray(tokens, np.int32))])


def _concatenated(parts: Sequence[PromptRow]) -> PromptRow:
    """Return rows one behind the other as one; the positions of each begin after the largest of the one before.

    A slot of text has the source TEXT, and its rotary positions are all three the same: behind an image at the
    positions 1 to 4, two tokens take 5 and 6.
    """

    def column(name: str, text: np.ndarray) -> np.ndarray | None:
        """Return a field of all parts; what has none is so many times what a slot of text has."""
        found = [getattr(part, name) for part in parts]
        if all(x is None for x in found):
            return None
        return np.concatenate(
            [text.repeat(len(p), axis=0) if x is None else x for p, x in zip(parts, found)]
        )

    width, rotary = (
        max(0 if part.sources is None else part.sources.shape[1] for part in parts),
        None,
    )
    if any(part.rotary is not None for part in parts):
        places, start = [], 0
        for part in parts:
            own = (
                np.tile(np.arange(len(part), dtype=np.int32), (3, 1))
                if part.rotary is None
                else part.rotary
            )
            places.append(start + own)
            start += int(own.max(initial=-1)) + 1
        rotary = np.concatenate(places, axis=1)
    sources = column("sources", np.full((1, width), TEXT, np.int32))
    blend = column("blend", np.eye(1, width, dtype=np.float32))
    return PromptRow(np.concatenate([part.tokens for part in parts]), sources, blend, rotary)


def parse_views(names: Sequence[str]) -> tuple[View, ...]:
    """Return the named views, in order."""
    if not names or len(set(names)) < len(names):
        raise InputError(f"views: {','.join(names)!r} must name at least one view, each once")
    if "kv" in names[:-1]:
        raise InputError(f"views: {','.join(names)!r} has views behind kv; name it last")
    return tuple(parse_view(name) for name in names)


def prompt_views(views: Sequence[View]) -> tuple[View, ...]:
    """Return the views that show a draft the prompt."""
    return tuple(view for view in views if not view.reads_target)


def parse_view(name: str) -> View:
    """Return the view of a name; InputError for unknown ones."""
    pooled = re.fullmatch(r"P([1-9]\d*)?(-1d)?(-after)?", name)
    if pooled:
        tokens, flat, after = pooled.groups()
        pool = Pool(
            int(tokens) if tokens else None, "avg1d" if flat else "avg2d", after is not None
        )
        return View(name, reads_images=True, pool=pool)
    if name not in VIEWS:
        raise InputError(
            f"views: {name!r} is unknown; choose from {', '.join(VIEWS)}, P, or P36 for 36 pooled tokens"
        )
    return VIEWS[name]


def needs_captioner(views: Sequence[View], captioner: object | None) -> bool:
    """Return whether a view shows captions. Raises InputError if so and there is no captioner."""
    wanted = any(view.reads_captions for view in views)
    if wanted and captioner is None:
        raise InputError(
            "view C: there is no captioner; give one, such as jax:DIR or file:captions.jsonl"
        )
    return wanted


def rewrite(
    tokens: np.ndarray, image_token: int | None, shown: Sequence[Slots | Sequence[int]]
) -> PromptRow:
    """Return the prompt with its i-th placeholder replaced by what stands for image i: slots that show it, or ids.

    Of [1, 99, 5] with the placeholder 99, ids [7, 8] make [1, 7, 8, 5].
    """
    places = np.flatnonzero(tokens == image_token)
    if len(places) != len(shown):
        raise InputError(
            f"prompt: {len(places)} image placeholders but {len(shown)} images; give one a placeholder"
        )
    before, *texts = np.split(np.asarray(tokens, np.int32), places)
    parts, first = [PromptRow(before)], 0
    for stands, text in zip(shown, texts, strict=True):
        if isinstance(stands, Slots):  # the images' feature rows lie one behind the other
            sources = np.where(stands.sources < 0, stands.sources, stands.sources + first).astype(
                np.int32
            )
            first += stands.rows
            ids = np.full(len(sources), image_token, np.int32)
            parts.append(PromptRow(ids, sources, stands.blend, stands.positions))
        else:
            parts.append(PromptRow(np.asarray(stands, np.int32)))
        parts.append(PromptRow(text[1:]))
    return _concatenated(parts)


def which_image(row: PromptRow, slots: Sequence[int]) -> np.ndarray:
    """Return which image each slot of a row shows, -1 for text; `slots` is how many each image takes."""
    shown = np.full(len(row), -1)
    if row.sources is not None:
        shown[row.sources[:, 0] != TEXT] = np.repeat(np.arange(len(slots)), slots)
    return shown


def stack_rows(
    rows: Sequence[Sequence[PromptRow]], width: int, views: int | None = None
) -> tuple[PromptRows, ...]:
    """Return host arrays of each form of B prompts, right-padded to `width`, or all but the first to `views`.

    The first form is the target's. Rotary positions are given to all the draft's views or to none: they are one
    batch, and a text draft has none even where the target has.
    """
    parts = slice(1), slice(1, None)
    mrope = [any(row.rotary is not None for forms in rows for row in forms[part]) for part in parts]
    widths = width, width if views is None else views
    return tuple(
        _stack([forms[i] for forms in rows], widths[i > 0], mrope[i > 0])
        for i in range(len(rows[0]))
    )


def _stack(rows: list[PromptRow], width: int, mrope: bool) -> PromptRows:
    tokens, length = pad_rows([row.tokens for row in rows], width)
    sources, blend = (
        _pad([row.sources for row in rows], width, TEXT),
        _pad([row.blend for row in rows], width, 0),
    )
    known: dict[str, Any] = {"tokens": tokens, "length": length, "sources": sources, "blend": blend}
    if mrope:
        rotary = np.tile(np.arange(width, dtype=np.int32), (len(rows), 3, 1))
        for i, row in enumerate(rows):
            if row.rotary is not None:
                rotary[i, :, : len(row)] = row.rotary
        last = [rotary[i, :, : len(row)].max(initial=-1) for i, row in enumerate(rows)]
        known |= {"rotary": rotary, "shift": np.asarray(last, np.int32) + 1 - length}
    return PromptRows(**known)


def _pad(rows: Sequence[np.ndarray | None], width: int, fill: int) -> np.ndarray | None:
    """Return [B, L, blended] of rows [l, blended], absent ones all `fill`; None where all are absent."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None
    out = np.full((len(rows), width, like.shape[1]), fill, like.dtype)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = row
    return out


def parse_weights(weights: Sequence[float] | None, views: int) -> tuple[float, ...]:
    """Return weights of the views, scaled to sum to one; uniform when none are given."""
    if weights is None:
        return (1.0 / views,) * views
    if len(weights) != views:
        raise InputError(f"weights: {len(weights)} given for {views} views; give one a view")
    if any(not np.isfinite(w) or w < 0 for w in weights) or max(weights) == 0:
        raise InputError(
            f"weights: {','.join(map(str, weights))} must be at least 0, and not all 0"
        )
    shares = [w / max(weights) for w in weights]  # of which the sum cannot overflow
    return tuple(share / sum(shares) for share in shares)
