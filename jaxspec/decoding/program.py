"""The protocol of programs: what an engine needs of any way to decode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from jaxspec.cache import KVCache
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.state import DecodeState, Pause, PromptBatch, Prompts
from jaxspec.models import LanguageModel
from jaxspec.models.head_slots import HeadRows
from jaxspec.models.inputs import Pool, PromptRows
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Float, Params

State = TypeVar("State", bound=DecodeState[Any, Any, Any])
Images = dict[str, Float[Array, "B U ..."]] | None
"""The tiles of each row's images; None where no row has any."""


@dataclass(frozen=True)
class Member:
    """Pair a model with its form of prompts. Static: part of the compiled program."""

    model: LanguageModel
    pool: Pool | None = None
    """Pooling of image features; None keeps all."""
    reads_images: bool = True
    """Whether the prompt shows images."""


class Program(ABC, Generic[State]):
    """Decode with pure functions: `prefill` makes the state, and `decode` runs the loop.

    Programs are frozen dataclasses, so that they can be static arguments of compiled functions.
    """

    members: tuple[Member, ...]
    """Models that write: the target, or all collaborating models."""

    @abstractmethod
    def weights(self, params: Params) -> tuple[Params, ...]:
        """Return the parameters of each member."""

    @abstractmethod
    def caches(self, state: State) -> tuple[KVCache, ...]:
        """Return the cache of each member."""

    @property
    def forms(self) -> tuple[Member, ...]:
        """Return the forms in which a prompt is read: the members', then those of the draft."""
        return self.members

    @property
    def towers(self) -> tuple[LanguageModel | None, ...]:
        """Return the models that read image tiles, in the order of `Sizes.tiles`."""
        return tuple(one.model if one.reads_images else None for one in self.members)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Return XLA's options for prefill and loop."""
        return {}

    @property
    def drafts(self) -> bool:
        """Return whether a draft proposes blocks."""
        return False

    @property
    def head(self) -> KVHeadConfig | None:
        """Return the KV head that reads the target's cache, or None."""
        return None

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
        weights: Float[Array, "B R"] | None = None,
        head: HeadRows | None = None,
    ) -> PromptBatch:
        """Return the batch that `prefill` reads.

        Args:
          rows: Prompts in each of the program's `forms`.
          images: Tiles for each of the program's `towers`.
          weights: Initial weights of the draft's views.
          head: Slots of the target's rows that a KV head reads.
        """
        count = len(self.members)
        first, *others = map(Prompts, rows[:count], images)
        (own,) = images[count:] or (None,)
        return PromptBatch(
            first.rows, first.images, tuple(rows[count:]), own, weights, head, others=tuple(others)
        )

    @abstractmethod
    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> State:
        """Run the prompts and return a state with each row's first new token.

        new_slots: Most new tokens of a row.
        """

    @abstractmethod
    def decode(
        self, params: Params, state: State, options: Sampling, pause: Pause | None = None
    ) -> State:
        """Decode until every row is done, or until `pause`, in one `while_loop`."""
