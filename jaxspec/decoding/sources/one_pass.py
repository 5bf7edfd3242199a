"""Draft a block in one pass of a KV head, over the newest token and masks behind it."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, TreeMask, hidden_before
from jaxspec.config import OnePassConfig
from jaxspec.decoding.sources.kv_head import TargetKeys
from jaxspec.decoding.sources.source import Committed
from jaxspec.models.inputs import PromptRows
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.typing import Array, Float, Int


class Planned(struct.PyTreeNode):
    """Hold the scores of a block from one pass; its tokens are chosen one by one."""

    cache: KVCache
    scores: Float[Array, "B J V"]
    place: Int[Array, ""]
    """Place of the next token, 0 at first; all nodes of a tree's level have the same."""


@dataclass(frozen=True)
class OnePassSource(TargetKeys[Planned]):
    """Draft a block in one pass. A Markov head adds a term for the token before to the scores."""

    config: OnePassConfig

    name = "one_pass"

    @property
    def longest(self) -> int:
        return self.config.gamma

    def begin(
        self, committed: Committed, state: KVCache
    ) -> tuple[Float[Array, "one B one V"], Planned]:
        newest, model, weights = committed.newest(1, 1), self.model, self.weights(committed.params)
        embeds = model.embed(weights, PromptRows(newest, state.length), None)[:, 0]
        before = hidden_before(state, 1, None)[:, 0] if self.config.reads_hidden else None
        block = self.run(committed.params, "masked", embeds, before, self.gamma)
        scores, cache = model.advance(weights, block, state)
        planned = Planned(cache, scores, jnp.zeros((), jnp.int32))
        return self.score(committed, planned, newest)

    def score(
        self,
        committed: Committed,
        scratch: Planned,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "one B T V"], Planned]:
        """Return the scores of what follows each of T tokens at the plan's place."""
        scores = jax.lax.dynamic_slice_in_dim(scratch.scores, scratch.place, 1, axis=1)
        scores = jnp.broadcast_to(scores, (*tokens.shape, scores.shape[-1]))
        if self.config.markov:
            model, weights = self.model, self.weights(committed.params)
            embeds = model.embed(weights, PromptRows(tokens, tokens[:, 0]), None)
            added = self.run(committed.params, "correction", embeds)
            scores += fill_vocabulary(model.text, added)
        return scores[None], scratch.replace(place=scratch.place + 1)

    def commit(
        self,
        state: KVCache,
        scratch: Planned,
        target: KVCache,
        emitted: Int[Array, " B"],
        path: Int[Array, "B J"] | None,
    ) -> KVCache:
        return self._kept(state, scratch.cache, target, emitted)

    def passes(self, gamma: int) -> int:
        return 1
