"""Describe an EAGLE-3 head, to and from config.json in any layout."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.schema import known_fields
from jaxspec.config.text import SLIDING, LlamaConfig, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads import config as shared
from jaxspec.heads.states import StateHeadConfig

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names in config.json of heads with the entries at the top level."""
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
"""Names in config.json of speculators' heads."""

_NEUTRAL: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "draft_num_hidden_layers": 1,
}
"""Entries that trainers write, with the value for which a head computes as it does here."""
_READ = frozenset(
    {
        *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "initializer_range"),
        *("embed_requires_grad", "target_hidden_size", "rms_norm_eps", "norm_before_residual"),
        *("norm_before_fc", "fc_norm", "norm_output", "parallel_draft_heads_num_layers"),
    }
)
_OF_HEADS = re.compile("norm|scale|aux|draft|eagle|mask|parallel|residual|quant|lora|expert")
"""Parts of the names of entries that may change a head's computation."""


@dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Describe one Llama layer that reads an embedding and a hidden state."""

    norm_before_residual: bool = False
    """Whether the layer's output is added to the hidden state's norm, not to the state itself."""
    norm_before_fc: bool = False
    """Whether a norm of the states together precedes `fc`."""
    fc_norm: bool = False
    """Whether a norm of each of the states precedes `fc`, as in EAGLE-3.1."""
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

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read either layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`. The number of
        layers is 1, because trainers copy the target's; the tensors tell.
        """
        title, nested = Eagle3Config.title, dict(raw.get("eagle_config") or {})
        outputs = nested.pop("eagle_aux_hidden_state_layer_ids", raw.get("target_layer_ids")) or []
        outer = {**raw, **nested, "eagle_config": None, "transformer_layer_config": None}
        decoder = raw.get("transformer_layer_config") or raw
        whole = {**decoder, **outer}
        shared.check_entries(title, whole, _NEUTRAL, _OF_HEADS, _READ)
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        entries = {**decoder, **{name: outer.get(name) for name in (*names, "target_hidden_size")}}
        entries |= {"tie_word_embeddings": False, "draft_vocabulary": None}
        entries |= {"model_type": cls.model_type, "num_hidden_layers": 1}
        entries["target_layers"] = raw.get("eagle_aux_hidden_state_layer_ids") or [
            layer + 1 for layer in outputs
        ]
        config = super().from_hf(entries)
        kinds = (whole.get("layer_types") or [])[:1]
        window, _ = shared.windows_of({**whole, "num_hidden_layers": 1, "layer_types": kinds})
        fields = known_fields(cls, {"sliding_window": window})
        fields["draft_vocabulary"] = shared.placeholder_words(title, outer, config.vocab_size)
        return replace(config, **fields, target_layers=tuple(sorted(config.target_layers)))

    def to_hf(self) -> dict[str, Any]:
        """Return the entries in SafeAILab's layout."""
        out = super().to_hf()
        out.pop("draft_vocabulary", None)
        layers = list(out.pop("target_layers"))
        for name in ("own_embedding", "own_output", "qk_norm", "attention_factor"):
            out.pop(name, None)
        nested: dict[str, Any] = {"use_aux_hidden_state": True}
        if 0 not in layers:  # the embedding is no layer's output
            nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
        if self.sliding_window is not None:
            out |= {"sliding_window": self.sliding_window, "layer_types": [SLIDING]}
        return out | {
            "draft_vocab_size": self.scored_tokens,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": nested,
        }


@dataclass(frozen=True)
class GemmaEagleConfig(Gemma4TextConfig):
    """Describe one full layer of a Gemma 4 that reads an embedding and a hidden state."""

    own_embedding: bool = False
    own_output: bool = True
    target_layers: tuple[int, ...] = ()

    norm_before_residual: ClassVar[bool] = False
    norm_before_fc: ClassVar[bool] = False
    fc_norm: ClassVar[bool] = False
    norm_output: ClassVar[bool] = False
    architecture = "Gemma4Eagle3Model"

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read DeepSeek's layout; InputError for options that this library lacks."""
        title = Eagle3Config.title
        shared.check_entries(title, raw, _NEUTRAL, _OF_HEADS, _READ | {"final_logit_softcapping"})
        layer = shared.gemma4_layers(title, raw)
        # DeepSeek counts layers from 0: its layer 2 gives the state after three layers.
        states = {"target_layers": [output + 1 for output in raw["target_layer_ids"]]}
        vocabulary = shared.placeholder_words(title, raw, layer.vocab_size)
        fields: dict[str, Any] = {**vars(layer), **known_fields(cls, states)}
        return cls(**{**fields, "draft_vocabulary": vocabulary})

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        for name in ("own_embedding", "own_output", "draft_vocabulary"):
            out.pop(name, None)
        outputs = [layer - 1 for layer in out.pop("target_layers")]
        more = {"draft_num_hidden_layers": 1, "draft_vocab_size": self.scored_tokens}
        return out | {"target_layer_ids": outputs} | more


