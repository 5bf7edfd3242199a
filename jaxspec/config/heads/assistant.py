"""Configure the assistants that come with Gemma 4, which read their target's keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.decoders import decoder_config
from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.heads.head import HeadConfig
from jaxspec.config.schema import check_positive, known_fields
from jaxspec.config.text import FULL, SLIDING, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading

ASSISTANTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""model_type of an assistant -> that of its layers."""
_NOT_READ: dict[str, Any] = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
"""Its tokens have no embeddings for layers, and no cap bounds its scores, whatever a file says."""


@dataclass(frozen=True)
class AssistantConfig(HeadConfig):
    """Describe layers that have queries of their own, and read the target's keys and values.

    A layer reads the last of the target's layers of its kind that make keys.
    """

    text_config: Gemma4TextConfig
    """Its layers, of which none makes keys."""
    target_hash: str = ""
    """Always empty: its files do not name a configuration of the target."""
    backbone_hidden_size: int = 1536
    """Width of the target's embeddings and hidden states."""
    num_centroids: int = 0
    """Groups of tokens, of which only the likeliest are scored; 0 scores all tokens.
    In files it is read only with `use_ordered_embeddings`."""
    centroid_intermediate_top_k: int = 32
    """Number of groups that are scored."""
    key_layers: tuple[int, ...] = ()
    """The target's layer whose keys and values each layer reads; empty before `for_target`."""

    title: ClassVar = "Gemma 4 assistant"
    model_type: ClassVar = title

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.title, self, "backbone_hidden_size", "centroid_intermediate_top_k")
        text = self.text_config
        queries = replace(text, num_kv_shared_layers=text.num_hidden_layers, **_NOT_READ)
        object.__setattr__(self, "text_config", queries)
        tokens, groups = self.text_config.vocab_size, self.num_centroids
        if self.text_config.draft_vocabulary:
            raise InputError(f"{self.title}: scores all tokens; give --draft-vocabulary 0")
        if groups and (tokens % groups or self.centroid_intermediate_top_k > groups):
            raise InputError(
                f"{self.title}: {self.centroid_intermediate_top_k} of {groups} groups of "
                f"{tokens} tokens; give groups of equal sizes, and at most all"
            )

    @property
    def target_states(self) -> tuple[int, ...]:
        return ()

    @property
    def embedding(self) -> RotaryConfig:
        return replace(self.text_config, hidden_size=self.backbone_hidden_size)

    @property
    def reads(self) -> tuple[Any, ...]:
        return "keys and states", self.key_layers

    @property
    def keeps_vocabulary(self) -> bool:
        return False

    @property
    def kept_options(self) -> dict[str, Any]:
        text = self.text_config
        return {"layers": text.num_hidden_layers, "width": text.hidden_size}

    @property
    def fixed(self) -> tuple[str, ...]:
        return ("masked_embedding",) if self.num_centroids else ()

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        layers = self.text_config
        width, tokens = self.backbone_hidden_size, layers.vocab_size
        if not isinstance(text, Gemma4TextConfig) or (text.hidden_size, text.vocab_size) != (
            width,
            tokens,
        ):
            raise InputError(
                f"{self.title}: made for a Gemma 4 of width {width} and {tokens} tokens, and this "
                f"{target.model_type} has width {text.hidden_size} and {text.vocab_size} tokens; "
                "give the assistant's own target"
            )
        last = dict(zip(text.layer_types, text.key_layers, strict=True))
        for index, kind in enumerate(layers.layer_types):
            if kind not in last:
                raise InputError(f"{self.title}: reads {kind} layers, and the target has none")
            layer, source = layers.of_layer(index), text.of_layer(last[kind])
            heads, groups = layer.num_attention_heads, source.num_key_value_heads
            if layer.head_dim != source.head_dim or heads % groups:
                raise InputError(
                    f"{self.title}: {heads} heads of {layer.head_dim} in a {kind} layer, and the "
                    f"target's has {groups} of {source.head_dim}; give the assistant's own target"
                )
        return replace(self, key_layers=tuple(last[kind] for kind in layers.layer_types))

    def _started(self, trained: Self, vocabulary: tuple[int, ...], target: Any) -> Self:
        """Return the configuration with the trained layers, whatever their number and sizes."""
        text = replace(trained.text_config, draft_vocabulary=vocabulary)
        fitted = replace(trained, text_config=text).for_target(target)
        return replace(fitted, gamma=self.gamma, target_name=self.target_name)

    @classmethod
    def of_target(cls, target: Any, layers: int = 4, width: int = 1024, **options: Any) -> Self:
        """Return the configuration of a new assistant for a Gemma 4.

        Its MLPs are eight times as wide as its layers, as in those that Google published.

        Args:
          target: A `ModelConfig`.
          layers: Number of layers: sliding ones, and a full one.
          width: Width of its layers.
          options: Further fields.
        """
        text = getattr(target, "text_config", target)
        if not isinstance(text, Gemma4TextConfig):
            raise InputError(f"{cls.title}: drafts for a Gemma 4, not for a {target.model_type}")
        decoder = replace(
            text,
            num_hidden_layers=layers,
            layer_types=(*[SLIDING] * (layers - 1), FULL),
            hidden_size=width,
            intermediate_size=8 * width,
            use_double_wide_mlp=False,
            tie_word_embeddings=True,
        )
        head = cls(decoder, backbone_hidden_size=text.hidden_size, **options)
        return head.for_target(target)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            text = {"model_type": ASSISTANTS[raw["model_type"]]} | raw["text_config"]
            text |= {"num_kv_shared_layers": 0} | _NOT_READ
            if "unified" in raw["model_type"]:
                raw = {"backbone_hidden_size": 3840} | raw
            if not raw.get("use_ordered_embeddings"):
                raw = raw | {"num_centroids": 0}
            extras = known_fields(cls, {"num_centroids": 2048} | raw | (raw.get("jaxspec") or {}))
            return cls(**extras | {"text_config": decoder_config(text), "key_layers": ()})

    def to_dict(self) -> dict[str, Any]:
        text, groups = self.text_config, self.num_centroids
        (kind,) = (kind for kind, layers in ASSISTANTS.items() if layers == text.model_type)
        name = "Gemma4Unified" if "unified" in kind else "Gemma4"
        return {
            "architectures": [f"{name}AssistantForCausalLM"],
            "model_type": kind,
            "text_config": text.to_hf(),
            "backbone_hidden_size": self.backbone_hidden_size,
            "use_ordered_embeddings": groups > 0,
            "num_centroids": groups or 2048,
            "centroid_intermediate_top_k": self.centroid_intermediate_top_k,
            "tie_word_embeddings": True,
            "jaxspec": {"target_name": self.target_name, "gamma": self.gamma},
        }
