"""From logits to the distributions that tokens are drawn from and accepted against.

Draft and target must be processed alike, or acceptance is not lossless: temperature first, then
top-k, then top-p, renormalised, all in float32. For an ensemble of views the filters apply to the
*mixture*. A row at temperature 0 becomes one-hot, which makes greedy decoding a special case of
rejection sampling: the draft is accepted exactly where it equals the target's argmax, and the
residual is the target's argmax.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.typing import Array, Bool, Float, Int, UInt


class Sampling(struct.PyTreeNode):
    """Per-row decoding options, traced but for `greedy`: changing them compiles nothing."""

    temperature: Float[Array, " B"]
    """0 is greedy."""
    top_k: Int[Array, " B"]
    """0 keeps all tokens."""
    top_p: Float[Array, " B"]
    """1 keeps all tokens."""
    max_new_tokens: Int[Array, " B"]
    eos: Int[Array, " ids"]
    """Ids that end a row; pad with -1."""
    key_data: UInt[Array, "B 2"]
    """Data of one PRNG key a row, so that a request draws the same tokens whatever its neighbours
    are."""
    greedy: bool = struct.field(pytree_node=False, default=False)
    """All rows are at temperature 0, and nothing is drawn: a program of its own, of the same
    tokens. A choice on the device would hold up an accelerator at every block; and drawing costs a
    CPU as much as a small model."""

    @property
    def keys(self) -> Array:
        """Return one key a row. Not of the configured kind: under vmap, `rbg` draws all from the
        first row's."""
        return jax.random.wrap_key_data(self.key_data, impl="threefry2x32")


by_place = partial(jax.vmap, in_axes=-2, out_axes=-2)
"""Maps a function of [..., V] over the places of a block, [..., T, V]."""


def argmax(scores: Float[Array, "... V"]) -> Int[Array, " ..."]:
    """Return the first index of the largest score, by two plain reductions, which CPUs do several
    times faster."""
    size = scores.shape[-1]
    largest = scores == scores.max(-1, keepdims=True)
    return jnp.min(jnp.where(largest, jnp.arange(size, dtype=jnp.int32), size - 1), axis=-1)


def largest(
    scores: Float[Array, "... V"], count: int
) -> tuple[Float[Array, "... count"], Int[Array, "... count"]]:
    """Return the `count` largest scores in order and their indices; of equal ones the first comes
    first.

    A TPU sorts the whole vocabulary for `top_k`, and its compiler takes ten seconds for each sort:
    there the largest is taken `count` times.
    """

    def sort(scores: Array) -> tuple[Array, Array]:
        values, indices = jax.lax.top_k(scores, count)
        return values, indices

    return jax.lax.platform_dependent(
        scores, tpu=partial(taken_one_by_one, count=count), default=sort
    )


def taken_one_by_one(scores: Float[Array, "... V"], count: int) -> tuple[Array, Array]:
    """Return what `largest` does: the largest score, then the largest of the others, and so on."""

    def take(left: Array, _: None) -> tuple[Array, Array]:
        best = argmax(left)
        return jnp.where(jnp.arange(left.shape[-1]) == best[..., None], -jnp.inf, left), best

    # Only what was taken is below the least number, so that nothing is taken twice.
    finite = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    indices = jnp.moveaxis(jax.lax.scan(take, finite, length=count)[1], 0, -1)
    return jnp.take_along_axis(scores, indices, axis=-1), indices


def tempered(
    logits: Float[Array, "... B V"], temperature: Float[Array, " B"]
) -> Float[Array, "... B V"]:
    """Return softmax(logits / temperature) in float32; temperature 0 counts as 1, `filtered` makes
    it one-hot."""
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    logits = logits.astype(jnp.float32)
    # Their maximum goes first: at 1e-20 rounding of the large quotients would make their softmax
    # NaN.
    return jax.nn.softmax((logits - logits.max(-1, keepdims=True)) / scale, axis=-1)


