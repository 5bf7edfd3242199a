"""Read the prompts of a live batch, each whole or in pieces.

*Whole* prompts have one program for each size. *Pieces* of 64 tokens are read behind what an
earlier prompt left, and where the rows that decode would wait too long for a whole prompt: then
they decode a block between two pieces. Each draft reads its prompt whole, once the target has.

At one width every prompt is read in pieces which begin at multiples of 64. So the bits of its keys
depend on neither what was kept nor what else is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.decoding.speculative import TargetProgram
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_opened, run_piece, run_prefill
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.fitting import has_room, holds, largest, towers_read
from jaxspec.engine.batches.prefixes import Prefix, Prefixes, image_names
from jaxspec.engine.batches.states import Together
from jaxspec.engine.compile_cache import timed
from jaxspec.engine.memory import Sizes
from jaxspec.engine.requests import EncodedRequest
from jaxspec.prompts.rows import PromptRow, part_of

PIECE, SHORT = 64, 16
"""Tokens of a piece, and of the last one where that holds the rest."""


class ReadPrompt(NamedTuple):
    """Hold a prefilled prompt, from which answers with any options begin."""

    rows: tuple[PromptRow, ...]
    state: DecodeState
    logits: Any
    ms: float
    cached: int
    """Number of its tokens that were not read again."""


@dataclass
class PartialPrompt:
    """Hold a prompt of which a part is read."""

    request: EncodedRequest
    sizes: Sizes
    """Sizes to which it is padded."""
    images: tuple[str, ...]
    """Names of the images."""
    tiles: int
    """Tiles of the tower's program."""
    features: Any = None
    """What the tower makes of the images; None before it has, or without images."""
    past: KVCache | None = None
    """Cache of the part that is read; None for a prompt that is read whole."""
    cached: int = 0
    """Number of its tokens that were not read again."""
    count: int = 0
    """Number of tokens that are read."""
    logits: Any = None
    """Logits after the newest piece."""
    ms: float = 0.0

    @property
    def row(self) -> PromptRow:
        return self.request.rows[0]


