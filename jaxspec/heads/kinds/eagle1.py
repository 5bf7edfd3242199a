"""Define EAGLE-1's head (Li et al. 2024, arXiv 2401.15077), from the target's last state.

It has one layer without a norm before its attention. `fc` joins a token's embedding with the
final-normed state that predicted the token. The layer's output replaces the next state:
the target's output matrix scores it, and the next token reads it.

MSD (Lin et al. 2025, arXiv 2505.14260) is such a head. At the slots of images its layer reads the
image's embedding itself. For Qwen2-VL and Qwen2.5-VL its layer has that norm.

EAGLE, EAGLE-2 and MSD have one layout. config.json has a Llama's entries at the top level, with
the target's class as its architecture. Two more entries are optional: `bias` for `fc`, true by
default, and `qkv_bias`.

| tensor                                                                | shape                 |
|-----------------------------------------------------------------------|-----------------------|
| `fc.weight`, `fc.bias`                                                | [D, 2 D], optional [D] |
| `layers.0.self_attn.{q,k,v}_proj.weight`                              | [out, D], optional bias |
| `layers.0.self_attn.o_proj.weight`, `layers.0.mlp.*_proj.weight`      | as a Llama's          |
| `layers.0.post_attention_layernorm.weight`                            | [D]                   |
| `layers.0.input_layernorm.weight`                                     | [D], MSD for Qwen     |
| `embed_tokens.weight`                                                 | optional, [V, D]      |

`fc` reads a token's embedding and, behind it, the hidden state. The target's output matrix scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, TypeVar

import jax.numpy as jnp

from jaxspec.config.schema import known_fields
from jaxspec.config.text import Biases, LlamaConfig, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import check_entries, check_rotary, shared_sizes, target_hash
from jaxspec.heads.files import Arrays, Server, Stored, check_one_layer, renamed
from jaxspec.heads.states import StateHead, StateHeadConfig, StateKind
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import Dense
from jaxspec.sharding import Axes
from jaxspec.typing import Vectors

_SPARE = 64
"""Maximum padding tokens by which a target's vocabulary exceeds the head's embedding."""


@dataclass(frozen=True)
class Eagle1Text(LlamaConfig):
    """Describe one Llama layer without a final norm."""

    fc_bias: bool = True
    """Whether `fc` has a bias."""
    qkv_bias: bool = False
    """Whether queries, keys and values have biases."""
    input_norm: bool = False
    """Whether a norm precedes its attention: only in MSD for Qwen2-VL and Qwen2.5-VL."""
    own_embedding: bool = True
    """Whether the head has an embedding of its own, not the target's."""
    rows: int = 0
    """Rows of that embedding; 0 means as many as tokens. The last row is for tokens past it."""

    architecture = "LlamaForCausalLMEagle"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_hidden_layers != 1:
            raise InputError(f"EAGLE-1 head: num_hidden_layers {self.num_hidden_layers}; give 1")

    @property
    def biases(self) -> Biases:
        return Biases(qkv=self.qkv_bias)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        entries = {**raw, "model_type": cls.model_type, "tie_word_embeddings": False}
        entries |= {"rows": 0, "fc_bias": raw.get("bias")}
        text = super().from_hf(entries)
        # The released code gives all three axes the token's slot.
        return replace(text, rope_scaling=text.rope_scaling.one_axis)

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        rows, bias = out.pop("rows"), out.pop("fc_bias")
        return out | {"vocab_size": rows or self.vocab_size, "bias": bias}


