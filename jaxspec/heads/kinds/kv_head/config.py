"""Describe a KV head: which keys and values it reads, and how images are pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from jaxspec.config.decoders import decoder_config
from jaxspec.config.schema import check_choice, known_fields
from jaxspec.config.text import TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import HeadConfig, check_rotary, target_hash

Pooling = Literal["linear", "attention", "none", "drop"]
"""How the keys and values of one image become slots; `linear` learns the paper's W_K and W_V."""

Feature = Literal["none", "last_hidden"]
"""Input that a head reads next to a token's embedding.

none: nothing, as in the paper.
last_hidden: the final-normed hidden state that predicted the token (EAGLE's input): the target's
  for a block's first token, the head's own for the others.
"""

_MOST_POOLED = 1 << 24
"""Numbers in a pooling matrix."""


@dataclass(frozen=True)
class KVHeadOptions:
    """Hold the fields of a KV head that a recipe's command line can change."""

    pooling: Pooling = "linear"
    """Pooling of an image to slots: by learned matrices (linear, the paper's), by learned queries
    (attention, for images of any size), none, or no image slots at all (drop)."""
    image_slots: int = 0
    """Slots that an image is pooled to, k; each recipe has its own number."""
    slot_bias: bool = False
    """Learn a bias on the scores of image slots, ln(n / k) at first: a slot then has the weight of
    the n / k slots it was pooled from (Bolya et al. 2023, proportional attention)."""
    reads_text: bool = True
    """Read the target's keys and values of text."""
    key_layers: tuple[int, ...] = ()
    """Target layers, from 0, whose keys and values the head's layers read, one for each, as
    "9 19 29"; by default all read the last one."""
    own_keys: bool = True
    """Also read the head's own keys and values of the tokens that it drafts; Gemma 4's assistants
    read only the target's."""


@dataclass(frozen=True)
class KVHeadConfig(KVHeadOptions, HeadConfig):
    """Describe a head that reads keys and values of its target, one token a pass."""

    image_tokens: int = 0
    """n: number of slots that are read of an image, from its first: a tiled image's base tile."""
    feature: Feature = "none"

    title: ClassVar = "KV head"
    name: ClassVar = "kv_head"
    reads_spans: ClassVar = True
    model_type: ClassVar = "jaxspec_kv_head"

    def __post_init__(self) -> None:
        """Raise InputError for layers or slots of images that do not fit together."""
        super().__post_init__()
        check_choice("KV head", self, "pooling", *get_args(Pooling))
        check_choice("KV head", self, "feature", *get_args(Feature))
        layers, depth = list(self.key_layers), self.text_config.num_hidden_layers
        slots, tokens = self.image_slots, self.image_tokens
        refused = {
            f"key_layers {layers} for {depth} layers; give one for each layer of the head": (
                layers and len(layers) != depth
            ),
            f"{slots} slots for the {tokens} tokens of an image; give 1 to {tokens}": (
                self.pools and not 0 < slots <= tokens
            ),
            f"{slots} slots for {tokens} tokens take too large matrices; give fewer": (
                slots * tokens > _MOST_POOLED
            ),
        }
        for reason, holds in refused.items():
            if holds:
                raise InputError(f"KV head: {reason}")

    @property
    def pools(self) -> bool:
        """Return whether images become slots of their own."""
        return self.pooling in ("linear", "attention")

    @property
    def reads_hidden(self) -> bool:
        """Return whether the head reads hidden states."""
        return self.feature != "none"

    @property
    def target_states(self) -> tuple[int, ...] | None:
        return () if self.reads_hidden else None

    @property
    def key_layers_read(self) -> tuple[int, ...]:
        return self.key_layers or (-1,) * self.text_config.num_hidden_layers

    @property
    def reads(self) -> tuple[Any, ...]:
        return "keys", self.target_keys

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        self.check_key_layers(text)
        return self

    def check_key_layers(self, target: TextConfig) -> None:
        """Raise InputError for layers that the target does not have, or of unequal sizes."""
        layers, depth = list(self.key_layers), target.cached_layers
        if not all(0 <= layer < depth for layer in layers):
            raise InputError(f"KV head: key_layers {layers}; give layers 0 to {depth - 1}")
        kinds = map(target.of_layer, layers)
        if len(sizes := {(kind.num_key_value_heads, kind.head_dim) for kind in kinds}) > 1:
            raise InputError(
                f"KV head: key_layers {layers} have heads of {len(sizes)} sizes; give layers of one"
            )

    @classmethod
    def of_target(
        cls, target: Any, layers: int = 1, image_tokens: int | None = None, **options: Any
    ) -> Self:
        """Return the configuration of a new head for a target.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head; with `key_layers`, one for each of them.
          image_tokens: n; the default is the tokens of one tile, 0 for tiles of any size.
          options: Further fields. Those of images are ignored if the target reads none, or images
            of any size, which cannot be pooled; `pooling` none reads all keys of these.
        """
        text: TextConfig = getattr(target, "text_config", target)
        if image_tokens is None:
            image_tokens = int(getattr(target, "image_tokens", 0))
        if text is target or not (image_tokens or options.get("pooling") == "none"):
            image_tokens = 0
            options |= {"pooling": "drop", "image_slots": 0, "slot_bias": False}
        key_layers = options.get("key_layers", ()) or (text.cached_layers - 1,) * layers
        config = cls(
            check_rotary(target).for_head(key_layers),
            target_hash(target),
            image_tokens=image_tokens,
            **options,
        )
        config.check_key_layers(text)
        return config

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading("KV head: config.json is not readable", "export it again"):
            entries = known_fields(cls, raw)
            entries["text_config"] = decoder_config(raw["text_config"])
            return cls(**entries)

    def to_dict(self) -> dict[str, Any]:
        entries = self.options() | {"text_config": self.text_config.to_hf()}
        return {"model_type": self.model_type} | entries

    def options(self) -> dict[str, Any]:
        """Return the fields by name, those that older heads lack only if they are changed."""
        options = super().options()
        for name in ("key_layers", "own_keys"):
            if getattr(self, name) == getattr(KVHeadOptions, name):
                del options[name]
        return options
