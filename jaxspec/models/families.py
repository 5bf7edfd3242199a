"""Look up a Hugging Face `model_type`: its configuration, module and file layouts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

import jaxspec.config as configs
from jaxspec.config import ModelConfig, TextConfig
from jaxspec.errors import InputError
from jaxspec.models.decoder import CausalLM
from jaxspec.models.inputs import ImageInputs
from jaxspec.models.int8 import Weights, int8_params
from jaxspec.models.lvlms.anyres import LlavaNextImages, LlavaOnevisionImages
from jaxspec.models.lvlms.gemma3 import Gemma3, Gemma3Images
from jaxspec.models.lvlms.gemma4 import Gemma4, Gemma4Unified, SquareImages
from jaxspec.models.lvlms.llava import Llava, LlavaImages, LlavaNext
from jaxspec.models.lvlms.qwen3_vl import Qwen3Images, Qwen3VL
from jaxspec.models.lvlms.qwen_vl import QwenImages, QwenVL
from jaxspec.models.opt import OPT
from jaxspec.typing import Array, Params

_LLAMA = ((r"^(embed_tokens|layers|norm)\.", r"model.\1."),)
"""Layouts of files saved from the model without its output matrix."""
_OPT = (
    (r"^(?!model\.|decoder\.|lm_head\.)", "decoder."),
    (r"^decoder\.", "model.decoder."),
)
_LLAVA = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower\.|multi_modal_projector\.|image_newline$)", r"\1"),
    (r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model."),
)
_QWEN_VL = ((r"^model\.(visual\.)", r"\1"), (r"^model\.language_model\.", "model."))
_NESTED = (
    (r"^model\.", "model.language_model."),
    (r"^((?:visual|vision_embedder|vision_tower|embed_vision)\.)", r"model.\1"),
)
"""Layout of files in which `model.` is in front of all names."""
_GEMMA4 = (
    (
        (r"^model\.((?:vision_(?:embedder|tower)|audio_tower|embed_(?:vision|audio))\.)", r"\1"),
        (r"^model\.language_model\.", "model."),
    ),
    _NESTED,
    r"audio_tower\.|embed_audio\.",
)
"""`layouts`, `written` and `unread`."""


@dataclass(frozen=True)
class Family:
    """Hold the classes and file layouts of a model type; by default those of a Llama."""

    title: str
    """Name for people."""
    config: type[ModelConfig]
    module: Callable[[Any], nn.Module] = CausalLM
    images: type[ImageInputs] | None = None
    """Reader of images for its tower; None for text models."""
    layouts: tuple[tuple[str, str], ...] = _LLAMA
    """Regex rewrites, in order, from any known file layout to the names of the hub's files."""
    written: tuple[tuple[str, str], ...] = ()
    """Regex rewrites from these names to those of files that are written, where they differ."""
    unread: str = r"(?!)"
    """Regex of tensors of parts that are not computed here, such as audio; by default none."""


_FAMILIES = (
    Family("Llama, Vicuna", configs.LlamaConfig),
    Family("Mistral", configs.MistralConfig),
    Family("Qwen2, Qwen2.5", configs.Qwen2Config),
    Family("MiMo", configs.MimoConfig, unread=r"model\.mtp_layers\."),
    Family("Qwen3", configs.Qwen3Config),
    Family("Gemma 3", configs.Gemma3TextConfig),
    Family("Gemma 4", configs.Gemma4TextConfig),
    Family("Gemma 4 12B", configs.Gemma4UnifiedTextConfig),
    Family("OPT", configs.OptConfig, OPT, layouts=_OPT),
    Family("LLaVA-1.5", configs.LlavaConfig, Llava, LlavaImages, _LLAVA),
    Family("LLaVA-NeXT (1.6)", configs.LlavaNextConfig, LlavaNext, LlavaNextImages, _LLAVA),
    Family(
        "LLaVA-OneVision", configs.LlavaOnevisionConfig, LlavaNext, LlavaOnevisionImages, _LLAVA
    ),
    Family("Gemma 3 with images", configs.Gemma3Config, Gemma3, Gemma3Images, _LLAVA),
    Family("Gemma 4 with images", configs.Gemma4Config, Gemma4, SquareImages, *_GEMMA4),
    Family(
        "Gemma 4 12B with images",
        configs.Gemma4UnifiedConfig,
        Gemma4Unified,
        SquareImages,
        *_GEMMA4,
    ),
    Family("Qwen2.5-VL", configs.QwenVLConfig, QwenVL, QwenImages, _QWEN_VL),
    Family("Qwen3-VL", configs.Qwen3VLConfig, Qwen3VL, Qwen3Images, _QWEN_VL, _NESTED),
)
FAMILIES: dict[str, Family] = {family.config.model_type: family for family in _FAMILIES}
"""Families by their `model_type`."""
_TOWER = re.compile(r"vision_tower/|vision_embedder/|visual/(?!merger/|deepstack_merger_list)")
"""Paths of the parameters that image features are made with."""


def family_of(model_type: str) -> Family:
    """Return the entry of a model type. Raises InputError for an unknown one."""
    if model_type == "jaxspec_kv_head":
        raise InputError("a head, not a model; give it as a draft")
    if model_type not in FAMILIES:
        raise InputError(
            f"model_type {model_type!r} is not supported; supported: {', '.join(FAMILIES)}"
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
    if isinstance(config, TextConfig):
        return params
    # Some files hold the decoder at the level of the tower.
    decoder = {name: params[name] for name in ("model", "lm_head") if name in params}
    return params.get("language_model", decoder)


def split_tower(params: Params) -> tuple[Params, Params]:
    """Return the parameters that image features are made with, and all others."""
    inside, outside = {}, {}
    for path, leaf in flatten_dict(params, sep="/").items():
        (inside if _TOWER.match(path) else outside)[path] = leaf
    return unflatten_dict(inside, sep="/"), unflatten_dict(outside, sep="/")


def towers_alike(target: ModelConfig, draft: ModelConfig) -> bool:
    """Return whether both have towers, of equal shapes, so that their weights can be equal."""
    shapes = [split_tower(abstract_params(config))[0] for config in (target, draft)]
    return bool(shapes[0]) and shapes[0] == shapes[1]


def image_zeros(config: ModelConfig, batch: int, tiles: int) -> dict[str, Array]:
    """Return image inputs [B, U, ...] of blank tiles; none for a text model."""
    images = family_of(config.model_type).images
    shapes = images.shapes(config) if images else {}
    return {
        name: jnp.zeros((batch, tiles, *shape), dtype) for name, (shape, dtype) in shapes.items()
    }
