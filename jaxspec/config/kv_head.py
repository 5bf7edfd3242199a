"""Configurations of draft heads, which read their target: AASD's KV head, and EAGLE-3's.

A KV head reads the target's keys and values. An EAGLE-3 head has its own, and reads hidden states
of three of the target's layers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

from jaxspec.config.eagle import EagleConfig
from jaxspec.config.lvlm import LlavaConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import check_choice, known_fields
from jaxspec.config.text import RotaryConfig, TextConfig, decoder_config
from jaxspec.errors import InputError, reading

Pooling = Literal["linear", "attention", "avgpool", "none", "drop"]
"""How the keys and values of one image become slots.

linear: by learned matrices, the paper's W_K and W_V.
attention: by learned queries that attend to them, for images of any size.
avgpool: by averages.
none: unchanged.
drop: the image is left out.
"""

Feature = Literal["none", "last_hidden", "fused"]
"""Input that a head reads next to a token's embedding.

none: nothing, as in the paper.
last_hidden: the final-normed hidden state that predicted the token (EAGLE's input): the target's
  for a block's first token, the head's own for the others.
fused: EAGLE-3's input. Hidden states of three of the target's layers take the place of the last
  one, and the head has keys and values of its own.
"""

_DEPENDS_ON = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "tie_word_embeddings"),
)
"""Fields of a decoder that a head relies on."""

_MOST_POOLED = 1 << 24
"""Numbers in a pooling matrix."""


@dataclass(frozen=True)
class KVHeadConfig:
    """Describe a head's layers, inputs and target."""

    text_config: RotaryConfig
    """Its own layers: the target's decoder, with as many layers as the head has; or
    `EagleConfig`."""
    target_hash: str
    """`target_hash` of the target's configuration; empty where the head's files lack it."""
    target_name: str = ""
    """Name of the target, for people."""
    pooling: Pooling = "linear"
    image_tokens: int = 0
    """n: number of slots that are read of an image, from its first: a tiled image's base tile."""
    image_slots: int = 0
    """k: number of slots of a pooled image."""
    slot_bias: bool = False
    """Whether image slots have a learned bias on their scores, ln(n / k) at first: a slot then has
    the weight of the n / k slots it was pooled from (Bolya et al. 2023, proportional attention)."""
    reads_text: bool = True
    """Whether the target's keys and values of text are read; False is an ablation."""
    feature: Feature = "none"
    key_layers: tuple[int, ...] = ()
    """Target layers, from 0, whose keys and values the head's layers read, one for each; () means
    that all read the last."""
    gamma: int = 5
    """J: draft length of its training."""
    parallel: bool = False
    """Whether one pass drafts a block: J positions, the newest token and behind it learned masks,
    each of which sees those before it. All read the hidden state of the newest token, if any."""
    markov: int = 0
    """r: rank of a Markov head as in DSpark, for `parallel` alone: it adds a term for the token
    before to a token's score. Tokens are drawn from the softmax of the sum, and verified against
    it. 0: no Markov head."""

    model_type: ClassVar = "jaxspec_kv_head"

    def __post_init__(self) -> None:
        check_choice("KV head", self, "pooling", *get_args(Pooling))
        check_choice("KV head", self, "feature", *get_args(Feature))
        layers, depth = list(self.key_layers), self.text_config.num_hidden_layers
        slots, tokens = self.image_slots, self.image_tokens
        refused = {
            f"key_layers {layers} with feature 'fused', which has keys of its own; drop them": (
                layers and self.fused
            ),
            f"key_layers {layers} for {depth} layers; give one for each layer of the head": (
                layers and len(layers) != depth
            ),
            "parallel with feature 'fused'; give feature none or last_hidden": (
                self.parallel and self.fused
            ),
            f"markov {self.markov} without parallel; give 0, or parallel": (
                self.markov and not self.parallel
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
        return self.pooling in ("linear", "attention", "avgpool")

    @property
    def reads_hidden(self) -> bool:
        """Return whether the head reads hidden states."""
        return self.feature != "none"

    @property
    def fused(self) -> bool:
        """Return whether this is an EAGLE-3 head, with keys and values of its own."""
        return isinstance(self.text_config, EagleConfig)

    @property
    def target_states(self) -> tuple[int, ...] | None:
        """Return the target's hidden states that it reads, as `KVCache.kept`, or None."""
        if isinstance(self.text_config, EagleConfig):
            return self.text_config.target_layers
        return () if self.reads_hidden else None

    @property
    def own_states(self) -> tuple[int, ...]:
        """Return its own hidden states that it reads, as `KVCache.kept`."""
        text = self.text_config
        return (1,) if isinstance(text, EagleConfig) and not text.norm_output else ()

    def check_gamma(self, gamma: int) -> None:
        """Raise InputError for a draft length that the head cannot draft."""
        if self.parallel and gamma > self.gamma:
            raise InputError(f"gamma: {gamma}, and one pass drafts {self.gamma}; give at most that")

    def for_target(self, target: Any) -> Self:
        """Return the configuration with the layers of this target that it reads.

        Raises InputError for a target that the head was not made for.
        """
        text: TextConfig = getattr(target, "text_config", target)
        found = target_hash(target)
        named = f" ({self.target_name})" if self.target_name else ""
        if self.target_hash and found != self.target_hash:
            raise InputError(
                f"KV head: made for a target of configuration {self.target_hash}{named}, and this "
                f"{target.model_type} is {found}; use the head's own target"
            )
        own = self.text_config
        if not isinstance(own, EagleConfig):
            self.check_key_layers(text)
            return self
        layers = own.target_layers or usual_layers(text.num_hidden_layers)
        sizes = text.hidden_size, text.vocab_size
        wanted = own.target_hidden_size, own.vocab_size
        rotary = isinstance(text, RotaryConfig)
        if not rotary or sizes != wanted or max(layers) > text.num_hidden_layers:
            raise InputError(
                f"EAGLE-3 head: made for a target{named} of width {wanted[0]} and {wanted[1]} "
                f"tokens, with layers {list(layers)}, and not for this {target.model_type}"
            )
        return replace(self, text_config=replace(own, target_layers=layers))

    def check_key_layers(self, target: TextConfig) -> None:
        """Raise InputError for layers that the target does not have."""
        layers, depth = list(self.key_layers), target.num_hidden_layers
        if not all(0 <= layer < depth for layer in layers):
            raise InputError(f"KV head: key_layers {layers}; give layers 0 to {depth - 1}")

    @classmethod
    def of_target(
        cls,
        target: Any,
        layers: int = 1,
        image_tokens: int | None = None,
        target_layers: tuple[int, ...] = (),
        **options: Any,
    ) -> Self:
        """Return the configuration of a head for a target.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head; with `key_layers`, one for each of them.
          target_layers: Hidden states that a fused head reads; () means 2, n/2 and n-3.
          image_tokens: n; the default is a LLaVA's tokens of one tile.
          options: Further fields. Those of images are ignored if the target reads none, or images
            of any size, which cannot be pooled; `pooling` none reads all keys of these.
        """
        text: TextConfig = getattr(target, "text_config", target)
        if not isinstance(text, RotaryConfig):
            raise InputError(f"KV head: a {text.model_type} has no rotary keys; give another")
        if options.get("feature") == "fused":
            own = eagle_decoder(text, layers, target_layers)
            names = {"feature", "gamma", "target_name", "key_layers", "parallel", "markov"}
            given = names & options.keys()
            return cls(own, target_hash(target), pooling="drop", **{k: options[k] for k in given})
        if image_tokens is None:
            image_tokens = target.image_tokens if isinstance(target, LlavaConfig) else 0
        if text is target or not (image_tokens or options.get("pooling") == "none"):
            image_tokens = 0
            options |= {"pooling": "drop", "image_slots": 0, "slot_bias": False}
        config = cls(
            replace(text, num_hidden_layers=len(options.get("key_layers", ())) or layers),
            target_hash(target),
            image_tokens=image_tokens,
            **options,
        )
        config.check_key_layers(text)
        return config

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Return the configuration that `to_dict` wrote, or of a public EAGLE-3 head."""
        with reading("KV head: config.json is not readable", "export it again"):
            if raw.get("model_type") != cls.model_type:
                own, spec = raw.get("jaxspec") or {}, raw.get("speculators_config") or {}
                name = (spec.get("verifier") or {}).get("name_or_path") or ""
                named = {k: own.get(k) for k in ("target_hash", "target_name", "gamma")}
                known = {"target_hash": "", "target_name": name} | known_fields(cls, named)
                text = EagleConfig.from_hf(raw)
                return cls(text, feature="fused", pooling="drop", **known)
            known = known_fields(cls, raw)
            known["text_config"] = decoder_config(raw["text_config"])
            return cls(**known)

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of config.json."""
        if self.fused:
            own = {"target_hash": self.target_hash, "target_name": self.target_name}
            return self.text_config.to_hf() | {"jaxspec": own | {"gamma": self.gamma}}
        own = self.options() | {"text_config": self.text_config.to_hf()}
        return {"model_type": self.model_type} | own

    def options(self) -> dict[str, Any]:
        """Return the fields; newer ones only where they are on, because older heads lack them."""
        newer = ("key_layers", "parallel", "markov")
        return {name: value for name, value in asdict(self).items() if value or name not in newer}


def usual_layers(depth: int) -> tuple[int, ...]:
    """Return the layers of a target that EAGLE-3 heads read by default."""
    layers = (2, depth // 2, depth - 3)
    if sorted(set(layers)) != list(layers):
        raise InputError(f"EAGLE-3 head: layers {layers} of {depth}; give target_layers, in order")
    return layers


def eagle_decoder(target: RotaryConfig, layers: int, target_layers: tuple[int, ...]) -> EagleConfig:
    """Return the decoder of a new EAGLE-3 head: its target's sizes, without biases."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("rope_theta", "rope_scaling", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return EagleConfig(
        **{name: getattr(target, name) for name in names},
        num_hidden_layers=layers,
        target_layers=tuple(target_layers) or usual_layers(target.num_hidden_layers),
    )


def target_hash(target: Any) -> str:
    """Return 16 hexadecimal digits of SHA-256 over the target's fields that a head relies on."""
    text: TextConfig = getattr(target, "text_config", target)
    fields: dict[str, Any] = {name: getattr(text, name, None) for name in _DEPENDS_ON}
    if isinstance(fields["rope_scaling"], RopeScaling):
        rope = asdict(fields["rope_scaling"])
        if not rope["mrope_interleaved"]:  # a field that older heads' targets did not have
            del rope["mrope_interleaved"]
        fields["rope_scaling"] = rope
    if text is not target:
        vision = target.vision_config  # of an LVLM
        fields["images"] = [
            target.model_type,
            target.image_token_index,
            vision.hidden_size,
            vision.patch_size,
        ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
