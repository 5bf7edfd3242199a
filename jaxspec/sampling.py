"""From logits to the distributions that tokens are drawn from and accepted against.

Draft and target must be processed alike, or acceptance is not lossless: temperature first, then top-k, then
top-p, renormalised, all in float32. For an ensemble of views the filters apply to the *mixture*. A row at
temperature 0 becomes one-hot, which makes greedy decoding a special case of rejection sampling: the draft is
accepted exactly where it equals the target's argmax, and the residual is the target's argmax.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.typing import Array, Bool, Float, Int


class Sampling(struct.PyTreeNode):
    """Per-row decoding options, traced: changing them compiles nothing."""

    temperature: Float[Array, " B"]
    """0 is greedy."""
    top_k: Int[Array, " B"]
    """0 keeps all tokens."""
    top_p: Float[Array, " B"]
    """1 keeps all tokens."""
    max_new_tokens: Int[Array, " B"]
    eos: Int[Array, " E"]
    """Ids that end a row; pad with -1."""
    keys: Array
    """One PRNG key a row, so that a request draws the same tokens whatever its neighbours are."""


by_place = partial(jax.vmap, in_axes=-2, out_axes=-2)
"""Maps a function of [..., V] over the places of a block, [..., T, V]."""


def likeliest(scores: Float[Array, "... V"]) -> Int[Array, " ..."]:
    """The first index of the largest score: `argmax`, as two plain reductions, which CPUs do several times faster."""
    size = scores.shape[-1]
    largest = scores == scores.max(-1, keepdims=True)
    return jnp.min(jnp.where(largest, jnp.arange(size, dtype=jnp.int32), size - 1), axis=-1)


def tempered(logits: Float[Array, "... B V"], temperature: Float[Array, " B"]) -> Float[Array, "... B V"]:
    """softmax(logits / temperature) in float32; temperature 0 counts as 1, `filtered` makes it one-hot."""
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    logits = logits.astype(jnp.float32)
    # Their maximum goes first: at 1e-20 rounding of the large quotients would make their softmax NaN.
    return jax.nn.softmax((logits - logits.max(-1, keepdims=True)) / scale, axis=-1)


def filtered(probs: Float[Array, "B V"], options: Sampling, best: Int[Array, " B"]) -> Float[Array, "B V"]:
    """Top-k, then top-p, renormalised; rows at temperature 0 put all mass on token `best`."""
    narrows = ((options.top_k > 0) | (options.top_p < 1)) & (options.temperature > 0)
    probs = jax.lax.cond(
        jnp.any(narrows),
        # Row by row: a row that keeps all tokens must not be renormalised because of its neighbours.
        lambda p: jnp.where(narrows[:, None], _top_k_top_p(p, options), p),
        lambda p: p,
        probs,
    )
    greedy = jax.nn.one_hot(best, probs.shape[-1], dtype=probs.dtype)
    return jnp.where(options.temperature[:, None] > 0, probs, greedy)


def distribution(logits: Float[Array, "B V"], options: Sampling) -> Float[Array, "B V"]:
    """What one model draws its next token from."""
    return filtered(tempered(logits, options.temperature), options, likeliest(logits))


def mix(view_probs: Float[Array, "R B V"], weights: Float[Array, "B R"]) -> Float[Array, "B V"]:
    """What an ensemble of views says, sum_r w_r q_r (IbED, TABED Eq. 2); where weights are negative (AdaBoost's may
    be, if asked for), its positive part."""
    mixed = jnp.einsum("RBV,BR->BV", view_probs, weights)
    positive = jnp.maximum(mixed, 0.0)
    signed = (weights < 0).any(-1, keepdims=True)
    return jnp.where(signed, positive / positive.sum(-1, keepdims=True), mixed)


def _top_k_top_p(probs: Array, options: Sampling) -> Array:
    """Keeps the k likeliest tokens, then the shortest prefix of those that holds the mass p."""
    order = jnp.argsort(-probs, axis=-1, stable=True)
    ranked = jnp.take_along_axis(probs, order, axis=-1)
    rank = jnp.arange(probs.shape[-1])
    k = jnp.where(options.top_k > 0, options.top_k, probs.shape[-1])[:, None]
    ranked = jnp.where(rank < k, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdims=True)
    before = jnp.cumsum(ranked, axis=-1) - ranked
    # In float32 `before` reaches 1 ahead of a long tail, which a top-p of 1 has to keep.
    keep = (before < options.top_p[:, None]) | (options.top_p[:, None] >= 1) | (rank == 0)
    ranked = jnp.where(keep, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdims=True)
    rows = jnp.arange(probs.shape[0])[:, None]
    return jnp.zeros_like(probs).at[rows, order].set(ranked, unique_indices=True)


def draw(keys: Array, weights: Float[Array, "B V"], greedy: Bool[Array, " B"]) -> Int[Array, " B"]:
    """One token a row, with probability proportional to its (unnormalised) weight.

    A token of weight 0 is never drawn. The weights of greedy rows have a single maximum, and that is drawn.
    """
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.log(weights))
    return jnp.where(greedy, likeliest(weights), drawn).astype(jnp.int32)


def draw_siblings(
    keys: Array, probs: Float[Array, "B V"], mixed: Float[Array, "B V"], count: int
) -> Int[Array, "B count"]:
    """`count` different tokens a row, drawn one after another from `probs` without replacement.

    They are the largest of log probs + Gumbel noise, in order (Kool et al. 2019). Once `probs` has none left, as
    after the first at temperature 0, the likeliest of `mixed`, the unfiltered mixture, follow in order.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
    # In float32 no drawn token's score is below -110.
    scores = jnp.where(probs > 0, jnp.log(probs) + noise, jnp.log(mixed) - 256)
    return jax.lax.top_k(scores, count)[1]


def fit_vocabulary(logits: Float[Array, "... V"], size: int) -> Float[Array, "... U"]:
    """A draft's logits over a target's vocabulary of `size`: padding never drawn, surplus ids cut."""
    have = logits.shape[-1]
    if have >= size:
        return logits[..., :size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, size - have)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)
