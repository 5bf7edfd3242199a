"""A conversation whose turns each read only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.engine import Engine
from jaxspec.decoding.requests import Request, Result
from jaxspec.decoding.running import RunningBatch
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel
from jaxspec.models.inputs import TEXT
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import PromptRow, same_slots


class Session:
    """A conversation with an engine's target, whose cache stays from turn to turn.

    `session.ask("What is this?", images=[photo]).text`, then `session.ask("What colour is
    it?").text`. Answers are those to the whole prompts. A draft, which is small, reads its views
    anew in every turn.

    Raises InputError for engines of several models, and of recorded answers.
    """

    def __init__(self, engine: Engine) -> None:
        if type(engine.target) is not LoadedModel:
            raise InputError(
                "session: has one target that is loaded; give several models, or answers, to "
                "generate"
            )
        self.engine = engine
        self._prompt: Prompt | None = None
        self._answer: tuple[int, ...] = ()
        self._cache: KVCache | None = None
        self._cached: PromptRow | None = None
        """What the slots of the cache show."""

    def ask(self, question: str, images: Sequence[Any] = (), **options: Any) -> Result:
        """Answer the next question; `options` are those of a `Request`."""
        encoder = self.engine.encoder
        if not isinstance(question, str):
            kind = type(question).__name__
            raise InputError(f"question: a {kind}; give a string, and options by name")
        if not isinstance(images, list | tuple):
            kind = type(images).__name__
            raise InputError(f"images: a {kind}; give a list of images, as images=[page]")
        if self._prompt is None:
            prompt = encoder.prompt(question, images)
        else:
            prompt = encoder.follow_up(self._prompt, self._answer, question, images)
        (read,) = self.engine.batcher.read([Request(prompt, **options)])
        row = read.rows[0]
        batch = RunningBatch(self.engine.batcher, [read], past=self._past(row))
        while batch.busy:
            batch.decode()
            batch.grow()
        (result,) = batch.results()
        cache: KVCache = batch.state.target
        self._prompt, self._answer, self._cache = read.prompt, result.tokens, cache
        written = row.followed_by(np.asarray(batch.state.tokens)[0].tolist())
        self._cached = written[: int(np.asarray(cache.length)[0])]
        return result

    def _past(self, row: PromptRow) -> KVCache | None:
        """Return the cache, cut to the slots that begin the row; None where the whole row is
        read."""
        if self._cache is None or self._cached is None:
            return None
        kept = same_slots(self._cached, row[:-1])
        fresh = row[kept:]
        if fresh.rotary is not None and fresh.sources is not None and (fresh.sources != TEXT).any():
            return None  # images shift the positions behind them (M-RoPE), and only whole prompts say by how much
        return self._cache.replace(length=np.full(1, kept, np.int32))
