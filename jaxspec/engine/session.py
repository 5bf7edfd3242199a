"""Hold a conversation in which each turn prefills only its new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxspec.cache import KVCache
from jaxspec.data.images import ImageSource
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.engine import Engine
from jaxspec.engine.requests import Request, Result, prompt_of
from jaxspec.errors import InputError
from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.encoder import Prompt
from jaxspec.prompts.rows import PromptRow, same_slots


class Session:
    """Converse with an engine's target, whose cache is kept from turn to turn.

    `session.ask("What is this?", images=[photo]).text`, then `session.ask("What colour is
    it?").text`. Answers equal those to the whole prompts. A draft, which is small, prefills its
    views again in every turn.

    Raises InputError for engines of several models or of recorded answers.
    """

    def __init__(self, engine: Engine) -> None:
        if type(engine.target) is not LoadedModel:
            kind = type(engine.target).__name__
            raise InputError(f"session: needs one loaded target, not a {kind}; use generate")
        self.engine = engine
        self._turn: tuple[Prompt, tuple[int, ...]] | None = None
        """The newest prompt and its answer."""
        self._cache: KVCache | None = None
        self._cached: PromptRow | None = None
        """Row of tokens and image slots that the cache holds."""

    def ask(
        self, question: str | None = None, images: Sequence[ImageSource] = (), **options: Any
    ) -> Result:
        """Answer the next question; `options` are fields of `Request`.

        `messages` are what is new since the last answer; the first ones may hold a system prompt
        and earlier turns.
        """
        if not isinstance(question, str | None):
            kind = type(question).__name__
            raise InputError(f"question: a {kind}; give a string, and options by name")
        request = Request(question, images=images, **options)
        prompt = prompt_of(request, self.engine.encoder, self._turn)
        request = replace(request, prompt=prompt, images=(), messages=(), thinking=None)
        (encoded,) = self.engine.batcher.read([request])
        row = encoded.rows[0]
        batch = Batch(self.engine.batcher, [encoded], past=self._past(row))
        *_, (result,) = batch.answers([encoded])
        self._turn, self._cache = (encoded.prompt, result.tokens), batch.state.target
        # As far as plain decoding has read when it writes the last token. A block may have read
        # past a stop string, and a token rounds differently in a pass and in the next prefill.
        self._cached = row.followed_by(result.tokens[:-1])
        return result

    def _past(self, row: PromptRow) -> KVCache | None:
        """Return the cache cut to its common beginning with the row, or None without one."""
        if self._cache is None or self._cached is None:
            return None
        common = same_slots(self._cached, row[:-1])
        return self._cache.replace(length=np.full(1, common, np.int32))
