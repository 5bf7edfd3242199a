"""Define the protocol of programs: what an engine needs of any way to decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from jaxspec.cache import KVCache
from jaxspec.decoding.inputs import Images, Member, PromptBatch, Prompts
from jaxspec.decoding.sources.source import Source
from jaxspec.decoding.state import DecodeState, Pause
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Float, Params

State = TypeVar("State", bound=DecodeState[Any, Any])


class Program(ABC, Generic[State]):
    """Decode with pure functions: `prefill` makes the state, and `decode` runs the loop.

    Programs are frozen dataclasses, so that they can be static arguments of compiled functions.
    """

    members: tuple[Member, ...]
    """Models that write: the target, or all collaborating models."""
    sources: ClassVar[tuple[Source, ...]] = ()
    """Sources of drafts; () for a program that drafts nothing."""
    compiler_options: ClassVar[dict[str, bool]] = {}
    """XLA's options for prefill and loop."""

    @abstractmethod
    def weights(self, params: Params) -> tuple[Params, ...]:
        """Return the parameters of each member."""

    @abstractmethod
    def caches(self, state: State) -> tuple[KVCache, ...]:
        """Return the cache of each member."""

    @property
    def towers(self) -> tuple[LanguageModel | None, ...]:
        """Return the models that encode image tiles, one for each member and each source."""
        members = (member.model if member.reads_images else None for member in self.members)
        return (*members, *(source.tower for source in self.sources))

    @property
    @abstractmethod
    def spare_slots(self) -> int:
        """Return the number of cache slots past the last new token that a step may write."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Return the most tokens that one step may add to a row."""

    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Sequence[Images],
        weights: Float[Any, "B R"] | None = None,
        sources: tuple[Any, ...] = (),
    ) -> PromptBatch:
        """Return the batch that `prefill` reads.

        Args:
          rows: Prompts in the form of each member.
          images: Tiles for each member.
          weights: Initial weights of the mixture.
          sources: Inputs of each source of drafts.
        """
        first, *peers = map(Prompts, rows, images)
        return PromptBatch(first.rows, first.images, weights, sources, peers=tuple(peers))

    @abstractmethod
    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> tuple[State, Float[Array, "*M B V"]]:
        """Run the prompts.

        Return a state with each row's first new token, and the logits that it was drawn from.

        new_slots: Maximum new tokens of a row.
        """

    @abstractmethod
    def begin(
        self, params: Params, state: State, logits: Float[Array, "*M B V"], options: Sampling
    ) -> State:
        """Return a state after prefill with first tokens that these options draw from logits."""

    @abstractmethod
    def step(self, params: Params, state: State, options: Sampling) -> State:
        """Add tokens to every row that is not done."""

    def decode(
        self, params: Params, state: State, options: Sampling, pause: Pause | None = None
    ) -> State:
        """Decode until every row is done, or until `pause`, in one `while_loop`."""
        return jax.lax.while_loop(
            lambda state: state.goes_on(pause),
            lambda state: self.step(params, state, options),
            state,
        )
