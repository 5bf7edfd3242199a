"""Prompt lookup (Saxena 2023): draft what followed the newest tokens earlier in the same text.

The text of a row is the target's prompt and the answer so far. For each node the newest 3, 2 and 1
tokens are looked for in it, and the latest match of each length proposes the token behind it. The
longest match comes first: it gets `CONFIDENCE[n]` of the probability, the next shorter one its
share of the remainder, and the rest goes to the other views. Different tokens behind the matches of
3, 2 and 1 get 0.6, 0.4 * 0.4 and 0.24 * 0.2. Alone, lookup has no other views: what was found
is normalised, and where nothing was found all tokens are equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, TreeMask, longer
from jaxspec.decoding.inputs import PromptBatch
from jaxspec.decoding.processors import NO_TOKEN, right_aligned
from jaxspec.decoding.sources.source import Committed, Source
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.sampling import largest
from jaxspec.typing import Array, Float, Int, Params

LOOKUP = "lookup"
"""Its name among the views of `EngineConfig`."""
LONGEST = 3
"""Tokens of the longest suffix that is looked for."""
CONFIDENCE = {1: 0.2, 2: 0.4, 3: 0.6}
"""Probability of the token behind a match of n tokens, given what shorter matches add.

In LLaVA-1.5-7B's recorded answers to MMSpec a token that the matches of 3, 2 and 1 tokens agree on
is right 81 % of the time (here 1 - 0.4 * 0.6 * 0.8 = 0.81), of 2 and 1 51 % (0.52), of 1 alone 23 %
(0.2)."""


class Text(struct.PyTreeNode):
    """Hold the text of each row as a key-value cache does: one token a slot.

    The newest tokens may be a tree. Slots from `length` on are undefined.
    """

    tokens: Int[Array, "B S"]
    """The prompt, which ends at slot `start`, then new tokens."""
    length: Int[Array, " B"]
    """Tokens that the drafter has read."""
    start: int = struct.field(pytree_node=False)
    """Slot of the first new token, the same in all rows."""

    @classmethod
    def of(cls, rows: PromptRows, room: int) -> Text:
        """Return the text of right-padded prompts, with room for new tokens."""
        width = rows.tokens.shape[1]
        tokens = rows.tokens
        if rows.sources is not None:
            tokens = jnp.where(rows.sources[..., 0] == TEXT, tokens, NO_TOKEN)
        tokens = jnp.pad(right_aligned(tokens, rows.length), ((0, 0), (0, room)))
        return cls(tokens, jnp.full_like(rows.length, width), width)

    def holding(self, new: Int[Array, "B C"], count: Int[Array, " B"]) -> Text:
        """Return the text with `count` new tokens, of which the drafter has not read the newest."""
        tokens = jax.lax.dynamic_update_slice_in_dim(self.tokens, new, self.start, axis=1)
        return self.replace(tokens=tokens, length=self.start + jnp.maximum(count, 1) - 1)

    def grown(self, slots: int) -> Text:
        """Return the text with room for more new tokens."""
        return self.replace(tokens=longer(self.tokens, 1, slots))

    def read(
        self, new: Int[Array, "B T"], vocabulary: int, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], Text]:
        """Append T tokens, or nodes of a tree; return what lookup finds to follow each.

        The probabilities of a node sum to less than 1, and to 0 where nothing was found.
        """
        count = new.shape[1]
        slots = self.length[:, None] + jnp.arange(count)
        rows = jnp.arange(len(new))[:, None]
        tokens = self.tokens.at[rows, slots].set(new, mode="drop")
        text = self.replace(tokens=tokens, length=self.length + count)
        if tree is None:
            suffix, last = slots[..., None] - jnp.arange(LONGEST), slots
        else:
            root = text.length - tree.seen.shape[-1]
            suffix = root[:, None, None] + _ancestors(tree)
            last = jnp.broadcast_to(root[:, None], slots.shape)
        return _continuations(tokens, suffix, last, vocabulary), text


@dataclass(frozen=True)
class Lookup(Source[Text, Text]):
    """Draft what followed the newest tokens earlier in prompt and answer."""

    name = LOOKUP
    partial = True
    tokens: int
    """The target's V."""

    @property
    def vocabulary(self) -> int:
        return self.tokens

    def prefill(
        self,
        params: Params,
        batch: PromptBatch,
        inputs: Any,
        features: Float[Array, "B U P E"] | None,
        target: KVCache,
        room: int,
    ) -> Text:
        return Text.of(batch.prompt, room)

    def begin(self, committed: Committed, state: Text) -> tuple[Float[Array, "one B one V"], Text]:
        text = state.holding(committed.tokens, committed.count)
        return self.score(committed, text, committed.newest(1, 1))

    def score(
        self,
        committed: Committed,
        scratch: Text,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "one B T V"], Text]:
        probs, text = scratch.read(tokens, self.vocabulary, tree)
        return probs[None], text

    def commit(
        self,
        state: Text,
        scratch: Text,
        target: KVCache,
        emitted: Int[Array, " B"],
        path: Int[Array, "B J"] | None,
    ) -> Text:
        """Keep the text of the prompt: `begin` writes all new tokens behind it."""
        return state

    def weights(self, params: Params) -> Params:
        """Return no parameters."""
        return {}