class Reader:
    """Read prompts, one after the other.

    Args:
      sizes: Sizes of whole prompts, in order.
      rows: Cache of an empty row, for all sizes that the batch's rows may have, in order.
      most: Maximum bytes of prefixes that are kept.
    """

    def __init__(
        self,
        batcher: Batcher,
        together: Together,
        sizes: Sequence[Sizes],
        rows: Mapping[Sizes, KVCache],
        most: int,
    ) -> None:
        self.batcher, self.together, self.sizes = batcher, together, sizes
        alone = batcher.mesh is None or not batcher.mesh.is_multi_process
        program = batcher.program
        self.rows = rows if alone and isinstance(program, TargetProgram) else {}
        """Empty where every prompt is read whole: by several models, or in several processes."""
        self.joint = isinstance(program, TargetProgram) and program.target.text.joint_images
        """Whether tokens of an image read one another, so that no piece may split it."""
        self.prefixes = Prefixes(most if self.rows else 0, PIECE)
        self.largest = {towers_read(each): each for each in sizes}
        """Sizes that hold all prompts for the same towers."""
        self.ready: set[Sizes] = set()
        """Sizes whose prompts can be read in pieces, since their programs are compiled."""
        self.whole_ms: dict[Sizes, float] = {}
        """Milliseconds of the newest whole prompt of each size."""
        self.begun: PartialPrompt | None = None
        self.newest: ReadPrompt | None = None
        """Newest prompt, which the next request may share."""

    @property
    def whole_sizes(self) -> list[Sizes]:
        """Return the sizes for which a prompt may be read whole."""
        if not self.rows or not self.batcher.fixed:
            return [*self.sizes]
        return [sizes for sizes in self.sizes if self.joint and any(sizes.tiles)]

    @property
    def piece_sizes(self) -> list[Sizes]:
        """Return the sizes of prompts that may be read in pieces, the largest of each kind first.

        Only drafts that read the prompt themselves have a program for each size.
        """
        alike: dict[tuple[Sizes, tuple[bool, ...]], list[Sizes]] = {}
        for sizes in self.sizes if self.rows else ():
            alike.setdefault((self.form(sizes), towers_read(sizes)), []).append(sizes)
        tops = sorted(map(largest, alike.values()), reverse=True)
        if any(source.forms for source in self.batcher.program.sources):
            tops += [sizes for sizes in self.sizes if self.rows and sizes not in tops]
        return [sizes for sizes in tops if self.batcher.fixed or sizes.length > PIECE]

    def form(self, sizes: Sizes) -> Sizes:
        """Return the least sizes of rows into which prompts of these sizes are read in pieces."""
        return next(form for form in self.rows if has_room(form, sizes))

    def read(self, request: EncodedRequest, sizes: Sizes, most_ms: float) -> ReadPrompt | None:
        """Read on in a prompt; return it once it is read, or None to be called again.

        Equal prompts that follow one another, as samples do, are read once.

        Args:
          sizes: Sizes to which a whole prompt is padded.
          most_ms: Milliseconds after which it returns; a step that has begun takes longer.
        """
        if self.newest is not None and self.newest.rows is request.rows:
            return self.newest._replace(ms=0.0)
        self.newest = None  # frees its memory
        if self.begun is None or self.begun.request.rows is not request.rows:
            self.begun = self._begin(request, sizes, most_ms)
        prompt = self.begun
        goal = prompt.ms + most_ms
        while prompt.past is not None and prompt.count < len(prompt.row):
            self._read_piece(prompt)
            if prompt.ms >= goal and prompt.count < len(prompt.row):
                return None
        self.newest, self.begun = self._finished(prompt), None
        return self.newest

    def prepare(self, example: EncodedRequest, sizes: Sizes, whole: bool) -> ReadPrompt:
        """Read an example of these sizes, whole or only its last piece."""
        prompt = PartialPrompt(example, sizes, (), sizes.tiles[0])
        if not whole:
            for width in (SHORT, PIECE):
                prompt.past = self.rows[self.form(sizes)]
                prompt.count = max(len(prompt.row) - width, 0)
                self._read_piece(prompt)
            self.ready.add(sizes)
        return self._finished(prompt, keeps=False)

    def _begin(self, request: EncodedRequest, sizes: Sizes, most_ms: float) -> PartialPrompt:
        """Decide how to read a prompt, and find what is read of it already."""
        row, fixed = request.rows[0], self.batcher.fixed
        names = image_names(request) if self.prefixes.most else ()
        prefix, count = self.prefixes.find(request.owner, row[:-1], names)
        features = prefix.features if prefix is not None and prefix.images == names else None
        prompt = PartialPrompt(request, sizes, names, sizes.tiles[0], features)
        ready = sorted(self.piece_sizes if fixed else self.ready)
        padded = next((each for each in ready if holds(each, request.sizes)), None)
        if padded is None or (fixed and self.joint and (row.images >= 0).any()):
            return prompt
        if fixed:
            count -= count % PIECE
        elif _rounded(len(row) - count) >= sizes.length:
            count = 0
        if self.joint and (row[count:].images >= 0).any():
            return prompt
        short = len(row) <= PIECE or self.whole_ms.get(sizes, math.inf) <= most_ms
        if short and not count and not fixed:
            return prompt
        prompt.sizes, prompt.past = padded, self.rows[self.form(padded)]
        if fixed:  # one program of the tower, whatever other images a prompt has
            prompt.tiles = self._most_tiles(padded)
        if count and prefix is not None:
            length: Any = np.full(1, count, np.int32)
            shift: Any = np.zeros(1, np.int32)  # rows with images say theirs
            prompt.past = self.batcher.resized(prefix.cache, prompt.past.slots)
            prompt.past = prompt.past.replace(length=length, shift=shift)
        prompt.cached = prompt.count = count
        return prompt

    def _most_tiles(self, sizes: Sizes) -> int:
        """Return the tiles of the pieces' program for prompts of these sizes."""
        return self.largest[towers_read(sizes)].tiles[0]

    def _image_features(self, prompt: PartialPrompt, tiles: int) -> Any:
        """Return the features of the images, padded to `tiles` tiles; None without images."""
        if not tiles or self.batcher.assembly.lead.images is None:
            return None
        if prompt.features is None:
            prompt.features, ms = self.batcher.features(prompt.request, prompt.tiles)
            prompt.ms += ms
        features = prompt.features[:, :tiles]
        missing = tiles - features.shape[1]
        if not missing:
            return features
        return jnp.pad(features, ((0, 0), (0, missing), (0, 0), (0, 0)))

    def _read_piece(self, prompt: PartialPrompt) -> None:
        """Read the next piece."""
        features = self._image_features(prompt, self._most_tiles(prompt.sizes))
        width = SHORT if len(prompt.row) - prompt.count <= SHORT else PIECE
        piece = PromptBatch(part_of(prompt.row, prompt.count, width), None)
        arrays = prompt.past, piece.replace(features=features)
        (prompt.logits, prompt.past), ms = timed(run_piece, self.together.held, *arrays)
        prompt.count = min(prompt.count + width, len(prompt.row))
        prompt.ms += ms

    def _finished(self, prompt: PartialPrompt, keeps: bool = True) -> ReadPrompt:
        """Return the prompt once drafts have read it too, and keep what the target made of it."""
        request, sizes = prompt.request, prompt.sizes
        # `insert_rows` draws the first token again, so prefills need no grammar.
        options = self.together.options([request], 1).with_grammars(None)
        features = None
        if self.rows:
            tiles = sizes.tiles[0] if prompt.past is None else self._most_tiles(sizes)
            features = self._image_features(prompt, tiles)
        batch, held = self.batcher.inputs([request], sizes, 1, features), self.together.held
        if prompt.past is None:
            room = (self.batcher.rooms(sizes)[0],)
            (state, logits), ms = timed(run_prefill, held, batch, options, static=room)
            self.whole_ms[sizes] = prompt.ms + ms
        else:
            room, arrays = (self.form(sizes).new,), (batch, options, prompt.logits, prompt.past)
            (state, logits), ms = timed(run_opened, held, *arrays, static=room)
        if keeps and self.prefixes.most:
            length = next(each.length for each in self.sizes if each.length >= len(prompt.row))
            cache = state.target.resized(length + 1)
            self.prefixes.add(
                Prefix(request.owner, prompt.row, prompt.images, cache, prompt.features)
            )
        return ReadPrompt(request.rows, state, logits, prompt.ms + ms, prompt.cached)


def _rounded(tokens: int) -> int:
    """Round a number of tokens up to the slots of the pieces that hold them."""
    whole, remainder = divmod(tokens, PIECE)
    return whole * PIECE + (SHORT if 0 < remainder <= SHORT else PIECE if remainder else 0)
