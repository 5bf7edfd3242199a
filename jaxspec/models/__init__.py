"""The one lookup table: Hugging Face `model_type` -> configuration, module and file layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, init_cache
from jaxspec.config import LlavaConfig, ModelConfig, TextConfig, text_config
from jaxspec.errors import InputError
from jaxspec.models.decoder import CausalLM
from jaxspec.models.llava import Llava
from jaxspec.typing import Array, Float, Int, Params


@dataclass(frozen=True)
class Family:
    """What the library needs to know of a model type."""

    config: type[ModelConfig]
    module: Callable[[Any], nn.Module]
    layouts: tuple[tuple[str, str], ...] = ()
    """Regex rewrites, in order, that bring any known file layout to the names of the hub's files."""


_LLAVA_LAYOUTS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(TextConfig, CausalLM),
    "llava": Family(LlavaConfig, Llava, _LLAVA_LAYOUTS),
}


def family_of(model_type: str) -> Family:
    if model_type not in FAMILIES:
        raise InputError(f"config.json: model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


def build(config: ModelConfig) -> nn.Module:
    """The (stateless, hashable) module of a configuration."""
    return family_of(config.model_type).module(config)


def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random float32 parameters, normal(0, 0.02), norms at one."""
    inputs = [jnp.zeros((1, 2), jnp.int32)]
    if isinstance(config, LlavaConfig):
        size, channels = config.vision_config.image_size, config.vision_config.num_channels
        inputs.append(jnp.zeros((1, 1, size, size, channels)))
    return jax.jit(build(config).init)(key, *inputs)["params"]


def abstract_params(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Params:
    """Shapes and dtypes of the parameters; nothing is allocated."""
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)


def text_params(config: ModelConfig, params: Params) -> Params:
    """The decoder's parameters within a language model's or an LVLM's."""
    return params if isinstance(config, TextConfig) else params["language_model"]


@dataclass(frozen=True)
class LanguageModel:
    """A text model or an LVLM as pure functions of (parameters, inputs); hashable, so it can be a static argument."""

    config: ModelConfig

    @property
    def text(self) -> TextConfig:
        return text_config(self.config)

    @property
    def sees(self) -> bool:
        """Whether the model has a vision tower."""
        return isinstance(self.config, LlavaConfig)

    def encode(self, params: Params, pixels: Float[Array, "B I Y X 3"]) -> Float[Array, "B I P E"]:
        """Tower features of every image."""
        return self._whole(params, "encode", pixels)

    def embed(
        self, params: Params, tokens: Int[Array, "B L"], features: Float[Array, "B I P E"] | None
    ) -> Float[Array, "B L D"]:
        """Prompt embeddings; with features, the image placeholders show them in order."""
        if features is None:
            return self._text(params, "embed", tokens)
        return self._whole(params, "embed", tokens, features)

    def prefill(
        self, params: Params, embeds: Float[Array, "B L D"], length: Int[Array, " B"], slots: int
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Runs right-padded prompts: logits of what follows each, and a cache of `slots` that holds them."""
        batch, width, _ = embeds.shape
        cache = init_cache(self.text, batch, slots, embeds.dtype)
        positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
        hidden, cache = self._text(params, "hidden", embeds, positions, cache, width)
        last = jnp.take_along_axis(hidden, length[:, None, None] - 1, axis=1)[:, 0]
        return self._text(params, "logits", last), cache.replace(length=length)

    def extend(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Appends T tokens to every row; logits of what follows each of them, and the longer cache."""
        return self._text(params, "extend", tokens, cache)

    def _whole(self, params: Params, method: str, *args: Any) -> Any:
        return build(self.config).apply({"params": params}, *args, method=method)

    def _text(self, params: Params, method: str, *args: Any) -> Any:
        return CausalLM(self.text).apply({"params": text_params(self.config, params)}, *args, method=method)
