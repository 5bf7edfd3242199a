"""The one lookup table: Hugging Face `model_type` -> configuration, module and file layouts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxspec.cache import KVCache, TreeMask, init_cache
from jaxspec.config import (
    KVHeadConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    MistralConfig,
    ModelConfig,
    OptConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3VLConfig,
    QwenVLConfig,
    TextConfig,
    text_config,
)
from jaxspec.errors import InputError
from jaxspec.models.anyres import LlavaNextImages, LlavaOnevisionImages
from jaxspec.models.decoder import CausalLM
from jaxspec.models.inputs import ImageInputs, Pool, PromptRows, merge, with_room
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.models.layers import apply
from jaxspec.models.llava import Llava, LlavaImages, LlavaNext
from jaxspec.models.opt import OPT
from jaxspec.models.qwen3_vl import Qwen3Images, Qwen3VL
from jaxspec.models.qwen_vl import QwenImages, QwenVL
from jaxspec.sharding import gather
from jaxspec.typing import Array, Float, Int, Params


@dataclass(frozen=True)
class Family:
    """Hold the classes and file layouts of a model type."""

    config: type[ModelConfig]
    module: Callable[[Any], nn.Module]
    layouts: tuple[tuple[str, str], ...] = ()
    """Regex rewrites, in order, from any known file layout to the names of the hub's files."""
    images: type[ImageInputs] | None = None
    """Reader of images for its tower; None for text models."""
    tower: str = r"vision_tower/"
    """Regex of the vision tower's parameters."""
    title: str = ""
    """Name for people."""
    written: tuple[tuple[str, str], ...] = ()
    """Regex rewrites from these names to those of files that are written, where they differ."""


_LLAMA_LAYOUTS = ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)
"""Layouts of files saved from the model without its head."""
_OPT_LAYOUTS = (
    (r"^(?!model\.|decoder\.|lm_head\.)", "decoder."),
    (r"^decoder\.", "model.decoder."),
)
_LLAVA_LAYOUTS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower\.|multi_modal_projector\.|image_newline$)", r"\1"),
    (r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),
)
_QWEN_VL_LAYOUTS = ((r"^model\.(visual\.)", r"\1"), (r"^model\.language_model\.", "model."))

FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, CausalLM, _LLAMA_LAYOUTS, title="Llama, Vicuna"),
    "mistral": Family(MistralConfig, CausalLM, _LLAMA_LAYOUTS, title="Mistral"),
    "qwen2": Family(Qwen2Config, CausalLM, _LLAMA_LAYOUTS, title="Qwen2, Qwen2.5"),
    "qwen3": Family(Qwen3Config, CausalLM, _LLAMA_LAYOUTS, title="Qwen3"),
    "opt": Family(OptConfig, OPT, _OPT_LAYOUTS, title="OPT"),
    "llava": Family(LlavaConfig, Llava, _LLAVA_LAYOUTS, LlavaImages, title="LLaVA-1.5"),
    "llava_next": Family(
        LlavaNextConfig, LlavaNext, _LLAVA_LAYOUTS, LlavaNextImages, title="LLaVA-NeXT (1.6)"
    ),
    "llava_onevision": Family(
        LlavaOnevisionConfig,
        LlavaNext,
        _LLAVA_LAYOUTS,
        LlavaOnevisionImages,
        title="LLaVA-OneVision",
    ),
    "qwen2_5_vl": Family(
        QwenVLConfig,
        QwenVL,
        _QWEN_VL_LAYOUTS,
        QwenImages,
        r"visual/(?!merger/)",
        title="Qwen2.5-VL",
    ),
    "qwen3_vl": Family(
        Qwen3VLConfig,
        Qwen3VL,
        _QWEN_VL_LAYOUTS,
        Qwen3Images,
        r"visual/(?!merger/|deepstack_merger_list)",
        title="Qwen3-VL",
        written=((r"^model\.", "model.language_model."), (r"^visual\.", "model.visual.")),
    ),
}


def family_of(model_type: str) -> Family:
    """Return the entry of a model type. Raises InputError for an unknown one."""
    if model_type == KVHeadConfig.model_type:
        raise InputError("config.json: a head, not a model; give it as a draft")
    if model_type not in FAMILIES:
        raise InputError(
            f"config.json: model_type {model_type!r} is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def build(config: ModelConfig) -> nn.Module:
    """Return the (stateless, hashable) module of a configuration."""
    return family_of(config.model_type).module(config)


@partial(jax.jit, static_argnums=0)
def init_params(config: ModelConfig, key: jax.Array) -> Params:
    """Return random float32 parameters: normal(0, 0.02), norms at one."""
    module: Any = build(config)
    tokens = jnp.zeros((1, 2), jnp.int32)
    return module.init(key, tokens, **image_zeros(config, 1, 1))["params"]


def abstract_params(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, weights: Weights | None = None
) -> Params:
    """Return shapes and dtypes of the parameters, with int8 `weights` or without; allocate none."""
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)
    return tree if weights is None else jax.eval_shape(int8_params, tree)


def text_params(config: ModelConfig, params: Params) -> Params:
    """Return the decoder's parameters within a language model's or an LVLM's."""
    return params if isinstance(config, TextConfig) else params.get("language_model", params)


def split_tower(config: ModelConfig, params: Params) -> tuple[Params, Params]:
    """Return the parameters that image features are made with, and all others."""
    tower = re.compile(family_of(config.model_type).tower)
    inside, rest = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        (inside if tower.match(path) else rest)[path] = leaf
    return unflatten_dict(inside, sep="/"), unflatten_dict(rest, sep="/")


