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
        """One caption an image (RGB), in order."""
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
        """The ids that stand for one image in a view that reads none; `caption` is read by view C alone."""
        tokenizer = encoder.tokenizer
        if self.reads_captions:
            return caption_ids(tokenizer, caption)
        if self.name == "T":
            return tokenizer.encode("\n", add_special_tokens=False)[-1:]
        if self.name == "T-literal":
            return tokenizer.encode(PLACEHOLDER, add_special_tokens=False, split_special_tokens=True)
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
class Row:
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

    def __getitem__(self, kept: slice) -> Row:
        """A part of the row."""
        rotary = None if self.rotary is None else self.rotary[:, kept]
        blend, sources = (None if part is None else part[kept] for part in (self.blend, self.sources))
        return Row(self.tokens[kept], sources, blend, rotary)

    def followed_by(self, tokens: Sequence[int]) -> Row:
        """The row with more text behind it."""
        grown, rotary = ((0, len(tokens)), (0, 0)), self.rotary
        if rotary is not None:
            rest = rotary.max() + 1 + np.arange(len(tokens), dtype=np.int32)
            rotary = np.concatenate([rotary, np.tile(rest, (3, 1))], axis=1)
        return Row(
            np.concatenate([self.tokens, np.asarray(tokens, np.int32)]),
            None if self.sources is None else np.pad(self.sources, grown, constant_values=TEXT),
            None if self.blend is None else np.pad(self.blend, grown),
            rotary,
        )


def parse_views(names: Sequence[str]) -> tuple[View, ...]:
    """The named views, in order."""
    if not names or len(set(names)) < len(names):
        raise InputError(f"views: {','.join(names)!r} must name at least one view, each once")
    if "kv" in names[:-1]:
        raise InputError(f"views: {','.join(names)!r} has views behind kv; name it last")
    return tuple(parse_view(name) for name in names)


def prompt_views(views: Sequence[View]) -> tuple[View, ...]:
    """Return the views that show a draft the prompt."""
    return tuple(view for view in views if not view.reads_target)


def parse_view(name: str) -> View:
    """The view of a name; InputError for unknown ones."""
    pooled = re.fullmatch(r"P([1-9]\d*)?(-1d)?(-after)?", name)
    if pooled:
        tokens, flat, after = pooled.groups()
        pool = Pool(int(tokens) if tokens else None, "avg1d" if flat else "avg2d", after is not None)
        return View(name, reads_images=True, pool=pool)
    if name not in VIEWS:
        raise InputError(f"views: {name!r} is unknown; choose from {', '.join(VIEWS)}, P, or P36 for 36 pooled tokens")
    return VIEWS[name]


def needs_captioner(views: Sequence[View], captioner: Captioner | None) -> bool:
    """Whether a view shows captions. Raises InputError if so and there is no captioner."""
    wanted = any(view.reads_captions for view in views)
    if wanted and captioner is None:
        raise InputError("view C: there is no captioner; give one, such as jax:DIR or file:captions.jsonl")
    return wanted


def rewrite(tokens: np.ndarray, image_token: int | None, shown: Sequence[Slots | Sequence[int]]) -> Row:
    """The prompt with its i-th placeholder replaced by what stands for image i: slots that show it, or ids."""
    places = np.flatnonzero(tokens == image_token)
    if len(places) != len(shown):
        raise InputError(f"prompt: {len(places)} image placeholders but {len(shown)} images; give one a placeholder")
    ends = [*places.tolist(), len(tokens)]
    pieces: list[Slots | np.ndarray] = [np.asarray(tokens[: ends[0]], np.int32)]
    for stands, place, end in zip(shown, ends, ends[1:]):
        pieces.append(stands if isinstance(stands, Slots) else np.asarray(stands, np.int32))
        pieces.append(np.asarray(tokens[place + 1 : end], np.int32))
    pictures = [piece for piece in pieces if isinstance(piece, Slots)]
    ids = [np.full(len(x.sources), image_token, np.int32) if isinstance(x, Slots) else x for x in pieces]
    return Row(
        np.concatenate(ids),
        _sources(pieces, pictures[0].sources.shape[1]) if pictures else None,
        _blend(pieces, pictures[0].sources.shape[1]) if any(x.blend is not None for x in pictures) else None,
        _rotary(pieces) if any(x.positions is not None for x in pictures) else None,
    )