@dataclass(frozen=True)
class Eagle3Config(StateHeadConfig):
    """Describe a head that reads the states of a few layers of its target, usually three."""

    text_config: EagleConfig | GemmaEagleConfig

    title: ClassVar = "EAGLE-3 head"
    name: ClassVar = "eagle3"
    model_type: ClassVar = title
    start_decides: ClassVar = True
    orders_vocabulary: ClassVar = True
    rules: ClassVar = ("placeholder", "embedding", "zero")
    keeps_vocabulary: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        text, layers = self.text_config, list(self.text_config.target_layers)
        if layers != sorted(layers) or min(layers, default=0) < 0:
            raise InputError(
                f"EAGLE-3 head: reads target layers {layers}; give them in order, from 0 on"
            )
        if text.num_hidden_layers != 1:
            raise InputError(f"EAGLE-3 head: num_hidden_layers {text.num_hidden_layers}; give 1")

    @property
    def target_states(self) -> tuple[int, ...]:
        return self.text_config.target_layers

    @property
    def states(self) -> int:
        """Return the number of the target's states that `fc` reads."""
        return len(self.target_states) or 3

    @property
    def states_width(self) -> int:
        return self.states * self.text_config.target_hidden_size

    @property
    def own_embedding(self) -> bool:
        return self.text_config.own_embedding

    @property
    def has_output(self) -> bool:
        return self.text_config.own_output

    @property
    def kept_options(self) -> dict[str, Any]:
        text = self.text_config
        options = {"target_layers": text.target_layers, "window": text.sliding_window or 0}
        return {"images": self.images} | options

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        """Choose the target's layers, unless the file names them."""
        decoder = self.text_config
        layers = decoder.target_layers or usual_layers(text.num_hidden_layers)
        sizes = text.hidden_size, text.vocab_size
        expected = decoder.target_hidden_size, decoder.vocab_size
        rotary = isinstance(text, RotaryConfig)
        if not rotary or sizes != expected or max(layers) > text.num_hidden_layers:
            raise self._misfit(target, *expected, f", with layers {list(layers)}")
        if self.shows_images and text.hidden_size != decoder.hidden_size:
            raise InputError(
                f"{self.title}: width {decoder.hidden_size}, but the target's embeddings of images "
                f"have {text.hidden_size}; give the image rule placeholder or zero"
            )
        return replace(self, text_config=replace(decoder, target_layers=layers))

    @classmethod
    def of_target(
        cls,
        target: Any,
        layers: int = 1,
        target_layers: tuple[int, ...] = (),
        window: int = 0,
        **options: Any,
    ) -> Self:
        """Return the configuration of a new head for a target: its sizes, without biases.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head; only 1 is supported.
          target_layers: Hidden states that it reads; () means 2, n/2 and n-3.
          window: Newest tokens that its layer reads; 0 reads all.
          options: Further fields.
        """
        text = shared.check_rotary(target)
        decoder = EagleConfig(
            **shared.shared_sizes(text),
            rope_scaling=text.rope_scaling,
            num_hidden_layers=layers,
            target_layers=tuple(target_layers) or usual_layers(text.num_hidden_layers),
            sliding_window=window or None,
        )
        return cls(decoder, shared.target_hash(target), **options)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            extra, spec = raw.get("jaxspec") or {}, raw.get("speculators_config") or {}
            name = (spec.get("verifier") or {}).get("name_or_path") or ""
            entries = {"target_hash": "", "target_name": name} | known_fields(cls, extra)
            is_gemma = str(raw.get("model_type")).startswith("gemma4")
            layer = GemmaEagleConfig if is_gemma else EagleConfig
            return cls(layer.from_hf(raw), **entries)


def usual_layers(depth: int) -> tuple[int, ...]:
    """Return the layers of a target that EAGLE-3 heads read by default."""
    layers = (2, depth // 2, depth - 3)
    if sorted(set(layers)) != list(layers):
        raise InputError(
            f"EAGLE-3 head: layers {layers} of {depth}; give target_layers (--head.target-layers), "
            "in order"
        )
    return layers
