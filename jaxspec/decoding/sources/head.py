"""Define what sources share that are a head on the target: configuration, parameters, gamma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, hidden_before
from jaxspec.config import HeadConfig
from jaxspec.decoding.sources.source import Committed, Scratch, Source, State
from jaxspec.models.heads.borrowed import joined
from jaxspec.models.heads.kinds import abstract_head, module_of
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.layers import apply
from jaxspec.sharding import shardings
from jaxspec.typing import Array, Float, Int, Params


@dataclass(frozen=True)
class HeadSource(Source[State, Scratch]):
    """Draft with layers that read the target's cache, and borrow what they lack from the target."""

    config: HeadConfig
    gamma: int
    target: LanguageModel

    @property
    def model(self) -> LanguageModel:
        """Return its own layers as a model."""
        return LanguageModel(self.config.text_config)

    @property
    def vocabulary(self) -> int:
        return self.model.text.scored_tokens

    @property
    def target_states(self) -> tuple[int, ...] | None:
        return self.config.target_states

    def shapes(self, dtype: Any) -> Params:
        """Return the head's shapes, with the target's rows of a draft vocabulary."""
        shapes, text = dict(abstract_head(self.config)), self.config.text_config
        if text.draft_vocabulary and "lm_head" not in shapes:
            rows = (len(text.draft_vocabulary), text.hidden_size)
            shapes["lm_head"] = {"weight": jax.ShapeDtypeStruct(rows, dtype)}

        def cast(leaf: Any) -> Any:
            is_whole = jnp.issubdtype(leaf.dtype, jnp.integer)
            return leaf if is_whole else jax.ShapeDtypeStruct(leaf.shape, dtype)

        return jax.tree.map(cast, shapes)

    def places(self, params: Params, mesh: Any) -> Any:
        """Return the placement of its parameters on a mesh: split as the target's."""
        return shardings(self.config.text_config, params, mesh)

    def weights(self, params: Params) -> Params:
        """Return the head's parameters with the borrowed ones, as its `model` reads them."""
        return joined(params[self.name], params["target"], self.model.text.draft_vocabulary)

    def run(self, params: Params, method: str, *inputs: Any) -> Any:
        """Return what a method of the head's module does with its own parameters."""
        return apply(module_of(self.config), params[self.name], *inputs, method=method)

    def read_fused(
        self,
        committed: Committed,
        cache: KVCache,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None,
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Read tokens, each next to the hidden state before it."""
        model, weights = self.model, self.weights(committed.params)
        embeds = model.embed(weights, PromptRows(tokens, cache.length), None)
        before = hidden_before(cache, tokens.shape[1], tree)
        fused = self.fused(committed.params, cache, embeds, before)
        return model.advance(weights, fused, cache, tree)

    def fused(self, params: Params, cache: KVCache, embeds: Array, before: Array) -> Array:
        """Return what the layers read of tokens with these embeddings and hidden states."""
        return self.run(params, "fuse", embeds, before)