def _sources(pieces: Sequence[Slots | np.ndarray], width: int) -> np.ndarray:
    """[L, blended]: the images' feature rows lie one behind the other."""
    out, first = [], 0
    for piece in pieces:
        if isinstance(piece, Slots):
            out.append(np.where(piece.sources < 0, piece.sources, piece.sources + first).astype(np.int32))
            first += piece.rows
        else:
            out.append(np.full((len(piece), width), TEXT, np.int32))
    return np.concatenate(out)


def _blend(pieces: Sequence[Slots | np.ndarray], width: int) -> np.ndarray:
    """[L, blended]: one source where a piece says nothing else."""
    out = []
    for piece in pieces:
        blend = piece.blend if isinstance(piece, Slots) else None
        count = len(piece.sources) if isinstance(piece, Slots) else len(piece)
        out.append(np.eye(1, width, dtype=np.float32).repeat(count, axis=0) if blend is None else blend)
    return np.concatenate(out)


def _rotary(pieces: Sequence[Slots | np.ndarray]) -> np.ndarray:
    """[3, L]: text goes on after the largest position of the image before it."""
    out, start = [], 0
    for piece in pieces:
        places = piece.positions if isinstance(piece, Slots) else None
        count = len(piece.sources) if isinstance(piece, Slots) else len(piece)
        relative = np.tile(np.arange(count, dtype=np.int32), (3, 1)) if places is None else places
        out.append(start + relative)
        start += int(relative.max(initial=-1)) + 1
    return np.concatenate(out, axis=1)


def which_image(row: Row, slots: Sequence[int]) -> np.ndarray:
    """Which image each slot of a row shows, -1 for text; `slots` is how many each image takes."""
    shown = np.full(len(row), -1)
    if row.sources is not None:
        shown[row.sources[:, 0] != TEXT] = np.repeat(np.arange(len(slots)), slots)
    return shown


def stack_rows(rows: Sequence[Sequence[Row]], width: int) -> tuple[PromptRows, ...]:
    """Host arrays of each form of B prompts, right-padded to `width`.

    The first form is the target's. Rotary positions are given to all the draft's views or to none: they are one
    batch, and a text draft has none even where the target has.
    """
    parts = slice(1), slice(1, None)
    turning = [any(row.rotary is not None for forms in rows for row in forms[part]) for part in parts]
    return tuple(_stack([forms[i] for forms in rows], width, turning[i > 0]) for i in range(len(rows[0])))


def _stack(rows: list[Row], width: int, turning: bool) -> PromptRows:
    tokens, length = pad_rows([row.tokens for row in rows], width)
    known: dict[str, Any] = {"tokens": tokens, "length": length}
    sources = _pad([row.sources for row in rows], width, TEXT)
    if sources is not None:
        known |= {"sources": sources, "blend": _pad([row.blend for row in rows], width, 0)}
    if turning:
        rotary = np.tile(np.arange(width, dtype=np.int32), (len(rows), 3, 1))
        for i, row in enumerate(rows):
            if row.rotary is not None:
                rotary[i, :, : len(row)] = row.rotary
        last = [rotary[i, :, : len(row)].max(initial=-1) for i, row in enumerate(rows)]
        known |= {"rotary": rotary, "shift": np.asarray(last, np.int32) + 1 - length}
    return PromptRows(**known)


def _pad(rows: Sequence[np.ndarray | None], width: int, fill: int) -> np.ndarray | None:
    """[B, L, blended] of rows [l, blended], absent ones all `fill`; None where all are absent."""
    like = next((row for row in rows if row is not None), None)
    if like is None:
        return None
    out = np.full((len(rows), width, like.shape[1]), fill, like.dtype)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = row
    return out


def parse_weights(weights: Sequence[float] | None, views: int) -> tuple[float, ...]:
    """Weights of the views, scaled to sum to one; uniform when none are given."""
    if weights is None:
        return (1.0 / views,) * views
    if len(weights) != views:
        raise InputError(f"weights: {len(weights)} given for {views} views; give one a view")
    if any(not np.isfinite(w) or w < 0 for w in weights) or max(weights) == 0:
        raise InputError(f"weights: {','.join(map(str, weights))} must be at least 0, and not all 0")
    shares = [w / max(weights) for w in weights]  # of which the sum cannot overflow
    return tuple(share / sum(shares) for share in shares)