def _ancestors(tree: TreeMask) -> Int[Array, "#B T suffix"]:
    """Return each node, its parent and so on, as slots counted from the tree's root.

    A node with the ancestors 0 and 2 that is node 5 gives 5, 2, 0. Slot -1 is before the root.
    """
    before = LONGEST - 1
    lineage = jnp.pad(tree.seen, ((0, 0), (0, 0), (before, 0)), constant_values=True)
    slots = jnp.where(lineage, jnp.arange(lineage.shape[-1]), -1)
    return largest(slots.astype(jnp.float32), LONGEST)[1] - before


def _continuations(
    tokens: Int[Array, "B S"],
    suffix: Int[Array, "B T suffix"],
    last: Int[Array, "B T"],
    vocabulary: int,
) -> Float[Array, "B T V"]:
    """Return the probabilities of the tokens behind the latest matches.

    suffix: The slots of the newest tokens of each node, the newest first.
    last: The last slot that may hold the token behind a match.
    """
    slots = jnp.arange(tokens.shape[1])
    possible = (slots <= last[..., None]) & (tokens != NO_TOKEN)[:, None]
    latest = []
    for back in range(LONGEST):
        token = jax.vmap(lambda row, at: row[at])(tokens, suffix[..., back])[..., None]
        earlier = jnp.pad(tokens, ((0, 0), (back + 1, 0)), constant_values=NO_TOKEN)
        matches = (earlier[:, None, : len(slots)] == token) & (token != NO_TOKEN)
        possible &= matches & (suffix[..., back, None] >= 0)
        latest.append(jnp.where(possible, slots, -1).max(-1))
    probs, mass = jnp.zeros((*last.shape, vocabulary)), jnp.ones(last.shape)
    for slot, length in zip(latest[::-1], range(LONGEST, 0, -1)):
        follows = jax.vmap(lambda row, at: row[at])(tokens, jnp.maximum(slot, 0))
        share = jnp.where(slot >= 0, mass * CONFIDENCE[length], 0.0)
        probs += share[..., None] * (jnp.arange(vocabulary) == follows[..., None])
        mass -= share
    return probs


def backed_off(
    matches: Float[Array, "B T V"], views: Float[Array, "others B T V"]
) -> Float[Array, "B T V"]:
    """Return lookup's distribution: its matches, and the mean of the views for the remainder."""
    mass = matches.sum(-1, keepdims=True)
    if len(views):
        return matches + (1 - mass) * views.mean(0)
    return jnp.where(mass > 0, matches / jnp.where(mass > 0, mass, 1.0), 1 / matches.shape[-1])
