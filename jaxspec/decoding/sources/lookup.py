"""Draft what followed the newest tokens earlier in the same text (prompt lookup, Saxena 2023).

The text of a row is the target's prompt and the answer so far. For each node the newest 3, 2 and 1
tokens are looked for in it, and the matches of each length propose the tokens behind them, the
latest match first (as branches of a tree, AdaPLD, arXiv 2606.05742). In turn, each
proposal gets its share of the remaining probability: the latest match of n tokens `CONFIDENCE[n]`,
then the next different token behind a match of n tokens half of that, and so on. Different tokens
behind the latest matches of 3, 2 and 1 get 0.6, 0.4 * 0.4 and 0.24 * 0.2.

Mixed with other sources, lookup leaves them the rest. Alone, it adds the tokens of the text by
their frequency, so that a tree has branches where little or nothing matches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import TreeMask, resized
from jaxspec.decoding.processors import NO_TOKEN, ending_at, right_aligned
from jaxspec.decoding.sources.source import Committed, Prefilled, Source, Verified
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.sampling import largest
from jaxspec.typing import Array, Bool, Float, Int, Params, Tokens

LOOKUP = "lookup"
"""Name of lookup among the views of `EngineConfig`."""
LONGEST = 3
"""Tokens of the longest suffix that is looked for."""
CONFIDENCE = {1: 0.2, 2: 0.4, 3: 0.6}
"""Probability of the token behind a match of n tokens, given what shorter matches add.

In LLaVA-1.5-7B's recorded answers to MMSpec a token that the matches of 3, 2 and 1 tokens agree on
is right 81 % of the time (here 1 - 0.4 * 0.6 * 0.8 = 0.81), one of 2 and 1 51 % (0.52), one of
only 1 23 % (0.2)."""
EARLIER = 4
"""Different tokens behind matches of one length that are proposed.

In the same answers the second of them behind 3, 2 and 1 tokens, if all proposals before it are
wrong, is right 33, 17 and 11 % of the time (here 30, 20 and 10)."""
COMMON = 0.1
"""Share of the remaining probability that the text's own tokens get where lookup is the only draft.

Where the matches of 3, 2 and 1 tokens agree, a drawn token is one of these 2 % of the time; with a
share of 1 it would be 19 %. Greedy trees would gain by that: on 120 prompts of MMSpec, 32 nodes
grown best first write 1.81 tokens per pass, and 1.89 with a share of 1."""


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

    def fitted(self, other: Text) -> Text:
        """Return the text with as many slots for prompt and new tokens as another."""
        prompt, new = jnp.split(self.tokens, [self.start], axis=1)
        new = resized(new, 1, other.tokens.shape[1] - other.start)
        tokens = jnp.concatenate([ending_at(prompt, other.start), new], axis=1)
        length = self.length + other.start - self.start
        return self.replace(tokens=tokens, length=length, start=other.start)

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

    def frequencies(self, vocabulary: int) -> Float[Array, "B V"]:
        """Return each token's share of the text up to the newest token."""
        slots = jnp.arange(self.tokens.shape[1])
        holds_text = (slots <= self.length[:, None]) & (self.tokens != NO_TOKEN)
        tokens = jnp.where(holds_text, self.tokens, vocabulary)  # out of range, so it is dropped
        rows = jnp.arange(len(tokens))[:, None]
        counts = jnp.zeros((len(tokens), vocabulary)).at[rows, tokens].add(1.0, mode="drop")
        return counts / counts.sum(-1, keepdims=True)


class Search(struct.PyTreeNode):
    """Hold the text within a block, drafted tokens included."""

    text: Text
    common: Float[Array, "B V"] | None
    """Frequencies of the committed tokens, if lookup is the only draft."""


