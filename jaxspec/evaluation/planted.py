"""A pair whose agreement is planted, for timing without training.

Both models follow one rule: the residual stream keeps a token's embedding, and the head maps it to the token that
comes next in a fixed cycle. The random weights of attention and MLPs disturb that little, and all arithmetic of real
models is done. In a given share of the cycle's tokens the draft is taught another successor, so that it is right in
just the others. Only the acceptance is planted; times are real.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.config import LlavaConfig
from jaxspec.typing import Params

RESERVED = 300
"""Ids below belong to no cycle: a tokeniser's special tokens and bytes."""


def plant(config: LlavaConfig, params: Params, right: float = 1.0, seed: int = 0) -> Params:
    """The parameters with embedding and head that follow the cycle after a share `right` of its tokens.

    Target and draft of one vocabulary and seed have the same cycle.
    """
    text = config.text_config
    size, width = text.vocab_size, text.hidden_size
    order = np.random.default_rng(seed).permutation(np.arange(RESERVED, size - 1))
    after = order[np.arange(size) % len(order)]  # from a token of no cycle into it
    after[order] = np.roll(order, -1)
    wrong = np.random.default_rng(seed + 1).random(size) >= right
    followed = np.where(wrong, after[after], after)
    embedding = np.random.default_rng(width).normal(size=(size, width)).astype(np.float32)
    head = np.zeros((width, size), np.float32)
    np.add.at(head.T, followed, embedding / width**0.5)
    dtype = params["language_model"]["lm_head"]["kernel"].dtype
    decoder = dict(params["language_model"])
    decoder["lm_head"] = {"kernel": jnp.asarray(head, dtype)}
    decoder["model"] = decoder["model"] | {"embed_tokens": {"embedding": jnp.asarray(embedding, dtype)}}
    return {**params, "language_model": decoder}
