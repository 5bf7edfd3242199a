"""The decoder of an EAGLE-3 head, from and to the config.json of public heads.

Two layouts exist. SafeAILab's and SpecForge's has a Llama's entries at the top level. speculators'
has them under `transformer_layer_config`.

Numbers of target layers are vLLM's: i is the hidden state after i layers, 0 the embedding. So is
`eagle_aux_hidden_state_layer_ids` at the top level. The same entry within `eagle_config` counts the
layers from 0 and names their outputs, as SGLang and ModelOpt read and write it: 1 is the hidden
state after 2 layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxspec.config.text import LlamaConfig, refuse_window
from jaxspec.errors import InputError

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names in config.json of heads with the entries at the top level."""
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
"""Names in config.json of speculators' heads."""

_OTHER_KINDS = {
    "dflash": "DFlash",
    "dspark": "DSpark",
    "p-?eagle": "P-EAGLE",
    "medusa": "Medusa",
    r"^mtp$": "MTP",
    "eagle(?!-?3)": "EAGLE-1",
}
"""Patterns of lower-case names of architectures and speculators' types -> kind of the head."""
_TENSORS_OF_KINDS = {
    r"img_fc\.|imadpt\.": "ViSpec",
    r"(medusa_head\.)?\d+\.\d+\.linear\.weight": "Medusa",
}
"""Patterns of tensors that a kind of head alone has."""
_NEUTRAL: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "logit_scale": 1,
}
"""Entries that trainers write, with the value for which a head computes as it does here."""
_READ = {
    *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "initializer_range"),
    *("embed_requires_grad", "target_hidden_size", "rms_norm_eps", "norm_before_residual"),
    *("norm_before_fc", "norm_output", "parallel_draft_heads_num_layers"),
}
_OF_HEADS = re.compile("norm|scale|aux|draft|eagle|mask|parallel|residual|quant|lora|expert")
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
    qk_norm: bool = False  # pyright: ignore
    """Whether queries and keys are normed before they are rotated, as in Qwen3."""
    own_embedding: bool = False
    """Whether the head has an embedding of its own, not the target's."""
    own_output: bool = True
    """Whether the head has an output matrix of its own, not the target's."""
    target_hidden_size: int = 0
    """Width of the target; 0 means hidden_size."""
    target_layers: tuple[int, ...] = ()
    """Hidden states of the target that `fc` reads; () means 2, n/2 and n-3 of n layers."""

    architecture = ARCHITECTURES[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        layers = list(self.target_layers)
        if layers and len(layers) != 3:
            count = counted(len(layers))
            raise InputError(f"EAGLE-3 head: reads {count} target layers, {layers}; give three")
        if any(layer < 0 for layer in layers):
            raise InputError(f"EAGLE-3 head: reads target layers {layers}; give none below 0")
        if self.num_hidden_layers != 1:
            raise InputError(f"EAGLE-3 head: num_hidden_layers {self.num_hidden_layers}; give 1")

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read either layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`. The number of
        layers is 1, because trainers copy the target's; the tensors tell.
        """
        nested = dict(raw.get("eagle_config") or {})
        outputs = nested.pop("eagle_aux_hidden_state_layer_ids", None) or []
        outer = {**raw, **nested, "eagle_config": None, "transformer_layer_config": None}
        if unsupported := [
            f"{key} {json.dumps(value):.40}"
            for key, value in outer.items()
            if not _computes_alike(key, value)
        ]:
            named = ", ".join(unsupported)
            raise InputError(f"EAGLE-3 head: config.json has {named}, which is not supported")
        own = raw.get("transformer_layer_config") or raw
        names = ("norm_before_residual", "norm_before_fc", "norm_output", "target_hidden_size")
        entries = {**own, **{name: outer.get(name) for name in names}}
        entries |= {"tie_word_embeddings": False, "draft_vocabulary": None}
        entries |= {"model_type": cls.model_type, "num_hidden_layers": 1}
        entries["target_layers"] = raw.get("eagle_aux_hidden_state_layer_ids") or [
            layer + 1 for layer in outputs
        ]
        config = super().from_hf(entries)
        kinds = own.get("layer_types") or ["sliding_attention"]
        if own.get("use_sliding_window") is not False and "sliding_attention" in kinds:
            refuse_window(own.get("sliding_window"), config.max_position_embeddings)
        size = outer.get("draft_vocab_size")
        if size is not None and (type(size) is not int or size < 1):
            raise InputError(f"EAGLE-3 head: draft_vocab_size {size!r:.40}; give 1 or more")
        words = range(size) if size is not None and size < config.vocab_size else ()
        layers = tuple(sorted(config.target_layers))
        return replace(config, target_layers=layers, draft_vocabulary=tuple(words))

    def to_hf(self) -> dict[str, Any]:
        """Return the entries in SafeAILab's layout."""
        out = super().to_hf()
        words = out.pop("draft_vocabulary", ())
        layers = list(out.pop("target_layers"))
        for name in ("own_embedding", "own_output", "qk_norm", "attention_factor"):
            out.pop(name, None)
        nested: dict[str, Any] = {"use_aux_hidden_state": True}
        if 0 not in layers:  # the embedding is no layer's output
            nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
        return out | {
            "draft_vocab_size": len(words) or self.vocab_size,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": nested,
        }


def counted(layers: int) -> str:
    """Return a small number as a word."""
    return {1: "one", 2: "two", 4: "four", 5: "five"}.get(layers, str(layers))


def _computes_alike(key: str, value: Any) -> bool:
    """Return whether a head with this entry computes what this library does."""
    if key in _NEUTRAL:
        return value is None or value == _NEUTRAL[key]
    return not value or key in _READ or not _OF_HEADS.search(key)


def kind_of_head(
    raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None
) -> str:
    """Return the kind of draft head that files describe, such as "EAGLE-3"; "" for no known one.

    EAGLE-3 heads are known by their names, by `draft_vocab_size` or by their tensors: some trainers
    write their target's architecture and depth.

    Args:
      raw: config.json.
      tensors: Shapes of the tensors, if they were listed.
    """
    stored = {name.removeprefix("model."): shape for name, shape in (tensors or {}).items()}
    architectures = raw.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else ())]
    names = [str(name).lower() for name in (*names, raw.get("speculators_model_type") or "")]
    for pattern, kind in _OTHER_KINDS.items():
        if any(re.search(pattern, name) for name in names):
            return kind
    for pattern, kind in _TENSORS_OF_KINDS.items():
        if any(re.match(pattern, name) for name in stored):
            return kind
    ours = {name.lower() for name in (*ARCHITECTURES, *SPECULATORS)}
    if ours & {*names} or "eagle3" in names or raw.get("draft_vocab_size") is not None:
        return "EAGLE-3"
    if "fc.weight" not in stored:
        return ""
    if any(name.endswith("hidden_norm.weight") for name in stored):
        return "EAGLE-3"
    return "EAGLE-1" if any(name.startswith("layers.0.") for name in stored) else ""
