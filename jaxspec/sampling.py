"""Turn logits into the distributions that tokens are drawn from and accepted against.

Acceptance is lossless only if tokens are verified against the distribution that they were drawn
from: temperature first, then top-k, top-p, min-p and renormalisation, all in float32. For an
ensemble of views the filters apply to the *mixture*. A row at temperature 0 becomes one-hot. So
greedy decoding is a special case of rejection sampling: the draft is accepted exactly where it
equals the target's argmax, and the residual is the target's argmax.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.typing import Array, Bool, Float, Int, Shaped, UInt


class Biases(struct.PyTreeNode):
    """Hold K additions to the scores of each row's tokens."""

    tokens: Int[Array, "B K"]
    """Tokens that get the value."""
    values: Float[Array, "B K"]
    """-inf bans the token; 0 pads."""
    until: Int[Array, "B K"]
    """Number of first new tokens that it holds for."""
    prefix: Int[Array, "B K P"]
    """Tokens directly before, without which it does not hold; -1 is any, from the left."""


class Processors(struct.PyTreeNode):
    """Hold what changes scores by the tokens before them, see `decoding.processors`."""

    repetition: Float[Array, " B"]
    """1 changes nothing."""
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]
    min_p: Float[Array, " B"]
    """Minimum probability that sampling keeps, in units of the largest one."""
    biases: Biases
    ngram: Int[Array, " B"] | None
    """Size of n-grams that come once only, 0 for any; None if no row has one."""
    grammar: Int[Array, " B"] | None = None
    """Number of each row's `Grammar`, 0 for none; None if no row has one."""

    @property
    def reads_order(self) -> bool:
        """Return whether any of them reads the order of the tokens, and not only their counts."""
        return self.ngram is not None or self.biases.prefix.shape[-1] > 0

    @property
    def neutral(self) -> Bool[Array, " B"]:
        """Return for each row whether its scores stay as they are."""
        neutral = (self.repetition == 1) & (self.presence == 0) & (self.frequency == 0)
        neutral &= jnp.all(self.biases.values == 0, axis=-1)
        for numbers in (self.ngram, self.grammar):
            neutral = neutral if numbers is None else neutral & (numbers == 0)
        return neutral


class Sampling(struct.PyTreeNode):
    """Hold the options of each row. All except `greedy` and `logprobs` are traced."""

    temperature: Float[Array, " B"]
    """0 is greedy."""
    top_k: Int[Array, " B"]
    """0 keeps all tokens."""
    top_p: Float[Array, " B"]
    """1 keeps all tokens."""
    max_new_tokens: Int[Array, " B"]
    eos: Int[Array, " ids"] | None
    """Ids that end a row, the same for all; pad with -1. None while rows are exchanged."""
    key_data: UInt[Array, "B 2"]
    """Data of one PRNG key per row, so that a request's draws do not depend on its batch."""
    processors: Processors | None = None
    """None if no row has any, so that its program is that of scores as they are."""
    greedy: bool = struct.field(pytree_node=False, default=False)
    """Whether all rows are at temperature 0, so that a program without draws can write the same
    tokens. A choice on the device would delay an accelerator at every block, and drawing costs a
    CPU as much as a small model."""
    logprobs: int | None = struct.field(pytree_node=False, default=None)
    """Number of likeliest tokens to record with each new token; None records nothing."""

    @property
    def keys(self) -> Array:
        """Return one key per row.

        The kind is not the configured one, because `rbg` under vmap draws all rows from the first
        row's key.
        """
        return jax.random.wrap_key_data(self.key_data, impl="threefry2x32")

    def with_grammars(self, numbers: Int[Array, " B"] | None) -> Sampling:
        """Return the options with a grammar for each row, see `Processors`; with None, without."""
        if self.processors is None:
            return self
        return self.replace(processors=self.processors.replace(grammar=numbers))


by_place = partial(jax.vmap, in_axes=-2, out_axes=-2)
"""Map a function of [..., V] over the places of a block, [..., T, V]."""


