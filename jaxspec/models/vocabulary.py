"""Score only a draft vocabulary: the most frequent tokens, of a draft model or a head.

FR-Spec (Zhao et al. 2025, arXiv 2502.14856) and EAGLE-3 use them, because the output matrix is the
largest part of a small draft. The matrix has rows only for these tokens; all others get the
score -inf. Sampling, mixtures and trees need no special case: on two CPU cores filling a row of
49,152 scores costs 0.3 ms, and its output matrix 5 ms.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxspec.config import ModelConfig, RotaryConfig, TextConfig, text_config, untied
from jaxspec.errors import InputError
from jaxspec.typing import Array, Float, Int, Params


def fill_vocabulary(config: TextConfig, scores: Float[Array, "... words"]) -> Float[Array, "... V"]:
    """Return the scores of all tokens: -inf for those that the model does not score or know."""
    if config.draft_vocabulary:
        whole = jnp.full((*scores.shape[:-1], config.vocab_size), -jnp.inf, scores.dtype)
        return whole.at[..., np.asarray(config.draft_vocabulary)].set(scores, unique_indices=True)
    if config.known_tokens:
        is_known = jnp.arange(scores.shape[-1]) < config.known_tokens
        return jnp.where(is_known, scores, -jnp.inf)
    return scores


def draft_indices(config: TextConfig, tokens: Int[Array, " ..."]) -> Int[Array, " ..."]:
    """Return the tokens' indices among those that a draft scores; -1 for others."""
    if not config.draft_vocabulary:
        return jnp.where(tokens < (config.known_tokens or config.vocab_size), tokens, -1)
    indices = np.full(config.vocab_size, -1, np.int32)
    indices[list(config.draft_vocabulary)] = np.arange(len(config.draft_vocabulary))
    return jnp.asarray(indices).at[tokens].get(mode="fill", fill_value=-1)


def output_rows(params: Params, tokens: tuple[int, ...]) -> Float[Array, "words D"]:
    """Return these tokens' rows of a decoder's output matrix, or of its tied embedding."""
    return _output_matrix(params)[np.asarray(tokens)]


def borrowed_rows(params: Params, tokens: tuple[int, ...]) -> Float[Array, "words D"]:
    """Return `output_rows`; all rows in their order are the matrix itself, not a copy."""
    matrix = _output_matrix(params)
    return matrix if tokens == tuple(range(len(matrix))) else output_rows(params, tokens)


def _output_matrix(params: Params) -> Float[Array, "V D"]:
    tied = "lm_head" not in params
    return params["model"]["embed_tokens"]["embedding"] if tied else params["lm_head"]["weight"]


def narrowed(
    config: ModelConfig, params: Params, tokens: tuple[int, ...]
) -> tuple[ModelConfig, Params]:
    """Return a model that scores only these tokens, with an output matrix of its own."""
    text = text_config(config)
    if not isinstance(text, RotaryConfig):
        raise InputError(
            f"draft vocabulary: a {text.model_type!r} scores all its tokens; "
            "give a Llama-like draft"
        )
    index_of = {
        token: index for index, token in enumerate(text.draft_vocabulary or range(text.vocab_size))
    }
    if not index_of.keys() >= set(tokens):
        raise InputError(
            f"draft vocabulary: {len(tokens)} tokens, but the draft scores {len(index_of)}; "
            "give fewer"
        )
    rows = output_rows(
        params.get("language_model", params), tuple(index_of[token] for token in tokens)
    )
    return _with_head(config, params, rows, tokens)


def widened(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
    """Return a model that scores all tokens; new ones get the mean row, so none is likeliest.

    Llama's head has no bias, so no row can give -inf for every hidden state.
    """
    text, decoder = text_config(config), params.get("language_model", params)
    if not text.draft_vocabulary:
        return config, params
    rows = decoder["lm_head"]["weight"]
    mean = jnp.mean(rows, 0, keepdims=True, dtype=jnp.float32).astype(rows.dtype)
    whole = jnp.repeat(mean, text.vocab_size, 0).at[np.asarray(text.draft_vocabulary)].set(rows)
    return _with_head(config, params, whole, ())


def _with_head(
    config: ModelConfig, params: Params, rows: Float[Array, "words D"], tokens: tuple[int, ...]
) -> tuple[ModelConfig, Params]:
    config, head = untied(config, draft_vocabulary=tokens), {"lm_head": {"weight": rows}}
    if "language_model" not in params:  # text models, and Qwen-VL's LVLMs
        return config, {**params, **head}
    return config, {**params, "language_model": {**params["language_model"], **head}}


def first_tokens(path: object, vocabulary: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the first tokens of a checkpoint's draft vocabulary; InputError for too many."""
    if not vocabulary:
        raise InputError(f"{path}: has no draft vocabulary; leave out --draft-vocabulary")
    if not 0 < count <= len(vocabulary):
        raise InputError(f"{path}: a draft vocabulary of {len(vocabulary)} tokens, not {count}")
    return vocabulary[:count]