def filtered(
    probs: Float[Array, "B V"], options: Sampling, best: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Return what top-k, then top-p leave, renormalised; rows at temperature 0 put all mass on
    token `best`."""
    warm, size = options.temperature > 0, probs.shape[-1]
    few = warm & (options.top_k > 0) & (options.top_k < size)
    probs = _narrowed(probs, few, jnp.ones_like(probs), options.top_k.astype(probs.dtype))
    probs = _narrowed(probs, warm & (options.top_p < 1), probs, options.top_p)
    greedy = jax.nn.one_hot(best, probs.shape[-1], dtype=probs.dtype)
    return jnp.where(warm[:, None], probs, greedy)


def distribution(logits: Float[Array, "B V"], options: Sampling) -> Float[Array, "B V"]:
    """Return what one model draws its next token from."""
    return filtered(tempered(logits, options.temperature), options, argmax(logits))


def mix(view_probs: Float[Array, "R B V"], weights: Float[Array, "B R"]) -> Float[Array, "B V"]:
    """Return what an ensemble of views says, sum_r w_r q_r (IbED, TABED Eq. 2), normalised.

    Tokens are drawn from it and accepted against it, so that it has to be one distribution to the
    last bit: it is no product of matrices, which accelerators round to fewer bits.
    """
    mixed = (view_probs * weights.T[..., None]).sum(0)
    return mixed / mixed.sum(-1, keepdims=True)


def _narrowed(
    probs: Float[Array, "B V"],
    rows: Bool[Array, " B"],
    sizes: Float[Array, "B V"],
    goal: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Keep, in these rows, the tokens that have less than `goal` in `sizes` before them,
    renormalised; the likeliest come first, equals by index.

    Nothing is sorted, which costs a CPU as much as a small model. The least probability that stays
    is found by bisection, bit by bit: floats from 0 to 2 are ordered as their bits are.
    """
    # The likeliest stays, even where top-p rounds to 0.
    aim = jnp.maximum(goal, jnp.finfo(jnp.float32).tiny)[:, None]

    def narrowed() -> Float[Array, "B V"]:
        bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

        def mass(which: Bool[Array, "B V"]) -> Float[Array, "B 1"]:
            return jnp.where(which, sizes, 0.0).sum(-1, keepdims=True)

        def halve(i: Array, least: Int[Array, "B 1"]) -> Int[Array, "B 1"]:
            tried = least | (1 << (29 - i))
            return jnp.where(mass(bits >= tried) >= aim, tried, least)

        least = jax.lax.fori_loop(0, 30, halve, jnp.zeros_like(bits[:, :1]))
        likelier, equal = bits > least, bits == least
        before = mass(likelier) + (jnp.cumsum(equal, axis=-1) - 1) * sizes
        kept = jnp.where(likelier | (equal & (before < aim)), probs, 0.0)
        # Row by row: a row that keeps all tokens must not be renormalised because of its
        # neighbours.
        return jnp.where(rows[:, None], kept / kept.sum(-1, keepdims=True), probs)

    return jax.lax.cond(jnp.any(rows), narrowed, lambda: probs)


def draw(keys: Array, weights: Float[Array, "B V"], greedy: Bool[Array, " B"]) -> Int[Array, " B"]:
    """Return one token a row, with probability proportional to its (unnormalised) weight.

    A token of weight 0 is never drawn. The weights of greedy rows have a single maximum, and that
    is drawn.
    """
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.log(weights))
    return jnp.where(greedy, argmax(weights), drawn).astype(jnp.int32)


def draw_siblings(
    keys: Array, probs: Float[Array, "B V"], mixed: Float[Array, "B V"], count: int
) -> Int[Array, "B count"]:
    """Return `count` different tokens a row, drawn one after another from `probs` without
    replacement.

    They are the largest of log probs + Gumbel noise, in order (Kool et al. 2019). Once `probs` has
    none left, as after the first at temperature 0, the likeliest of `mixed`, the unfiltered
    mixture, follow in order.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
    # In float32 no drawn token's score is below -110.
    scores = jnp.where(probs > 0, jnp.log(probs) + noise, jnp.log(mixed) - 256)
    return largest(scores, count)[1]


def fit_vocabulary(logits: Float[Array, "... V"], size: int) -> Float[Array, "... fitted"]:
    """Return a draft's logits over a target's vocabulary of `size`: padding never drawn, surplus
    ids cut."""
    have = logits.shape[-1]
    if have >= size:
        return logits[..., :size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, size - have)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)
