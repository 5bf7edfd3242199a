"""How well mixtures of the views tell the target: what a weighting learns from, token by token.

A mixture is sum_r w_r q_r, q_r being view r's distribution. All distributions are at the row's temperature,
unfiltered, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling import argmax
from jaxspec.typing import Array, Float, Int

Measure = Literal["kl", "tvd", "misses"]
"""What a mixture costs at one place: KL(p || q_w) in nats; the L1 distance between p and q_w (the released code's,
twice the total variation); or 1 where the likeliest tokens of p and q_w differ, else 0."""

TINY = 1e-30
"""Probabilities are raised to it before their logarithm: a token that the draft rules out costs 69 nats, not inf."""

CHUNK = 11
"""Mixtures compared at a time: bounds the memory, and keeps an elementwise pass over them in a CPU's cache."""


def simplex_grid(views: int, steps: int) -> Float[np.ndarray, "C R"]:
    """All weights that are multiples of 1/steps, the first view's ascending, then the second's, and so on."""

    def counts(views: int, left: int) -> Iterator[tuple[int, ...]]:
        if views == 1:
            yield (left,)
            return
        for first in range(left + 1):
            for rest in counts(views - 1, left - first):
                yield (first, *rest)

    return np.asarray(list(counts(views, steps)), np.float32) / steps


def measure_mixtures(
    measures: Sequence[Measure],
    p: Float[Array, "B J V"],
    view_probs: Float[Array, "R B J V"],
    candidates: Float[Array, "C R"],
) -> Float[Array, "B J M C"]:
    """What each candidate's mixture costs at each place, by each measure."""
    costs = _gauge(measures, p)
    found = jax.lax.map(lambda w: costs(_mixture(view_probs, w)), candidates, batch_size=CHUNK)
    return jnp.moveaxis(found, 0, -1)


def measure_views(
    measures: Sequence[Measure], p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"]
) -> Float[Array, "B J M R"]:
    """What each view alone costs at each place, by each measure."""
    return jnp.moveaxis(_gauge(measures, p)(view_probs), 0, -1)


def responsibilities(
    p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"], weights: Float[Array, "B R"]
) -> Float[Array, "B J R"]:
    """E_p[q_r / q_w]: minus the gradient of KL(p || q_w) in w. Times w_r, the share of p that view r explains."""
    mixed = jnp.maximum(_mixture(view_probs, weights.T[..., None, None]), TINY)
    return jnp.moveaxis(_total(p / mixed * view_probs), 0, -1)


def acceptance_gradient(
    p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"], weights: Float[Array, "B R"]
) -> Float[Array, "B J R"]:
    """The gradient in w of sum_v min(p, q_w), the chance that a draft drawn from the mixture is accepted."""
    mixed = _mixture(view_probs, weights.T[..., None, None])
    return jnp.moveaxis(_total(jnp.where(mixed < p, view_probs, 0.0)), 0, -1)


def _gauge(
    measures: Sequence[Measure], p: Float[Array, "B J V"]
) -> Callable[[Float[Array, "*n B J V"]], Float[Array, "*n B J M"]]:
    """Return the function that tells what distributions cost at each place, by each measure."""
    best = argmax(p)
    log_p = jnp.log(jnp.maximum(p, TINY))

    def cost(measure: Measure, q: Float[Array, "*n B J V"]) -> Float[Array, "*n B J"]:
        if measure == "kl":
            return jnp.maximum(_total(p * (log_p - jnp.log(jnp.maximum(q, TINY)))), 0.0)
        if measure == "tvd":
            return _total(jnp.abs(p - q))
        rival = jnp.where(jnp.arange(q.shape[-1]) == best[..., None], -1.0, q).max(-1)
        return (_at(q, best) < rival).astype(jnp.float32)

    return lambda q: jnp.stack([cost(measure, q) for measure in measures], axis=-1)


def _mixture(view_probs: Float[Array, "R B J V"], weights: Float[Array, "R ..."]) -> Float[Array, "B J V"]:
    """sum_r w_r q_r; unrolled, so that XLA fuses it with what is made of it."""
    mixed = weights[0] * view_probs[0]
    for w, q in zip(weights[1:], view_probs[1:], strict=True):
        mixed = mixed + w * q
    return mixed


def _total(values: Float[Array, "... V"]) -> Float[Array, " ..."]:
    """The sum over the vocabulary, as a product with ones: XLA's CPU code for it and what goes into it is two to ten
    times as fast as for a plain sum, or for a product of the summands' factors (`results/cpu_passes/`)."""
    return jnp.matmul(values, jnp.ones(values.shape[-1]), precision="highest")


def _at(probs: Float[Array, "... B J V"], token: Int[Array, "B J"]) -> Float[Array, "... B J"]:
    index = jnp.broadcast_to(token[..., None], (*probs.shape[:-1], 1))
    return jnp.take_along_axis(probs, index, axis=-1)[..., 0]
