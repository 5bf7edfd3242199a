"""Draft with the assistant of a Gemma 4."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.cache import TreeMask, hidden_before
from jaxspec.config import AssistantConfig
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.source import Committed, Prefilled, Verified
from jaxspec.models.heads.assistant import keys_of
from jaxspec.models.inputs import PromptRows
from jaxspec.sharding import gather
from jaxspec.typing import Array, Float, Int, Params


class Assistant(HeadSource[tuple[()], Array]):
    """Draft one token a pass. Nothing is carried from block to block.

    The scratch holds the states [B, N, D] of the tokens read: in a chain of the last one, in a tree
    of all nodes.
    """

    name = "assistant"
    config: AssistantConfig

    def prefill(self, prefilled: Prefilled, inputs: Any) -> tuple[()]:
        return ()

    def begin(
        self, committed: Committed, state: tuple[()]
    ) -> tuple[Float[Array, "one B one V"], Array]:
        before = hidden_before(committed.target, 1, None)
        return self._read(committed, before, committed.newest(1, 1))

    def score(
        self,
        committed: Committed,
        scratch: Array,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "one B T V"], Array]:
        if tree is None:
            return self._read(committed, scratch, tokens)
        above = tree.parents(tokens.shape[1])[..., None]
        before = jnp.take_along_axis(scratch, above, axis=1)
        scores, states = self._read(committed, before, tokens)
        return scores, jnp.concatenate([scratch, states], axis=1)

    def commit(self, state: tuple[()], scratch: Array, verified: Verified) -> tuple[()]:
        return ()

    def weights(self, params: Params) -> Params:
        """Return the assistant's parameters; of the target's embedding it reads a row a token."""
        return params[self.name]

    def _read(
        self, committed: Committed, before: Float[Array, "B T D"], tokens: Int[Array, "B T"]
    ) -> tuple[Float[Array, "one B T V"], Array]:
        """Return the scores after tokens, each read next to the state before it, and its state."""
        params, target = committed.params, committed.target
        rows = PromptRows(tokens, target.length)
        embeds = self.target.embed(params["target"], rows, None)
        embeds = embeds[..., : self.config.backbone_hidden_size]  # without those of layers
        keys = keys_of(self.config, target)
        scores, states = self.run(params, "draft", embeds, before, keys)
        return gather(scores, "batch")[None], states