def argmax(scores: Shaped[Array, "... V"]) -> Int[Array, " ..."]:
    """Return the first index of the largest score.

    Two plain reductions are several times faster on CPUs than `jnp.argmax`.
    """
    size = scores.shape[-1]
    largest = scores == scores.max(-1, keepdims=True)
    return jnp.min(jnp.where(largest, jnp.arange(size, dtype=jnp.int32), size - 1), axis=-1)


def largest(
    scores: Float[Array, "... V"], count: int
) -> tuple[Float[Array, "... count"], Int[Array, "... count"]]:
    """Return the `count` largest scores in order, equal ones by index, and their indices.

    A TPU would sort the whole vocabulary for `top_k`, and its compiler takes ten seconds for each
    sort. So there the largest score is taken `count` times.
    """

    def sort(scores: Array) -> tuple[Array, Array]:
        values, indices = jax.lax.top_k(scores, count)
        return values, indices

    return jax.lax.platform_dependent(
        scores, tpu=partial(largest_without_sort, count=count), default=sort
    )


def largest_without_sort(scores: Float[Array, "... V"], count: int) -> tuple[Array, Array]:
    """Return what `largest` returns: take the largest score, then the largest of the others, ..."""

    def take(scores: Array, _: None) -> tuple[Array, Array]:
        best = argmax(scores)
        return jnp.where(jnp.arange(scores.shape[-1]) == best[..., None], -jnp.inf, scores), best

    # Only taken scores are below the least number, so no score is taken twice.
    finite = jnp.maximum(scores, jnp.finfo(scores.dtype).min)
    indices = jnp.moveaxis(jax.lax.scan(take, finite, length=count)[1], 0, -1)
    return jnp.take_along_axis(scores, indices, axis=-1), indices


def tempered(
    logits: Float[Array, "... B V"], temperature: Float[Array, " B"]
) -> Float[Array, "... B V"]:
    """Return softmax(logits / temperature) in float32.

    Temperature 0 counts as 1 here; `filtered` makes such rows one-hot.
    """
    scale = jnp.where(temperature > 0, temperature, 1.0)[:, None]
    logits = logits.astype(jnp.float32)
    # The maximum is subtracted before the division: at temperature 1e-20 the rounding of the large
    # quotients would make their softmax NaN.
    return jax.nn.softmax((logits - logits.max(-1, keepdims=True)) / scale, axis=-1)


def filtered(
    probs: Float[Array, "B V"], options: Sampling, best: Int[Array, " B"]
) -> Float[Array, "B V"]:
    """Apply top-k, top-p, then min-p, and renormalise.

    Rows at temperature 0 become one-hot at `best`.
    """
    warm, size = options.temperature > 0, probs.shape[-1]
    few = warm & (options.top_k > 0) & (options.top_k < size)
    probs = _narrowed(probs, few, jnp.ones_like(probs), options.top_k.astype(probs.dtype))
    probs = _narrowed(probs, warm & (options.top_p < 1), probs, options.top_p)
    if options.processors is not None:
        least = options.processors.min_p[:, None]
        likeliest = jnp.where(probs >= least * probs.max(-1, keepdims=True), probs, 0.0)
        probs = jnp.where(least > 0, likeliest / likeliest.sum(-1, keepdims=True), probs)
    greedy = jax.nn.one_hot(best, probs.shape[-1], dtype=probs.dtype)
    return jnp.where(warm[:, None], probs, greedy)


def distribution(logits: Float[Array, "B V"], options: Sampling) -> Float[Array, "B V"]:
    """Return the distribution that one model draws its next token from."""
    return filtered(tempered(logits, options.temperature), options, argmax(logits))


