"""Draft vocabularies: the tokens that a draft or a KV head scores, most frequent first.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and EAGLE-3 use them, because the output head is the
largest part of a small draft. The head has columns for these tokens alone; all others get the score
-inf. Sampling, mixtures and trees need no special case: on two CPU cores filling a row of 49,152
scores costs 0.3 ms, and its head 5 ms.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, RotaryConfig, TextConfig, text_config, untied
from jaxspec.errors import InputError
from jaxspec.typing import Array, Float, Int, Params


def fill_vocabulary(config: TextConfig, scores: Float[Array, "... words"]) -> Float[Array, "... V"]:
    """Return the scores of all tokens."""
    if not config.draft_vocabulary:
        return scores
    whole = jnp.full((*scores.shape[:-1], config.vocab_size), -jnp.inf, scores.dtype)
    return whole.at[..., np.asarray(config.draft_vocabulary)].set(scores, unique_indices=True)


def places(config: TextConfig, tokens: Int[Array, " ..."]) -> Int[Array, " ..."]:
    """Return the tokens' indices in the draft vocabulary; -1 for others."""
    if not config.draft_vocabulary:
        return tokens
    found = np.full(config.vocab_size, -1, np.int32)
    found[list(config.draft_vocabulary)] = np.arange(len(config.draft_vocabulary))
    return jnp.asarray(found).at[tokens].get(mode="fill", fill_value=-1)


def head_kernel(params: Params, words: tuple[int, ...]) -> Float[Array, "D words"]:
    """Return these tokens' columns of a decoder's output head, or of its tied embedding."""
    if "lm_head" in params:
        return params["lm_head"]["kernel"][:, np.asarray(words)]
    return params["model"]["embed_tokens"]["embedding"][np.asarray(words)].T


def narrowed(
    config: ModelConfig, params: Params, words: tuple[int, ...]
) -> tuple[ModelConfig, Params]:
    """Return a model that scores these tokens alone, with a head of its own."""
    text = text_config(config)
    if not isinstance(text, RotaryConfig):
        raise InputError(
            f"draft vocabulary: a {text.model_type!r} scores all its tokens; "
            "give a Llama-like draft"
        )
    places_of = {
        word: place for place, word in enumerate(text.draft_vocabulary or range(text.vocab_size))
    }
    if not places_of.keys() >= set(words):
        raise InputError(
            f"draft vocabulary: {len(words)} tokens, and the draft scores {len(places_of)}; "
            "give fewer"
        )
    kernel = head_kernel(
        params.get("language_model", params), tuple(places_of[word] for word in words)
    )
    return _with_head(config, params, kernel, words)


def widened(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Return a model that scores all tokens; new ones get the mean column, so none is likeliest.

    Llama's head has no bias, so no column can give -inf for every hidden state.
    """
    text, own = text_config(config), params.get("language_model", params)
    if not text.draft_vocabulary:
        return config, params
    kernel = own["lm_head"]["kernel"]
    mean = jnp.mean(kernel, 1, keepdims=True, dtype=jnp.float32).astype(kernel.dtype)
    whole = (
        jnp.repeat(mean, text.vocab_size, 1).at[:, np.asarray(text.draft_vocabulary)].set(kernel)
    )
    return _with_head(config, params, whole, ())


def _with_head(
    config: ModelConfig, params: Params, kernel: Float[Array, "D words"], words: tuple[int, ...]
) -> tuple[ModelConfig, Params]:
    config, head = untied(config, draft_vocabulary=words), {"lm_head": {"kernel": kernel}}
    if "language_model" not in params:  # text models, and Qwen-VL's LVLMs
        return config, {**params, **head}
    return config, {**params, "language_model": {**params["language_model"], **head}}
