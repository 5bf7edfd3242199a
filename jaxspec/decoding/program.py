"""The contract between an engine and the program that it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.cache import KVCache
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.state import DecodeState, Pause, PromptBatch
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import Pool, PromptRows
from jaxspec.models.kv_head import HeadRows
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Float, Params

Images = dict[str, Float[Array, "B U ..."]] | None
"""The tiles of each row's images; None where no row has any."""


@dataclass(frozen=True)
class Member:
    """A model and the form in which it reads a prompt. Static: part of the compiled program."""

    model: LanguageModel
    pool: Pool | None = None
    """How the features of an image are pooled; None leaves them as they are."""
    reads_images: bool = True
    """Whether the prompt shows images at all."""


class Program(ABC):
    """A way to decode as pure functions: `prefill` makes the state, `decode` runs the loop.

    Programs are frozen dataclasses, so that they can be static arguments of compiled functions.
    """

    members: tuple[Member, ...]
    """The models that write: the target, or all that decode collaboratively."""

    @abstractmethod
    def weights(self, params: Params) -> tuple[Params, ...]:
        """Return the parameters of each member."""

    @abstractmethod
    def caches(self, state: DecodeState) -> tuple[KVCache, ...]:
        """Return the cache of each member."""

    @property
    def forms(self) -> tuple[Member, ...]:
        """All forms in which a prompt is read: the members', and behind them those of the draft."""
        return self.members

    @property
    def towers(self) -> tuple[LanguageModel | None, ...]:
        """The models whose image tiles are read, in the order of `Sizes.tiles`."""
        return tuple(one.model if one.reads_images else None for one in self.members)

    @property
    def drafts(self) -> bool:
        """Whether a draft of the target proposes blocks."""
        return False

    @property
    def head(self) -> KVHeadConfig | None:
        """The KV head that reads the target's cache."""
        return None

    @property
    @abstractmethod
    def spare_slots(self) -> int:
        """Cache slots past the last new token that a step of the loop may write to."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """The most tokens that one step of the loop may give a row."""

    @abstractmethod
    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Sequence[Images],
        weights: Float[Array, "B R"] | None = None,
        head: HeadRows | None = None,
    ) -> PromptBatch:
        """Return what `prefill` reads.

        Args:
          rows: The prompts in each of the `forms`.
          images: Tiles for each of the `towers`.
          weights: First weights of the draft's views.
          head: What a KV head reads of the prompts.
        """

    @abstractmethod
    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> DecodeState:
        """Run the prompts; the state holds the first new token of each row.

        `new_slots` bounds the new tokens of a row.
        """

    @abstractmethod
    def decode(
        self, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
    ) -> DecodeState:
        """Decode until every row is done, or until `pause`, in one `while_loop`."""
