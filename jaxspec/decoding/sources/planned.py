"""Take the scores of a block that a source drafts in one pass, place by place."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, TreeMask
from jaxspec.decoding.sources.head import HeadSource
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
class PlannedSource(HeadSource[KVCache, Planned]):
    """Draft a block in one pass. A Markov head adds a term for the token before to the scores."""

    @property
    def longest(self) -> int:
        return self.config.gamma

    def passes(self, gamma: int) -> int:
        return 1

    def planned(
        self, committed: Committed, scores: Float[Array, "B J V"], cache: KVCache
    ) -> tuple[Float[Array, "one B one V"], Planned]:
        """Return the scores of the token after the newest one, and the plan of a block."""
        plan = Planned(cache, scores, jnp.zeros((), jnp.int32))
        return self.score(committed, plan, committed.newest(1, 1))

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
        if self.config.corrects:
            model, weights = self.model, self.weights(committed.params)
            embeds = model.embed(weights, PromptRows(tokens, tokens[:, 0]), None)
            added = self.run(committed.params, "correction", tokens, embeds)
            scores += fill_vocabulary(model.text, added)
        return scores[None], scratch.replace(place=scratch.place + 1)
