"""What sources share that are a head on the target: configuration, parameters, gamma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.config import KVHeadConfig
from jaxspec.decoding.sources.source import Scratch, Source, State
from jaxspec.models import LanguageModel
from jaxspec.models.kv_head import abstract_head, joined
from jaxspec.sharding import shardings
from jaxspec.typing import Params


@dataclass(frozen=True)
class HeadSource(Source[State, Scratch]):
    """Draft with layers that read the target's cache, and borrow what they lack from the target."""

    config: KVHeadConfig
    gamma: int

    @property
    def model(self) -> LanguageModel:
        """Return its own layers as a model."""
        return LanguageModel(self.config.text_config)

    @property
    def vocabulary(self) -> int:
        return len(self.model.text.draft_vocabulary) or self.model.text.vocab_size

    @property
    def target_states(self) -> tuple[int, ...] | None:
        return self.config.target_states

    def shapes(self, dtype: Any) -> Params:
        """Return the head's shapes, with the target's columns of a draft vocabulary."""
        shapes, text = dict(abstract_head(self.config)), self.config.text_config
        if text.draft_vocabulary and "lm_head" not in shapes:
            columns = (text.hidden_size, len(text.draft_vocabulary))
            shapes["lm_head"] = {"kernel": jax.ShapeDtypeStruct(columns, dtype)}
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)

    def places(self, params: Params, mesh: Any) -> Any:
        """Return the placement of its parameters on a mesh: split as the target's."""
        return shardings(self.config.text_config, params, mesh)

    def weights(self, params: Params) -> Params:
        """Return the head's parameters with the borrowed ones, as its `model` reads them."""
        return joined(params[self.name], params["target"], self.model.text.draft_vocabulary)
