"""Gemma 4's decoder configurations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxspec.config.gemma import GemmaConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import check_positive
from jaxspec.config.text import FULL
from jaxspec.errors import InputError

_REFUSED = {
    "num_kv_shared_layers": "layers that share keys and values",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "enable_moe_block": "experts",
    "use_double_wide_mlp": "MLPs of two widths",
}
"""Entries that must be 0 or false, and what they switch on."""
_ROPE = RopeScaling("proportional", partial_rotary_factor=0.25)
"""Rotary positions of full layers, unless a file says otherwise."""


@dataclass(frozen=True)
class Gemma4TextConfig(GemmaConfig):
    """Describe Gemma 4's dense decoder, whose full layers have heads of another size and number.

    `head_dim` and `num_key_value_heads` are those of sliding layers.
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

    architecture = "Gemma4ForCausalLM"
    norm_offset = 0
    value_norm = True
    layer_scalar = True
    _defaults: ClassVar[dict[str, Any]] = {"hidden_size_per_layer_input": 256}
    """Defaults of refused entries that are not 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("text config", self, "head_dim", "global_head_dim")

    @property
    def joint_images(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.use_bidirectional_attention == "vision"

    @property
    def query_scale(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.head_dim**0.5

    def of_layer(self, index: int) -> Self:
        layer = super().of_layer(index)
        if self.layer_types[index] != FULL:
            return replace(layer, attention_k_eq_v=False)
        heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return replace(
            layer,
            head_dim=self.global_head_dim,
            num_key_value_heads=heads or self.num_key_value_heads,
            use_bidirectional_attention=None,
        )

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """Return the window and the kinds, of which the last is full, whatever the file says."""
        window, kinds = super().windows(raw)
        return window, (*kinds[:-1], FULL)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        for name, feature in _REFUSED.items():
            if (value := raw.get(name, cls._defaults.get(name))) not in (None, 0):
                raise InputError(f"text config: {name} {value!r:.40}: {feature} are not supported")
        if raw.get("use_bidirectional_attention") not in (None, "vision"):
            value = raw["use_bidirectional_attention"]
            raise InputError(f"text config: use_bidirectional_attention {value!r:.40}; give vision")
        sizes = _full_sizes(raw, cls.windows(raw)[1])
        rotary = raw.get("rope_parameters") or {FULL: _ROPE.to_hf()}
        return super().from_hf({**raw, "rope_parameters": rotary, **sizes})

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf() | {"hidden_size_per_layer_input": 0}
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

    architecture = "Gemma4UnifiedForCausalLM"
    _defaults: ClassVar[dict[str, Any]] = {}


def _full_sizes(raw: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the sizes of full layers where transformers has written them layer by layer.

    Raises InputError unless these are of all full layers, and equal.
    """
    if not (layers := raw.get("per_layer_config")):
        return {}
    full = {str(i) for i, kind in enumerate(kinds) if kind == FULL}
    first, *later = layers.values()
    if layers.keys() != full or any(sizes != first for sizes in later):
        raise InputError(
            f"text config: per_layer_config {layers!r:.60} is not supported; "
            "give the full layers, with equal sizes"
        )
    heads = first.get("num_key_value_heads")
    return {"global_head_dim": first.get("head_dim"), "num_global_key_value_heads": heads}