@dataclass(frozen=True)
class Lookup(Source[Text, Search]):
    """Draft what followed the newest tokens earlier in prompt and answer."""

    name = LOOKUP
    partial = True
    tokens: int
    """The target's V."""
    alone: bool = False
    """Whether no other source drafts, so that all tokens of the text are candidates."""
    lengths: ClassVar = (7,)

    @property
    def vocabulary(self) -> int:
        return self.tokens

    def planned(self, gamma: int, alone: bool) -> Lookup:
        return replace(self, alone=alone)

    def foreseen(self, text: Int[np.ndarray, " S"], count: int) -> Bool[np.ndarray, " new"]:
        """Return whether a match proposed each of the newest tokens before all others.

        Where nothing matches, the token that it drafts, the text's commonest, counts as wrong.
        """
        ends = range(len(text) - count, len(text))
        return np.array([_latest(text[:end]) == text[end] for end in ends], bool)

    def prefill(self, prefilled: Prefilled, inputs: Any) -> Text:
        return Text.of(prefilled.batch.prompt, prefilled.room)

    def begin(
        self, committed: Committed, state: Text
    ) -> tuple[Float[Array, "one B one V"], Search]:
        text = state.holding(committed.tokens, committed.count)
        common = text.frequencies(self.tokens) if self.alone else None
        return self.score(committed, Search(text, common), committed.newest(1, 1))

    def score(
        self, committed: Committed, scratch: Search, tokens: Tokens, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "one B T V"], Search]:
        probs, text = scratch.text.read(tokens, self.vocabulary, tree)
        if scratch.common is not None:
            remainder = 1 - probs.sum(-1, keepdims=True)
            probs += COMMON * remainder * scratch.common[:, None]
            probs /= probs.sum(-1, keepdims=True)
        return probs[None], scratch.replace(text=text)

    def commit(self, state: Text, scratch: Search, verified: Verified) -> Text:
        """Keep the text of the prompt: `begin` writes all new tokens behind it."""
        return state

    def weights(self, params: Params) -> Params:
        """Return no parameters."""
        return {}


def _latest(text: Int[np.ndarray, " S"]) -> int:
    """Return the token behind the latest match of the most newest tokens; `NO_TOKEN` for none."""
    latest, slots = NO_TOKEN, np.flatnonzero(text[1:] != NO_TOKEN) + 1
    for back in range(1, min(LONGEST, len(text)) + 1):
        slots = slots[slots >= back]
        slots = slots[text[slots - back] == text[-back]]
        if text[-back] == NO_TOKEN or not len(slots):
            break
        latest = int(text[slots[-1]])
    return latest


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
    at = jax.vmap(lambda row, slots: row[slots])
    possible = (slots <= last[..., None]) & (tokens != NO_TOKEN)[:, None]
    proposals = []
    for back in range(LONGEST):
        token = at(tokens, suffix[..., back])[..., None]
        earlier = jnp.pad(tokens, ((0, 0), (back + 1, 0)), constant_values=NO_TOKEN)
        matches = (earlier[:, None, : len(slots)] == token) & (token != NO_TOKEN)
        possible &= matches & (suffix[..., back, None] >= 0)
        remaining = possible
        for rank in range(EARLIER):
            slot = jnp.where(remaining, slots, -1).max(-1)
            follows = at(tokens, jnp.maximum(slot, 0))
            remaining &= tokens[:, None] != follows[..., None]
            confidence = CONFIDENCE[back + 1] / 2**rank
            proposals.append((rank, -back, follows, jnp.where(slot >= 0, confidence, 0.0)))
    probs, mass = jnp.zeros((*last.shape, vocabulary)), jnp.ones(last.shape)
    for *_, follows, confidence in sorted(proposals, key=lambda proposal: proposal[:2]):
        share = mass * confidence
        probs += share[..., None] * (jnp.arange(vocabulary) == follows[..., None])
        mass -= share
    return probs


def backed_off(
    matches: Float[Array, "B T V"], views: Float[Array, "others B T V"]
) -> Float[Array, "B T V"]:
    """Return lookup's distribution: its matches, and the mean of the views for the remainder."""
    if not len(views):
        return matches
    return matches + (1 - matches.sum(-1, keepdims=True)) * views.mean(0)
