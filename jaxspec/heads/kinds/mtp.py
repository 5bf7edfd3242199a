"""Define MiMo's MTP head (Xiaomi 2025, arXiv 2505.07608): one more layer of the target's kind.

`input_proj` joins the normed state of a token, as the target's last layer left it, and the normed
embedding of the token after it. A layer of the target's kind follows, and a norm, whose output the
target's output matrix scores and the next token reads. As in vLLM and SGLang, the embedding at
position 0 is zero.

The tensors lie in the target's own files, and config.json is the target's. So a target may be given
as its own draft. An exported head has the same names, and the architecture `MiMoMTPModel`:

| tensor, behind `model.mtp_layers.0.`                            | shape       |
|-----------------------------------------------------------------|-------------|
| `token_layernorm.weight`, `hidden_layernorm.weight`             | [D]         |
| `input_proj.weight`                                             | [D, 2 D]    |
| `{input,post_attention}_layernorm.weight`, `self_attn.*`, `mlp.*` | as a layer's |
| `final_layernorm.weight`                                        | [D]         |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import RotaryConfig, TextConfig
from jaxspec.config.decoders import decoder_config
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import check_rotary, target_hash
from jaxspec.heads.files import Arrays, Kind, Server, Stored
from jaxspec.heads.head import in_float32
from jaxspec.heads.states import StateHead, StateHeadConfig
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import Dense, text_norm
from jaxspec.typing import Array, Int, Params, Vectors

_PREFIX = "model.mtp_layers.0."
_OF_LAYER = re.compile("self_attn|mlp|(?:input|post_attention)_layernorm")


@dataclass(frozen=True)
class MtpConfig(StateHeadConfig):
    """Describe a layer of the target's kind that reads the output of the target's last layer."""

    depth: int = 1
    """Layers of the target."""
    gamma: int = 1

    title: ClassVar = "MTP head"
    model_type: ClassVar = "mimo"
    name: ClassVar = "mtp"
    rules: ClassVar = ("placeholder",)

    @property
    def target_states(self) -> tuple[int, ...]:
        return (self.depth,)

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        mine, layers = self.text_config, f" and {self.depth} layers"
        sizes = mine.hidden_size, mine.vocab_size, self.depth
        expected = text.hidden_size, text.vocab_size, text.num_hidden_layers
        if not isinstance(text, RotaryConfig) or sizes != expected:
            raise self._misfit(target, mine.hidden_size, mine.vocab_size, layers)
        tied = replace(mine, tie_word_embeddings=text.tie_word_embeddings)
        return replace(self, text_config=tied)

    @classmethod
    def of_target(cls, target: Any, **options: Any) -> Self:
        """Return the configuration of a new head for a target.

        options: Fields of the head.
        """
        text = check_rotary(target)
        layer = text.for_head((text.cached_layers - 1,))
        return cls(layer, target_hash(target), depth=text.num_hidden_layers, **options)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            if (layers := raw["num_nextn_predict_layers"]) != 1:
                raise InputError(f"{cls.title}: num_nextn_predict_layers {layers!r:.40}; give 1")
            text, extras = decoder_config(raw), raw.get("jaxspec") or {}
            layer = text.for_head((0,))
            return cls(layer, **{"target_hash": "", **extras}, depth=text.num_hidden_layers)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {
            "architectures": ["MiMoMTPModel"],
            "num_hidden_layers": self.depth,
            "num_nextn_predict_layers": 1,
        }


class MtpHead(StateHead):
    """Hold an MTP head's norms, `input_proj` and layer."""

    config: MtpConfig

    layer: ClassVar[Any] = Layer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.norm, self.token_layernorm = text_norm(text), text_norm(text)
        self.hidden_layernorm = text_norm(text)
        self.input_proj = Dense(text.hidden_size, bias=False)

    def fuse(
        self, embeds: Vectors, before: Vectors, context: Any, slots: Int[Array, "#B roots"]
    ) -> Vectors:
        embeds = jnp.where((slots == self.behind)[..., None], 0, embeds)
        parts = self.hidden_layernorm(before), self.token_layernorm(embeds)
        return self.input_proj(jnp.concatenate(parts, axis=-1))

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> dict[str, Any]:
        """Return what `Head.initial` does, with a copy of the target's last layer."""
        params = super().initial(target, key)
        if target is None:
            return params
        layer = target["model"][f"layers_{self.config.depth - 1}"]
        copies = {name: layer[name] for name in params["layers_0"]}
        return params | in_float32({"layers_0": copies})


@dataclass(frozen=True)
class MtpKind(Kind[MtpConfig]):
    """Read heads in their targets' files, and write them by themselves."""

    def within(self, raw: Mapping[str, Any]) -> bool:
        return raw.get("model_type") == MtpConfig.model_type and bool(
            raw.get("num_nextn_predict_layers")
        )

    def completed(self, config: MtpConfig, stored: Stored) -> tuple[MtpConfig, Stored]:
        parts = {
            name.removeprefix(_PREFIX): tensor
            for name, tensor in stored.items()
            if name.startswith(_PREFIX)
        }
        return config, {_placed(name): tensor for name, tensor in parts.items()}

    def written(
        self, config: MtpConfig, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        names = {name: name.removeprefix("layers.0.") for name in tensors}
        names["norm.weight"] = "final_layernorm.weight"
        raw = config.to_dict() | {"torch_dtype": str(tensors["input_proj.weight"].dtype)}
        return raw, {_PREFIX + names[name]: leaf for name, leaf in tensors.items()}

    def refusal(self, config: MtpConfig, server: Server) -> str:
        return f"an {config.title}, which {server} reads in its target's files; leave that out"


def _placed(name: str) -> str:
    """Return this library's name of a tensor."""
    if _OF_LAYER.match(name):
        return f"layers.0.{name}"
    return name.replace("final_layernorm", "norm")


KIND = MtpKind(
    config=MtpConfig,
    module=MtpHead,
    titles=("MTP",),
    about="MTP head: a draft that reads the output of its target's last layer",
    features=("mtp",),
    names="mimomtp",
    axes=((r"input_proj/weight", (None, "embed")),),
)
