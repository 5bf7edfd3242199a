"""Draft a block in one pass of a DFlash head, whose keys come from the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, init_cache, unread, whole_slots, written
from jaxspec.config import DFlashConfig
from jaxspec.decoding.sources.planned import Planned, PlannedSource
from jaxspec.decoding.sources.source import Committed, Prefilled, Verified
from jaxspec.models.inputs import PromptRows
from jaxspec.typing import Array, Float, Int, Params


@dataclass(frozen=True)
class DFlash(PlannedSource):
    """Draft a block in one pass. Between blocks it keeps keys of what the target has read.

    With gamma = 2 and the newest token x at slot 7, the target has read slots 0 to 6. If the head
    knows those to 4, `begin` makes its keys of 5 and 6, and runs x m m at slots 7, 8 and 9. The
    next block overwrites these.
    """

    config: DFlashConfig

    name = "dflash"

    def prefill(self, prefilled: Prefilled, inputs: Any) -> KVCache:
        params, target = prefilled.params, prefilled.target
        count, width = prefilled.batch.prompt.tokens.shape
        assert target.hidden is not None
        slots = whole_slots(width + prefilled.room)
        cache = init_cache(self.model.text, count, slots, target.hidden.dtype)
        empty, read = cache.replace(split=True), jnp.zeros(count, jnp.int32)
        return self._read(params, empty, target, read, width, width).replace(length=target.length)

    def begin(
        self, committed: Committed, state: KVCache
    ) -> tuple[Float[Array, "one B one V"], Planned]:
        model, weights, target = self.model, self.weights(committed.params), committed.target
        cache = self._read(committed.params, state, target, state.length, self.gamma + 1)
        newest, block = committed.newest(1, 1), self.config.slots_of(self.gamma)
        masks = jnp.full((len(newest), block - 1), self.config.mask_token, newest.dtype)
        tokens = PromptRows(jnp.concatenate([newest, masks], axis=1), target.length)
        places = jnp.arange(block)[None]
        whole = TreeMask(places, jnp.ones((1, block, block), bool))  # all tokens see each other
        scores, cache = model.advance(
            weights,
            model.embed(weights, tokens, None),
            cache.replace(length=target.length),
            whole,
            jnp.broadcast_to(places[:, -self.gamma :], (len(newest), self.gamma)),
        )
        return self.planned(committed, scores, cache)

    def commit(self, state: KVCache, scratch: Planned, verified: Verified) -> KVCache:
        """Keep the tokens that the target had read before the block."""
        return scratch.cache.replace(length=verified.start)

    def _read(
        self,
        params: Params,
        cache: KVCache,
        target: KVCache,
        read: Int[Array, " B"],
        width: int,
        live: int | None = None,
    ) -> KVCache:
        """Write the keys of `width` tokens behind the first `read` ones, from the target's states.

        A row may have fewer of them; the block overwrites the others.

        live: See `written`.
        """
        assert target.hidden is not None
        states, slots = unread(target.hidden, read, width)
        contexts = self.run(params, "contexts", states, slots)
        keys, values = (
            tuple(written(leaf, new, slots, live) for leaf, new in zip(leaves, news, strict=True))
            for leaves, news in zip((cache.k, cache.v), zip(*contexts))
        )
        return cache.replace(k=keys, v=values)
