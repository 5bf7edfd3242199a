"""Describe Gemma 4's decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from jaxspec.config.gemma import GemmaConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import check_positive
from jaxspec.config.text import FULL
from jaxspec.errors import InputError

_ROPE = RopeScaling("proportional", partial_rotary_factor=0.25)
"""Rotary positions of full layers, unless a file says otherwise."""


@dataclass(frozen=True)
class Gemma4TextConfig(GemmaConfig):
    """Describe Gemma 4's dense decoder, whose full layers have heads of another size and number.

    `head_dim` and `num_key_value_heads` are those of sliding layers. In E2B and E4B each layer also
    reads an embedding of the token that is its own, and the last layers read the keys and values of
    the last layer of their kind that makes some.
    """

    model_type: str = "gemma4_text"
    vocab_size: int = 262144
    num_hidden_layers: int = 30
    rope_scaling: RopeScaling = _ROPE
    sliding_window: int | None = 512  # pyright: ignore
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    """None means `num_key_value_heads`; read only with `attention_k_eq_v`."""
    attention_k_eq_v: bool = False  # pyright: ignore
    use_bidirectional_attention: str | None = None
    """`vision`: in sliding layers the tokens of an image also read the later ones."""
    hidden_size_per_layer_input: int = 256  # pyright: ignore
    num_kv_shared_layers: int = 0  # pyright: ignore
    use_double_wide_mlp: bool = False
    """Whether the MLPs of layers that make no keys have twice the width."""

    architecture = "Gemma4ForCausalLM"
    norm_offset = 0
    value_norm = True
    layer_scalar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("text config", self, "head_dim", "global_head_dim")

    @property
    def key_layers(self) -> tuple[int, ...]:
        """Return the layer whose keys and values each layer reads.

        An assistant's layers, which all make none, read one other pair each.
        """
        if not (makers := self.layer_types[: self.cached_layers]):
            return super().key_layers
        last = {kind: index for index, kind in enumerate(makers)}
        borrowers = self.layer_types[len(makers) : self.num_hidden_layers]
        return (*range(len(makers)), *(last[kind] for kind in borrowers))

    @property
    def joint_images(self) -> bool:
        return self.use_bidirectional_attention == "vision"

    @property
    def query_scale(self) -> float:
        return self.head_dim**0.5

    def of_layer(self, index: int) -> Self:
        """Return the configuration of one layer, with the sizes of its kind.

        Full layers have heads of another width, and the last layers may borrow keys and values.
        """
        borrows = index >= self.cached_layers
        double = borrows and self.use_double_wide_mlp
        layer = replace(
            super().of_layer(index),
            num_hidden_layers=1,
            num_kv_shared_layers=int(borrows),
            intermediate_size=self.intermediate_size * (2 if double else 1),
        )
        if self.layer_types[index] != FULL:
            return replace(layer, attention_k_eq_v=False)
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return replace(
            layer,
            head_dim=self.global_head_dim,
            num_key_value_heads=heads or self.num_key_value_heads,
            use_bidirectional_attention=None,
        )

    def for_head(self, layers: Sequence[int]) -> Self:
        """Return layers that make keys, and have no inputs of their own."""
        head = super().for_head(layers)
        return replace(head, hidden_size_per_layer_input=0, num_kv_shared_layers=0)

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """Return the window and the kinds, of which the last is full, whatever the file says."""
        window, kinds = super().windows(raw)
        return window, (*kinds[:-1], FULL)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the family's dictionary; raise InputError for a mixture of experts."""
        if raw.get("enable_moe_block"):
            raise InputError(
                f"text config: enable_moe_block {raw['enable_moe_block']!r:.40}: experts, as in "
                "Gemma 4 26B-A4B, are not supported; give a dense model"
            )
        if raw.get("use_bidirectional_attention") not in (None, "vision"):
            value = raw["use_bidirectional_attention"]
            raise InputError(f"text config: use_bidirectional_attention {value!r:.40}; give vision")
        sizes = _full_sizes(raw, cls.windows(raw)[1])
        rotary = raw.get("rope_parameters") or {FULL: _ROPE.to_hf()}
        config = super().from_hf({**raw, "rope_parameters": rotary, **sizes})
        rows = raw.get("vocab_size_per_layer_input", 262144)
        _check_inputs(config, rows)
        return config

    def to_hf(self) -> dict[str, Any]:
        rows = self.vocab_size if self.hidden_size_per_layer_input else 0
        out = super().to_hf() | {"vocab_size_per_layer_input": rows}
        for name in ("rope_scaling", "rope_theta", "rope_local_base_freq"):
            del out[name]
        return out


@dataclass(frozen=True)
class Gemma4UnifiedTextConfig(Gemma4TextConfig):
    """Describe the decoder of Gemma 4 12B, which has no vision tower."""

    model_type: str = "gemma4_unified_text"
    max_position_embeddings: int = 262144
    sliding_window: int | None = 1024  # pyright: ignore
    use_bidirectional_attention: str | None = "vision"
    hidden_size_per_layer_input: int = 0  # pyright: ignore

    architecture = "Gemma4UnifiedForCausalLM"


def _check_inputs(config: Gemma4TextConfig, rows: Any) -> None:
    """Raise InputError unless each layer has keys to read, and each token its embeddings.

    rows: Tokens with embeddings for layers.
    """
    depth, shared = config.num_hidden_layers, config.num_kv_shared_layers
    if not 0 <= shared < depth:
        raise InputError(
            f"text config: num_kv_shared_layers {shared} of {depth} layers; give 0 to {depth - 1}"
        )
    makers, kinds = config.layer_types[: config.cached_layers], config.layer_types
    if missing := {*kinds} - {*makers}:
        raise InputError(
            f"text config: num_kv_shared_layers {shared} of {depth} layers, and the "
            f"{len(makers)} others are not of kind {min(missing)}; give fewer"
        )
    width, tokens = config.hidden_size_per_layer_input, config.vocab_size
    if width < 0 or (width and rows != tokens):
        raise InputError(
            f"text config: hidden_size_per_layer_input {width} and vocab_size_per_layer_input "
            f"{rows!r:.40} for {tokens} tokens; give 0 or more, and {tokens}"
        )


def _full_sizes(raw: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the sizes of full layers where transformers has written them layer by layer.

    Raises InputError unless these are of all full layers, and equal.
    """
    if not (layers := raw.get("per_layer_config")):
        return {}
    full = {str(i) for i, kind in enumerate(kinds) if kind == FULL}
    first, *later = layers.values()
    numbers = {name.lstrip("0") or "0" for name in layers}  # 05 where there are over ten layers
    if numbers != full or any(sizes != first for sizes in later):
        raise InputError(
            f"text config: per_layer_config {layers!r:.60} is not supported; "
            "give the full layers, with equal sizes"
        )
    heads = first.get("num_key_value_heads")
    return {"global_head_dim": first.get("head_dim"), "num_global_key_value_heads": heads}
