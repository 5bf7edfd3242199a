"""What sources share that are a head on the target: configuration, parameters, gamma."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxspec.config import KVHeadConfig
from jaxspec.decoding.sources.source import Scratch, Source, State
from jaxspec.models import LanguageModel
from jaxspec.models.kv_head import joined
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

    def places(self, params: Params, mesh: Any) -> Any:
        """Return the placement of its parameters on a mesh: split as the target's."""
        return shardings(self.config.text_config, params, mesh)

    def weights(self, params: Params) -> Params:
        """Return the head's parameters with the borrowed ones, as its `model` reads them."""
        return joined(params[self.name], params["target"], self.model.text.draft_vocabulary)
