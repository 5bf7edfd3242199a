"""Define the protocol of a source of drafts: score next tokens for the drafter.

A source has four verbs inside the compiled program. With gamma = 3 and the newest token x:

    prefill(prefilled, inputs)       -> state    once
    begin(committed, state)          -> scores after x, scratch
    score(committed, scratch, d0)    -> scores after d0, scratch     and again for d1
    commit(state, scratch, verified) -> state

A *state* is carried from block to block. A *scratch* exists only within a block: it holds what was
drafted, and `commit` keeps the part that was accepted. A source that drafted no block for a while,
because another plan was in use, first has to `catch_up`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, TreeMask
from jaxspec.decoding.inputs import Images, Member, PromptBatch
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import replicated
from jaxspec.typing import Array, Bool, Features, Float, Int, Params, Tokens

State = TypeVar("State")
"""What a source carries from block to block: leaves [r*B, ...], for its r rows of the mixture."""
Scratch = TypeVar("Scratch")
"""What a source carries within a block."""


@dataclass(frozen=True)
class Prefilled:
    """Hold what is certain once the target has read the prompts."""

    params: Params
    """{"target": ..., and an entry for each source with parameters, by its `name`}."""
    batch: PromptBatch
    features: Features | None
    """Image features of the target's tower; None without images."""
    target: KVCache
    """The target's cache, of the prompts."""
    room: int
    """Slots after the prompt."""


@dataclass(frozen=True)
class Committed:
    """Hold what is certain when a block begins. Sources read it, and none changes it."""

    params: Params
    """As in `Prefilled`."""
    tokens: Int[Array, "B C"]
    """New tokens; entries from `count` on are undefined."""
    count: Int[Array, " B"]
    """Number of committed new tokens."""
    target: KVCache
    """The target's cache, of all committed tokens except the newest."""
    reads: int
    """Number of tokens that sources read in a block: the newest, and drafted ones."""

    def newest(self, count: int | Array, width: int) -> Tokens:
        """Return `width` new tokens, of which the first `count` are the newest committed ones."""
        first = jnp.broadcast_to(self.count - count, self.count.shape)
        indices = first[:, None] + jnp.arange(width)
        last = self.tokens.shape[1] - 1
        return jnp.take_along_axis(self.tokens, jnp.clip(indices, 0, last), axis=1)


@dataclass(frozen=True)
class Verified:
    """Hold what the target verified of a block."""

    emitted: Int[Array, " B"]
    """Number of tokens that the block added: accepted drafts and the token after them."""
    path: Int[Array, "B J"] | None = None
    """Nodes on a tree's accepted path, numbered in the order in which sources read them; None for
    a chain. If they read the root, a and b, and b is accepted, path is [2, -1, ...]: no source has
    read node -1."""


class Buckets(NamedTuple):
    """Hold the sizes that programs are compiled for."""

    prompt: tuple[int, ...]
    """Prompt tokens."""
    images: tuple[int, ...]
    """Image tiles, or images."""


@dataclass(frozen=True)
class Source(ABC, Generic[State, Scratch]):
    """Score next tokens. Static: part of the compiled program. A source draws nothing."""

    name: ClassVar[str]
    """Key of its parameters."""
    partial: ClassVar[bool] = False
    """Whether its scores are probabilities, which may sum to less than 1, and not logits."""
    width: ClassVar[int] = 1
    """Number r of distributions that it adds to the mixture."""
    longest: ClassVar[int | None] = None
    """Longest block that it can draft; None for any length."""
    lengths: ClassVar[tuple[int, ...]] = (2, 5)
    """Lengths of blocks, in order, of plans with only this source."""
    target_states: ClassVar[tuple[int, ...] | None] = None
    """Hidden states that the target's cache must keep, as `KVCache.kept`."""
    target_share: ClassVar[float] = 0.0
    """Share of the target's cache that a pass reads."""
    forms: ClassVar[tuple[Member, ...]] = ()
    """Forms of the prompt that it reads, other than the target's."""
    tower: ClassVar[LanguageModel | None] = None
    """Model that encodes its images; None if it reads none of its own."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Return the number of tokens that it can score."""

    def planned(self, gamma: int, alone: bool) -> Self:
        """Return the source as it drafts blocks of this length, by itself or with others."""
        return self

    @abstractmethod
    def prefill(self, prefilled: Prefilled, inputs: Any) -> State:
        """Return the state after the prompt.

        inputs: What `inputs` returned.
        """

    def catch_up(self, committed: Committed, state: State) -> State:
        """Read most of what was committed while the source drafted nothing.

        It leaves what `begin` reads, and nothing changes if the source drafted the last block.
        """
        return state

    def foreseen(self, text: Int[np.ndarray, " S"], count: int) -> Bool[np.ndarray, " new"] | None:
        """Return whether the source, by itself and greedily, would have drafted each newest token.

        It is asked on the host, for what other plans wrote. None: only a run can show it.

        Args:
          text: The prompt and the answer, `NO_TOKEN` for slots of images.
          count: Number of the newest tokens.
        """
        return None

    @abstractmethod
    def begin(
        self, committed: Committed, state: State
    ) -> tuple[Float[Array, "rows B one V"], Scratch]:
        """Read what was committed since the last block; score the token after the newest one."""

    @abstractmethod
    def score(
        self, committed: Committed, scratch: Scratch, tokens: Tokens, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "rows B T V"], Scratch]:
        """Read T drafted tokens, or nodes of a tree; score the token after each."""

    @abstractmethod
    def commit(self, state: State, scratch: Scratch, verified: Verified) -> State:
        """Keep the emitted tokens of a block.

        Floats come from `scratch`, which XLA updated in place; lengths come from `state`.
        """

    def sizes(
        self, lengths: Sequence[int], slot_images: np.ndarray, buckets: Buckets
    ) -> tuple[int, ...]:
        """Return the sizes of its inputs for one prompt, rounded up to buckets.

        Args:
          lengths: Tokens of the prompt in each of its `forms`.
          slot_images: Index of the image in each slot of the target's row; -1 for text.
        """
        return ()

    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Images,
        slot_images: Sequence[np.ndarray],
        sizes: tuple[int, ...],
    ) -> Any:
        """Return the arrays that `prefill` reads in addition to the target's prompts.

        Args:
          rows: Prompts in each of its `forms`.
          images: Tiles for its `tower`.
          slot_images: As in `sizes`, for each prompt.
        """
        return None

    def shapes(self, dtype: Any) -> Params:
        """Return the shapes of its parameters; {} if it has none."""
        return {}

    def places(self, params: Params, mesh: Any) -> Any:
        """Return the placement of its parameters on a mesh: whole on each device."""
        return jax.tree.map(lambda _: replicated(mesh), params)

    def passes(self, gamma: int) -> int:
        """Return how often drafting a block reads its weights."""
        return gamma

    def weights(self, params: Params) -> Params:
        """Return the parameters that one pass reads, those borrowed from the target included."""
        return params[self.name]
