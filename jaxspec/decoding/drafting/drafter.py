"""Draft a block from a mixture of sources.

IbED: one small model reads several views of every prompt. Its distributions, and those of other
sources, are mixed, and all are fed the same drawn tokens. A drafter knows no kind of source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import TreeMask
from jaxspec.decoding.processors import History, allowed, processed
from jaxspec.decoding.sources.lookup import backed_off
from jaxspec.decoding.sources.source import Committed, Prefilled, Source, Verified
from jaxspec.decoding.state import step_keys
from jaxspec.sampling import Sampling, by_place, fit_vocabulary, mix, tempered
from jaxspec.typing import Array, Bool, Float, Int, Tokens
from jaxspec.verification import Draft

States = tuple[Any, ...]
"""The state of each source, or its scratch within a block."""


@dataclass(frozen=True)
class Mixing:
    """Hold how a block's distributions are mixed and drawn from."""

    weights: Float[Array, "B R"]
    options: Sampling
    count: Int[Array, " B"]
    """Number of committed new tokens."""
    history: History | None
    """Tokens before the scores; None without processors."""

    def behind(self, drafted: Int[Array, "B N"], before: Bool[Array, "#B T N"]) -> Mixing:
        """Return the mixing of scores behind drafted tokens, as `History.behind`."""
        if self.history is None:
            return self
        return replace(self, history=self.history.behind(drafted, before))

    def keys(self, place: int | Array) -> Array:
        """Return the rows' keys for the draws at a place of the block."""
        return step_keys(self.options, self.count, place)


@dataclass(frozen=True, kw_only=True)
class Drafter(ABC):
    """Draft a block of one shape. Static: part of the compiled program."""

    sources: tuple[Source, ...]
    """Sources of logits, then those that are `partial`."""
    gamma: int
    """Draft length J: number of drafted tokens on the longest path."""
    vocabulary: int
    """Target's V, to which logits are fitted."""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """Return the number of tokens drafted in a block."""

    @property
    @abstractmethod
    def reads(self) -> int:
        """Return the number of tokens that sources read: the newest and the drafted parents."""

    @property
    def width(self) -> int:
        """Return R, the number of distributions in the mixture."""
        return sum(source.width for source in self.sources)

    def prefill(self, prefilled: Prefilled) -> States:
        """Return the state of each source after the prompt, see `Source.prefill`."""
        return tuple(
            source.prefill(prefilled, inputs)
            for source, inputs in zip(self.sources, prefilled.batch.sources, strict=True)
        )

    def draft(
        self,
        committed: Committed,
        states: States,
        weights: Float[Array, "B R"],
        options: Sampling,
        history: History | None = None,
    ) -> tuple[Draft, States]:
        """Propose a block. Return it with each source's scratch, which `commit` takes.

        history: Tokens before the block, for processors.
        """
        starts = [source.begin(committed, state) for source, state in zip(self.sources, states)]
        mixing = Mixing(weights, options, committed.count, history)
        return self._propose(committed, mixing, *self._joined(starts))

    @abstractmethod
    def _propose(
        self, committed: Committed, mixing: Mixing, scores: Float[Array, "R B 1 V"], scratch: States
    ) -> tuple[Draft, States]:
        """Propose a block, given the scores of the token after the newest one."""

    def score(
        self, committed: Committed, scratch: States, tokens: Tokens, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "R B T V"], States]:
        """Return all scores after each of T drafted tokens, or nodes of a tree."""
        return self._joined(
            [
                source.score(committed, part, tokens, tree)
                for source, part in zip(self.sources, scratch)
            ]
        )

    def _joined(self, parts: list[tuple[Array, Any]]) -> tuple[Float[Array, "R B T V"], States]:
        scores, scratch = zip(*parts)
        return jnp.concatenate([fit_vocabulary(x, self.vocabulary) for x in scores]), scratch

    def commit(self, states: States, scratch: States, verified: Verified) -> States:
        """Return the states after a verified block, see `Source.commit`."""
        return tuple(
            source.commit(state, part, verified)
            for source, state, part in zip(self.sources, states, scratch, strict=True)
        )

    def _mixed(
        self, mixing: Mixing, scores: Float[Array, "R B T V"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "R B T V"]]:
        """Return the mixture at T places, and each source's own distributions."""
        temperature, weights = mixing.options.temperature, mixing.weights
        whole = sum(source.width for source in self.sources if not source.partial)
        context = mixing.history, mixing.options.processors
        logits = jax.vmap(lambda x: processed(x, *context))(scores[:whole])
        probs = by_place(lambda logits: tempered(logits, temperature))(logits)
        # Where a form bans all that lookup alone proposes, a token that it allows is drafted.
        least = 0.0 if whole else jnp.finfo(jnp.float32).tiny
        partial = [backed_off(allowed(x + least, *context), probs)[None] for x in scores[whole:]]
        probs = jnp.concatenate([probs, *partial]) if partial else probs
        return by_place(lambda probs: mix(probs, weights))(probs), probs
