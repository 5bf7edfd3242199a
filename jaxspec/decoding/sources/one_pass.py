"""Draft a block in one pass of a KV head, over the newest token and masks behind it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxspec.cache import KVCache, hidden_before
from jaxspec.config import OnePassConfig
from jaxspec.decoding.sources.kv_head import TargetKeys
from jaxspec.decoding.sources.planned import Planned, PlannedSource
from jaxspec.decoding.sources.source import Committed, Verified
from jaxspec.models.inputs import PromptRows
from jaxspec.typing import Array, Float


@dataclass(frozen=True)
class OnePassSource(PlannedSource, TargetKeys[Planned]):
    """Draft a block in one pass, with the target's keys and values."""

    config: OnePassConfig

    name = "one_pass"

    def begin(
        self, committed: Committed, state: KVCache
    ) -> tuple[Float[Array, "one B one V"], Planned]:
        newest, model, weights = committed.newest(1, 1), self.model, self.weights(committed.params)
        embeds = model.embed(weights, PromptRows(newest, state.length), None)[:, 0]
        before = hidden_before(state, 1, None)[:, 0] if self.config.reads_hidden else None
        block = self.run(committed.params, "masked", embeds, before, self.gamma)
        scores, cache = model.advance(weights, block, state)
        return self.planned(committed, scores, cache)

    def commit(self, state: KVCache, scratch: Planned, verified: Verified) -> KVCache:
        return self._kept(state, scratch.cache, verified)
