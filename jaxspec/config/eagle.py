"""The decoder of an EAGLE-3 head, from and to the config.json of public heads.

Two layouts exist. SafeAILab's and SpecForge's has a Llama's entries at the top level and the
architecture `LlamaForCausalLMEagle3`. speculators' has them under `transformer_layer_config`.
Numbers of target layers are vLLM's: i is the hidden state after i layers, 0 the embedding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxspec.config.text import LlamaConfig
from jaxspec.errors import InputError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names in config.json of heads with the entries at the top level."""
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
"""Names in config.json of speculators' heads."""

_READ = {
    *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "initializer_range"),
    *("embed_requires_grad", "target_hidden_size", "use_aux_hidden_state", "rms_norm_eps"),
    *("norm_before_residual", "norm_before_fc", "norm_output"),
}
_OF_HEADS = re.compile("norm|scale|aux|draft|eagle|mask|parallel|residual|quant")
"""Parts of the names of entries that may change a head's computation."""


@dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Describe one Llama layer that reads an embedding and a hidden state."""

    norm_before_residual: bool = False
    """Whether the layer's output is added to the hidden state's norm, not to the state itself."""
    norm_before_fc: bool = False
    """Whether a norm precedes `fc`."""
    norm_output: bool = False
    """Whether the next token reads the final-normed state, not the one before the norm."""
    own_embedding: bool = False
    """Whether the head has an embedding of its own, not the target's."""
    target_hidden_size: int = 0
    """Width of the target; 0 means hidden_size."""
    target_layers: tuple[int, ...] = ()
    """Hidden states of the target that `fc` reads; () means 2, n/2 and n-3 of n layers."""

    architecture = ARCHITECTURES[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        if self.target_layers and len(self.target_layers) != 3:
            raise InputError(f"EAGLE-3 head: reads layers {list(self.target_layers)}; give three")
        if self.num_hidden_layers != 1:
            raise InputError(f"EAGLE-3 head: num_hidden_layers {self.num_hidden_layers}; give 1")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read either layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`.
        """
        outer = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
        outer |= outer.pop("eagle_config", None) or {}
        own = raw.get("transformer_layer_config") or raw
        lacking = [
            key
            for key, value in outer.items()
            if value and _OF_HEADS.search(key) and key not in _READ
            if not (key == "logit_scale" and value == 1)
        ]
        if outer.get("use_aux_hidden_state") is False:
            lacking.append("use_aux_hidden_state false")
        if lacking:
            raise InputError(f"EAGLE-3 head: config.json has {lacking}, which is not supported")
        names = ("norm_before_residual", "norm_before_fc", "norm_output", "target_hidden_size")
        entries = {**own, **{name: outer.get(name) for name in names}}
        entries |= {"tie_word_embeddings": False, "draft_vocabulary": None}
        entries["target_layers"] = outer.get("eagle_aux_hidden_state_layer_ids")
        config = super().from_hf(entries)
        config = replace(config, target_layers=tuple(sorted(config.target_layers)))
        size = min(outer.get("draft_vocab_size") or config.vocab_size, config.vocab_size)
        words = () if size == config.vocab_size else tuple(range(size))
        return replace(config, draft_vocabulary=words)

    def to_hf(self) -> dict[str, Any]:
        """Return the entries in SafeAILab's layout."""
        out = super().to_hf()
        words = out.pop("draft_vocabulary", ())
        layers = list(out.pop("target_layers"))
        for name in ("own_embedding", "attention_factor"):
            out.pop(name, None)
        return out | {
            "draft_vocab_size": len(words) or self.vocab_size,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": layers,
            },
        }


def is_eagle(raw: dict[str, Any]) -> bool:
    """Return whether a config.json is an EAGLE-3 head's."""
    names = raw.get("architectures")
    named = isinstance(names, list) and any(
        name in (*ARCHITECTURES, *SPECULATORS) for name in names
    )
    return named or raw.get("speculators_model_type") == "eagle3"
