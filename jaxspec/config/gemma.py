"""Describe Gemma 3's decoder, and what Gemma 4's (`gemma4.py`) shares with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import check_positive
from jaxspec.config.text import FULL, SLIDING, Biases, RotaryConfig
from jaxspec.errors import InputError

_PATTERN = 6
"""Number of layers up to each full one, itself included, unless a file says otherwise."""


@dataclass(frozen=True)
class GemmaConfig(RotaryConfig):
    """Describe what Gemma 3 and 4 share: two kinds of layers with their own rotary positions.

    `rope_theta` and `rope_scaling` are those of full layers.
    """

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131072
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0
    hidden_act: str = "gelu_pytorch_tanh"
    """`hidden_activation` in the file."""
    rope_theta: float = 1e6
    rope_local_base_freq: float = 1e4
    """`rope_theta` of sliding layers."""
    sliding_window: int | None = 4096  # pyright: ignore
    attention_bias: bool = False
    final_logit_softcapping: float | None = None  # pyright: ignore

    qk_norm = True
    sandwich = True
    activations: ClassVar = ("gelu_pytorch_tanh",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("text config", self, "rope_local_base_freq")
        if self.final_logit_softcapping is not None:
            check_positive("text config", self, "final_logit_softcapping")
        if not self.layer_types:
            object.__setattr__(self, "layer_types", layer_kinds(self.num_hidden_layers))

    @property
    def context(self) -> int:
        """Return the most tokens of a prompt and its answer, which Gemma's files say stretched."""
        return self.max_position_embeddings

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_bias)

    @property
    def embed_scale(self) -> float:
        return self.hidden_size**0.5

    def of_layer(self, index: int) -> Self:
        """Return the configuration of one layer, with its kind's window and rotary positions."""
        kind = self.layer_types[index]
        if kind == FULL:
            return replace(self, layer_types=(kind,), sliding_window=None)
        local = {"rope_theta": self.rope_local_base_freq, "rope_scaling": RopeScaling()}
        return replace(self, layer_types=(kind,), **local)

    def without_window(self, layers: Sequence[int]) -> Self:
        kinds = tuple(self.layer_types[index] for index in layers)
        return replace(self, layer_types=kinds, sliding_window=None)

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        layers = raw.get("num_hidden_layers") or cls.num_hidden_layers
        pattern = raw.get("sliding_window_pattern", _PATTERN)
        kinds = raw.get("layer_types") or layer_kinds(layers, pattern)
        return raw.get("sliding_window", cls.sliding_window), tuple(kinds)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the family's dictionary, with the rotary keys of transformers 4 or 5."""
        rotary = raw.get("rope_parameters") or {}
        full, local = (rotary.get(kind) or {} for kind in (FULL, SLIDING))
        if (kind := local.get("rope_type", "default")) != "default":
            raise InputError(f"text config: rope_type {kind!r:.40} of sliding layers; give default")
        theta = local.get("rope_theta", raw.get("rope_local_base_freq"))
        rotary = {"rope_theta": raw.get("rope_theta")} | full | (raw.get("rope_scaling") or {})
        changes = {
            "rope_scaling": None,
            "rope_parameters": rotary,
            "rope_local_base_freq": theta,
            "hidden_act": raw.get("hidden_activation"),
        }
        return super().from_hf(raw | changes)

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        local = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
        return out | {
            "hidden_activation": out.pop("hidden_act"),
            "rope_parameters": {FULL: out["rope_parameters"], SLIDING: local},
            "sliding_window": self.sliding_window or self.max_position_embeddings,
            "layer_types": list(self.layer_types),
        }


@dataclass(frozen=True)
class Gemma3TextConfig(GemmaConfig):
    """Describe Gemma 3's decoder."""

    model_type: str = "gemma3_text"
    query_pre_attn_scalar: float = 256

    architecture = "Gemma3ForCausalLM"
    norm_offset = 1
    joint_images = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("text config", self, "query_pre_attn_scalar")

    @property
    def query_scale(self) -> float:
        return (self.head_dim / self.query_pre_attn_scalar) ** 0.5

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        for name in ("attn_logit_softcapping", "use_bidirectional_attention"):
            if raw.get(name):
                raise InputError(f"text config: {name} {raw[name]!r:.40} is not supported")
        return super().from_hf(raw)


def layer_kinds(layers: int, pattern: int = _PATTERN) -> tuple[str, ...]:
    """Return the kinds of layers: each `pattern`-th one is full, and the others slide."""
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers))
