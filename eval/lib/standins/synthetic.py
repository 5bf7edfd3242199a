"""Make untrained models for timing: random weights, and a synthetic pair of given agreement.

The models of a pair follow one rule: the residual stream keeps a token's embedding, and the head
maps it to the next token of a fixed cycle. Layers add so little to the stream that they hardly
disturb this rule, and the models do all the arithmetic of real ones. A model is right after a given
share of the cycle's tokens, and predicts another successor after the rest. The acceptance is made
up; the times are real.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.command import load_preset
from jaxspec.config import LlavaConfig, ModelConfig
from jaxspec.errors import InputError, nearest
from jaxspec.loading.models import LoadedModel
from jaxspec.models.families import abstract_params
from jaxspec.typing import Array, Params
from jaxspec_demo import ASSETS

PREFIX = "synthetic:"
ROLES = ("target", "partner", "draft")
RESERVED = 300
"""Special tokens and bytes of the tokeniser have ids below this, and are in no cycle."""
ADDED = 0.02
"""Factor of the matrices that write to the residual stream."""


def parse_synthetic(name: str) -> tuple[str, float]:
    """Return the role and share of `synthetic:ROLE:SHARE`, such as `synthetic:draft:0.7`."""
    role, _, text = name.removeprefix(PREFIX).partition(":")
    if role not in ROLES:
        raise InputError(f"{name}: no such model; {nearest(role, ROLES)}")
    try:
        share = float(text or 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"{name}: {text} is not a share of tokens; give a number from 0 to 1")
    return role, share


def synthetic_model(name: str, dtype: jnp.dtype, pair: str = "pair55m") -> LoadedModel:
    """Return a model of a synthetic pair, with the shapes of a preset of `configs/latency`.

    `pair55m` has a target and a partner of 54M and a draft of 3M. All see images of 576 tokens and
    use the mini models' tokeniser.
    """
    role, share = parse_synthetic(name)
    preset = load_preset("latency", pair)
    config: LlavaConfig = preset.draft if role == "draft" else preset.target
    mini = LoadedModel.load(ASSETS / "mini" / "target")
    assert isinstance(mini.config, LlavaConfig)
    assert mini.image_processor is not None
    config = replace(config, image_token_index=mini.config.image_token_index)
    side = config.vision_config.image_size
    size = {"size": {"shortest_edge": side}, "crop_size": side}
    processor = type(mini.image_processor)(**(mini.image_processor.to_dict() | size))
    params = follow_cycle(config, random_params(config, dtype, ROLES.index(role)), share)
    return LoadedModel(config, params, mini.tokenizer, processor)


def random_params(config: ModelConfig, dtype: jnp.dtype, seed: int = 0) -> Params:
    """Make weights from Normal(0, 0.02) and norms of one, on the device and in one copy."""
    leaves, tree = jax.tree.flatten(abstract_params(config, dtype))
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), len(leaves))
    arrays = [_random_leaf(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves)]
    return jax.tree.unflatten(tree, arrays)


@partial(jax.jit, static_argnums=(1, 2))
def _random_leaf(key: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(0.02, dtype)


def follow_cycle(config: LlavaConfig, params: Params, right: float = 1.0) -> Params:
    """Return parameters that predict the cycle after a share `right` of its tokens.

    Models with one vocabulary have the same cycle.
    """
    text = config.text_config
    size, width = text.vocab_size, text.hidden_size
    order = np.random.default_rng(0).permutation(np.arange(RESERVED, size - 1))
    after = order[np.arange(size) % len(order)]  # tokens outside the cycle lead into it
    after[order] = np.roll(order, -1)
    wrong = np.random.default_rng(1).random(size) >= right
    followed = np.where(wrong, after[after], after)
    embedding = np.random.default_rng(width).normal(size=(size, width)).astype(np.float32)
    head = np.zeros((size, width), np.float32)
    np.add.at(head, followed, embedding / width**0.5)
    dtype = params["language_model"]["lm_head"]["weight"].dtype
    decoder = dict(params["language_model"])
    decoder["lm_head"] = {"weight": jnp.asarray(head, dtype)}
    embedded = {"embed_tokens": {"embedding": jnp.asarray(embedding, dtype)}}
    decoder["model"] = jax.tree.map_with_path(_weakened, decoder["model"] | embedded)
    return {**params, "language_model": decoder}


def _weakened(path: tuple[Any, ...], leaf: Array) -> Array:
    """Return the leaf, and a matrix that writes to the residual stream times `ADDED`."""
    writes = any(part in jax.tree_util.keystr(path) for part in ("o_proj", "down_proj"))
    return leaf * jnp.asarray(ADDED, leaf.dtype) if writes else leaf
