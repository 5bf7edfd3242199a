"""Draw random LVLMs of a few thousand parameters, drafts that agree with them now and then, and KV
heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import LlamaConfig, LlavaConfig, ModelConfig, VisionConfig
from jaxspec.config.text import FULL
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.heads.kinds.eagle1 import Eagle1Config
from jaxspec.heads.kinds.eagle3.config import GemmaEagleConfig
from jaxspec.heads.making import abstract_head, new_head
from jaxspec.heads.states import StateHeadConfig
from jaxspec.models.families import abstract_params
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.vocabulary import narrowed
from jaxspec.typing import Params

VOCABULARY, EOS = 24, 2
CONTEXT = 12
"""Trained positions: most of the tests decode past them."""


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.2) -> Params:
    """Return weights large enough that the distributions are far from uniform; norms and biases at
    one, and bounds at two.

    numpy draws them, because compiling JAX's initialisers takes longer than all else here.
    """
    rng = np.random.default_rng(seed)

    def fill(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        draws = np.ones(leaf.shape) if len(leaf.shape) < 2 else scale * normal(rng, path, leaf)
        if path[-1].key.endswith(("put_min", "put_max")):
            draws = 2 * draws if path[-1].key.endswith("max") else -2 * draws
        return draws.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, abstract_params(config))


def normal(rng: np.random.Generator, path: Any, leaf: Any) -> np.ndarray:
    """Draw a leaf's numbers, of a dense matrix [out, in] column by column."""
    if path[-1].key == "weight" and len(leaf.shape) == 2:
        return rng.normal(size=leaf.shape[::-1]).T
    return rng.normal(size=leaf.shape)


def lvlm(
    width: int,
    layers: int,
    seed: int,
    scale: float = 0.24,
    vocabulary: int = VOCABULARY,
    image: int | None = None,
) -> tuple[LanguageModel, Params]:
    """Return a random LLaVA; its image placeholder is the vocabulary's last id, unless `image` says
    otherwise.
    """
    config = LlavaConfig(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
        ),
        VisionConfig(
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        image_token_index=vocabulary - 1 if image is None else image,
    )
    return LanguageModel(config), jax.tree.map(jnp.asarray, random_params(config, seed, scale))


def noisy(params: Params, amount: float, seed: int = 1) -> Params:
    """Return the parameters, each times 1 + amount * normal: a draft that agrees with its target
    now and then.
    """
    rng = np.random.default_rng(seed)
    return jax.tree.map_with_path(
        lambda path, x: jnp.asarray(
            np.asarray(x) * np.asarray(1 + amount * normal(rng, path, x), x.dtype)
        ),
        params,
    )


def kv_head(
    target: LanguageModel, params: Params, noise: float = 0.05, **options: Any
) -> tuple[Any, Params]:
    """Return a head that begins as the target's last layer that makes keys, its weights a bit
    off.
    """
    config = new_head(target.config, **{"image_slots": 2, "slot_bias": True} | options)
    theirs, rng = params.get("language_model", params)["model"], np.random.default_rng(0)
    if isinstance(config, StateHeadConfig | DFlashConfig):
        return config, eagle_params(config, params)
    last, shapes = theirs[f"layers_{target.text.cached_layers - 1}"], abstract_head(config)
    own = {
        name: {part: last[part] for part in shapes[name]}
        for name in shapes
        if name.startswith("layers_")
    }
    own["norm"] = theirs["norm"]
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0, 1, x.shape), x.dtype), shapes)
    return config, noisy({**drawn, **own}, noise)


def eagle_params(config: HeadConfig, target: Params, seed: int = 0) -> Params:
    """Return a head of random weights, with the target's output head where it has one of its
    own.
    """
    rng, words = np.random.default_rng(seed), np.asarray(config.text_config.draft_vocabulary, int)
    scale = 0.15 if isinstance(config, Eagle1Config) else 0.3  # without norms, scores grow
    drawn = jax.tree.map_with_path(
        lambda path, x: jnp.asarray((x.ndim == 1) + scale * normal(rng, path, x), x.dtype),
        abstract_head(config),
    )
    decoder = target.get("language_model", target)
    if "lm_head" not in drawn or "lm_head" not in decoder:
        return drawn
    output = decoder["lm_head"]["weight"]
    return drawn | {"lm_head": {"weight": output[words] if len(words) else output.copy()}}


def gemma_eagle(target: Any, **fields: Any) -> GemmaEagleConfig:
    """Return a Gemma 4's full layer, as an EAGLE-3 head's."""
    full = target.without_window((target.layer_types.index(FULL),))
    one = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return GemmaEagleConfig(**vars(full) | one | fields)


def narrow(
    model: LanguageModel, params: Params, words: tuple[int, ...]
) -> tuple[LanguageModel, Params]:
    """Return the model with a draft vocabulary."""
    config, params = narrowed(model.config, params, words)
    return LanguageModel(config), params


def text_only(model: LanguageModel, params: Params) -> tuple[LanguageModel, Params]:
    """Return the decoder alone, as a model without a tower."""
    return LanguageModel(model.text), params["language_model"]


def resized(model: LanguageModel, params: Params, vocabulary: int) -> tuple[LanguageModel, Params]:
    """Return a text-only model whose vocabulary is cut, or grown by likely tokens that a smaller
    target does not have.
    """
    model, params = text_only(model, params)
    params = jax.tree.map(lambda x: x, params)
    embedding, head = params["model"]["embed_tokens"]["embedding"], params["lm_head"]["weight"]
    surplus = max(vocabulary - embedding.shape[0], 0)
    embedding = jnp.pad(embedding, ((0, surplus), (0, 0)), mode="symmetric")
    head = jnp.pad(head, ((0, surplus), (0, 0)), mode="symmetric")
    params["model"]["embed_tokens"]["embedding"] = embedding[:vocabulary]
    params["lm_head"]["weight"] = head[:vocabulary]
    return LanguageModel(replace(model.text, vocab_size=vocabulary)), params