def mix(view_probs: Float[Array, "R B V"], weights: Float[Array, "B R"]) -> Float[Array, "B V"]:
    """Return the mixture of the views, sum_r w_r q_r (IbED, TABED Eq. 2), normalised.

    Tokens are drawn from the mixture and accepted against it, so both must use one distribution, to
    the last bit. So the sum is no matrix product, which accelerators round to fewer bits.
    """
    mixed = (view_probs * weights.T[..., None]).sum(0)
    return mixed / mixed.sum(-1, keepdims=True)


def _narrowed(
    probs: Float[Array, "B V"],
    rows: Bool[Array, " B"],
    sizes: Float[Array, "B V"],
    goal: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """Keep the likeliest tokens of these rows until their `sizes` sum to `goal`, and renormalise.

    Equally likely tokens count in the order of their indices. A sort would cost a CPU as much as a
    small model. Instead, bisection finds the least probability that stays, bit by bit, because
    floats from 0 to 2 have the order of their bits.
    """
    # The likeliest token stays, even if top-p rounds to 0.
    aim = jnp.maximum(goal, jnp.finfo(jnp.float32).tiny)[:, None]

    def narrowed() -> Float[Array, "B V"]:
        """Find the smallest probability that is kept, bit by bit, and renormalise."""
        bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

        def mass(which: Bool[Array, "B V"]) -> Float[Array, "B 1"]:
            return jnp.where(which, sizes, 0.0).sum(-1, keepdims=True)

        # Top-k 2 of 0.5, 0.3, 0.2: a bit of `least` is set while two tokens have at least `tried`,
        # so it ends as the bits of 0.3.
        def halve(i: Array, least: Int[Array, "B 1"]) -> Int[Array, "B 1"]:
            tried = least | (1 << (29 - i))
            return jnp.where(mass(bits >= tried) >= aim, tried, least)

        least = jax.lax.fori_loop(0, 30, halve, jnp.zeros_like(bits[:, :1]))
        likelier, equal = bits > least, bits == least
        before = mass(likelier) + (jnp.cumsum(equal, axis=-1) - 1) * sizes
        likeliest = jnp.where(likelier | (equal & (before < aim)), probs, 0.0)
        # A row that keeps all tokens must not be renormalised because of its neighbours.
        return jnp.where(rows[:, None], likeliest / likeliest.sum(-1, keepdims=True), probs)

    return jax.lax.cond(jnp.any(rows), narrowed, lambda: probs)


def draw(keys: Array, weights: Float[Array, "B V"], greedy: Bool[Array, " B"]) -> Int[Array, " B"]:
    """Draw one token per row, with probability proportional to its weight.

    Weights need not sum to 1, and a token of weight 0 is never drawn. Greedy rows have a single
    largest weight, whose token is drawn.
    """
    tokens = jax.vmap(jax.random.categorical)(keys, jnp.log(weights))
    return jnp.where(greedy, argmax(weights), tokens).astype(jnp.int32)


def draw_siblings(
    keys: Array, probs: Float[Array, "B V"], mixed: Float[Array, "B V"], count: int
) -> Int[Array, "B count"]:
    """Draw `count` different tokens per row from `probs`, one after another, without replacement.

    They are the largest of log probs + Gumbel noise, in order (Kool et al. 2019). Where `probs` has
    too few tokens, as at temperature 0, the likeliest of the unfiltered mixture `mixed` follow.
    """
    noise = jax.vmap(lambda key: jax.random.gumbel(key, probs.shape[1:]))(keys)
    # In float32 no drawn token's score is below -110.
    scores = jnp.where(probs > 0, jnp.log(probs) + noise, jnp.log(mixed) - 256)
    return largest(scores, count)[1]


def fit_vocabulary(logits: Float[Array, "... V"], size: int) -> Float[Array, "... fitted"]:
    """Return a draft's logits over a target's vocabulary of `size`.

    Surplus ids are cut, and missing ones get -inf, so that they are never drawn.
    """
    have = logits.shape[-1]
    if have >= size:
        return logits[..., :size]
    pad = [(0, 0)] * (logits.ndim - 1) + [(0, size - have)]
    return jnp.pad(logits, pad, constant_values=-jnp.inf)