@dataclass(frozen=True)
class Eagle1Config(StateHeadConfig):
    """Describe a head whose `fc` joins a token's embedding and the target's last hidden state."""

    text_config: Eagle1Text

    title: ClassVar = "EAGLE-1 head"
    name: ClassVar = "eagle1"
    model_type: ClassVar = title
    rules: ClassVar = ("placeholder", "embedding", "unfused", "zero")

    @property
    def embedding(self) -> Eagle1Text:
        text = self.text_config
        return replace(text, vocab_size=text.rows or text.vocab_size)

    @property
    def own_embedding(self) -> bool:
        return self.text_config.own_embedding

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        decoder = self.text_config
        width, tokens = decoder.hidden_size, decoder.rows or decoder.vocab_size
        fits = tokens <= text.vocab_size <= tokens + _SPARE * decoder.own_embedding
        if not isinstance(text, RotaryConfig) or text.hidden_size != width or not fits:
            raise self._misfit(target, width, tokens)
        rows = 0 if tokens == text.vocab_size else tokens
        return replace(self, text_config=replace(decoder, vocab_size=text.vocab_size, rows=rows))

    @classmethod
    def of_target(cls, target: Any, **options: Any) -> Self:
        """Return the configuration of a new head for a target, whose embedding it reads.

        options: Fields of the head.
        """
        text = check_rotary(target)
        entries = shared_sizes(text)
        if not text.rope_scaling.mrope_section:
            entries["rope_scaling"] = text.rope_scaling
        decoder = Eagle1Text(**entries, num_hidden_layers=1, fc_bias=False, own_embedding=False)
        return cls(decoder, target_hash(target), **options)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            check_entries(cls.title, raw)
            extras = known_fields(cls, raw.get("jaxspec") or {})
            return cls(Eagle1Text.from_hf(raw), extras.pop("target_hash", ""), **extras)


class BareLayer(Layer):
    """Run Llama's layer without its input norm, unless the configuration has one."""

    config: Eagle1Text

    def normed(self, x: Vectors) -> tuple[Vectors, Vectors]:
        return super().normed(x) if self.config.input_norm else (x, x)


class Eagle1Head(StateHead):
    """Hold an EAGLE-1 head's `fc` and layer."""

    config: Eagle1Config

    layer: ClassVar[Callable[..., Any]] = BareLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.fc = Dense(text.hidden_size, text.fc_bias)

    def fuse(self, embeds: Vectors, before: Vectors, context: Any, slots: Any) -> Vectors:
        return self.fc(jnp.concatenate([embeds, before], axis=-1))

    def closed(self, x: Vectors) -> tuple[Vectors, Vectors]:
        return x, x


Config = TypeVar("Config", bound=Eagle1Config)

_OF_IMAGES = re.compile("forconditionalgeneration|llavallama")
"""Lower-case names of targets that read images, which config.json of EAGLE-1 heads copies."""


def has_tensors(names: Collection[str]) -> bool:
    """Return whether these are an EAGLE-1 head's tensors."""
    layers = any(name.startswith("layers.0.") for name in names)
    return "fc.weight" in names and layers and not any("hidden_norm" in name for name in names)


@dataclass(frozen=True)
class Eagle1Kind(StateKind[Config]):
    """Read heads as they are published, and write them so; only this library reads them."""

    cuts_vocabulary: ClassVar = True

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        """Know heads by their tensors, or by a target that reads images and one layer.

        MSD for Qwen has a `vision_config` too.
        """
        one_layer = raw.get("num_hidden_layers") == 1 and "text_config" not in raw
        copied = one_layer and any(map(_OF_IMAGES.search, names))
        return has_tensors(tensors) or copied

    def completed(self, config: Config, stored: Stored) -> tuple[Config, Stored]:
        stored = renamed(config.title, stored, lambda name: name.removeprefix("model."))
        check_one_layer(config.title, stored)
        text = replace(
            config.text_config,
            fc_bias="fc.bias" in stored,
            qkv_bias="layers.0.self_attn.q_proj.bias" in stored,
            input_norm="layers.0.input_layernorm.weight" in stored,
            own_embedding="embed_tokens.weight" in stored,
        )
        return replace(config, text_config=text), stored

    def written(
        self, config: Config, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        return config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}, tensors

    def refusal(self, config: Config, server: Server) -> str:
        return f"an {config.title}, which is not written for {server}; leave that out"

    def facts(self, config: Config) -> dict[str, str]:
        return {"image rule": config.images}


FC: Axes = ((r"(?:img_)?fc/weight", (None, "embed")),)
KIND = Eagle1Kind(
    config=Eagle1Config,
    module=Eagle1Head,
    titles=("EAGLE-1",),
    about="EAGLE-1 head: a draft that reads its target's last hidden state",
    features=("eagle1",),
    options=("images",),
    names="eagle(?!-?3)",
    axes=FC,
)