def towers_alike(target: ModelConfig, draft: ModelConfig) -> bool:
    """Return whether both have towers, of equal shapes, so that their weights can be equal."""
    ours, theirs = (split_tower(config, abstract_params(config))[0] for config in (target, draft))
    return bool(ours) and ours == theirs


def image_zeros(config: ModelConfig, batch: int, tiles: int) -> dict[str, Array]:
    """Return image inputs [B, U, ...] of blank tiles; none for a text model."""
    images = family_of(config.model_type).images
    shapes = images.shapes(config) if images else {}
    return {
        name: jnp.zeros((batch, tiles, *shape), dtype) for name, (shape, dtype) in shapes.items()
    }


@dataclass(frozen=True)
class LanguageModel:
    """Run a text model or an LVLM as pure functions of (parameters, inputs).

    It is hashable, so it can be a static argument.
    """

    config: ModelConfig

    @property
    def text(self) -> TextConfig:
        return text_config(self.config)

    @property
    def has_vision(self) -> bool:
        """Return whether the model has a vision tower."""
        return self._images is not None

    def blended(self, pool: Pool | None) -> int:
        """Return the number of feature rows that an image slot blends; 0 without images."""
        return self._images.blended(pool) if self._images else 0

    @property
    def mrope(self) -> bool:
        """Return whether images take other rotary positions than slots (M-RoPE)."""
        return self._images is not None and self._images.mrope

    @property
    def _images(self) -> type[ImageInputs] | None:
        return family_of(self.config.model_type).images

    def encode(self, params: Params, images: Mapping[str, Array]) -> Float[Array, "B U P E"]:
        """Return tower features of every tile of every row's images."""
        return self._whole(params, "encode", **images)

    def embed(
        self,
        params: Params,
        rows: PromptRows,
        features: Float[Array, "B U P E"] | None,
        pool: Pool | None = None,
    ) -> Float[Array, "B L D"]:
        """Return prompt embeddings. Image slots show projected features, pooled for view P."""
        stacked = 0 if isinstance(self.config, TextConfig) else self.config.stacked
        embeds = with_room(self._text(params, "embed", rows.tokens), stacked)
        if features is None or rows.sources is None:
            return embeds
        return merge(
            embeds, self._whole(params, "project", features, pool), rows.sources, rows.blend
        )

    def prefill(
        self,
        params: Params,
        embeds: Float[Array, "B L D"],
        rows: PromptRows,
        slots: int,
        kept: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "B V"], KVCache]:
        """Run right-padded prompts; return each one's next-token logits, and their cache.

        Args:
          slots: Slots of the cache.
          kept: Hidden states that the cache keeps, see `KVCache`; None keeps none.
        """
        hidden, cache = self.read(params, embeds, rows, slots, kept)
        last = jnp.take_along_axis(hidden, rows.length[:, None, None] - 1, axis=1)[:, 0]
        return gather(self.logits(params, last), "batch"), cache

    def read(
        self,
        params: Params,
        embeds: Float[Array, "B L D"],
        rows: PromptRows,
        slots: int,
        kept: tuple[int, ...] | None = None,
    ) -> tuple[Float[Array, "B L D"], KVCache]:
        """Run right-padded prompts; return final-normed hidden states and the cache."""
        batch, width, _ = embeds.shape
        cache = init_cache(self.text, batch, slots, embeds.dtype, kept)
        positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
        hidden, cache = self._text(params, "hidden", embeds, positions, cache, width, rows.rotary)
        shift = cache.shift if rows.shift is None else rows.shift
        return hidden, cache.replace(length=rows.length, shift=shift)

    def logits(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the scores of the next token, float32."""
        return self._text(params, "logits", hidden)

    def scores(self, params: Params, hidden: Float[Array, "... D"]) -> Float[Array, "... words"]:
        """Return the scores of the draft vocabulary, or of all tokens without one."""
        return self._text(params, "scores" if self.text.draft_vocabulary else "logits", hidden)

    def score(
        self,
        params: Params,
        rows: PromptRows,
        features: Float[Array, "B U P E"] | None,
        pool: Pool | None = None,
        slots: Int[Array, "B K"] | None = None,
    ) -> Float[Array, "B K words"]:
        """Return the next-token `scores` of tokens of right-padded rows, without a cache.

        Training reads these.

        Args:
          slots: Slots of the tokens to score; None scores every token.
        """
        embeds = self.embed(params, rows, features, pool)
        positions = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        hidden, _ = self._text(params, "hidden", embeds, positions, None, None, rows.rotary)
        if slots is not None:
            hidden = jnp.take_along_axis(hidden, slots[..., None], axis=1)
        return self.scores(params, hidden)

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens, or nodes of a tree, to each row; return next-token logits and the cache.

        On a mesh each device gets whole rows of logits. If the head's columns split them, drafts
        would be split too, and each sum over the vocabulary would be a message.
        """
        logits, cache = self._text(params, "extend", tokens, cache, tree)
        return gather(logits, "batch"), cache

    def advance(
        self,
        params: Params,
        embeds: Float[Array, "B T D"],
        cache: KVCache,
        tree: TreeMask | None = None,
        scored: Int[Array, "B one"] | None = None,
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens with these embeddings, as `CausalLM.advance` does."""
        logits, cache = self._text(params, "advance", embeds, cache, tree, scored)
        return gather(logits, "batch"), cache

    def _whole(self, params: Params, method: str, *args: Any, **images: Any) -> Any:
        return apply(build(self.config), params, *args, method=method, **images)

    def _text(self, params: Params, method: str, *args: Any) -> Any:
        return apply(build(self.text), text_params(self.config, params), *args, method=method)
