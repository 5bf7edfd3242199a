"""Measure how well mixtures of the views predict the target at each place of a block.

A mixture is sum_r w_r q_r, with q_r the distribution of view r. All distributions are at the row's
temperature, unfiltered, in float32.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling import argmax
from jaxspec.typing import Array, Float

Measure = Literal["kl", "tvd", "misses", "sampled"]
"""Cost of a mixture q_w = sum_r w_r q_r at one place: KL(p || q_w) in nats; the L1 distance between
p and q_w (as in the released code, twice the total variation); 1 if the likeliest tokens of p and
q_w differ, else 0; or the chance that tokens drawn from p and from q_w differ."""

Measures = tuple[Measure, ...]

TINY = 1e-30
"""Minimum probability in a logarithm: a token that the draft excludes costs 69 nats, not inf."""

CHUNK = 11
"""Mixtures compared at once, which bounds the memory and keeps them in a CPU's cache."""


def simplex_grid(views: int, steps: int) -> Float[np.ndarray, "points R"]:
    """Return all weights that are multiples of 1/steps, in ascending order of the first view's.

    Two views and two steps give [[0, 1], [0.5, 0.5], [1, 0]].
    """
    cuts = np.asarray(list(combinations_with_replacement(range(steps + 1), views - 1)))
    return np.diff(cuts, prepend=0, append=steps).astype(np.float32) / steps


def costs(
    measures: Measures, p: Float[Array, "B J V"], q: Float[Array, "*points B J V"]
) -> Float[Array, "*points B J measures"]:
    """Return the cost of the distributions `q` at each place, by each measure."""
    best = argmax(p)
    log_p = jnp.log(jnp.maximum(p, TINY))

    def cost(measure: Measure) -> Float[Array, "*points B J"]:
        if measure == "kl":
            return jnp.maximum(total(p * (log_p - jnp.log(jnp.maximum(q, TINY)))), 0.0)
        if measure == "tvd":
            return total(jnp.abs(p - q))
        if measure == "sampled":
            return 1 - total(p * q)
        at_best = jnp.broadcast_to(best[..., None], (*q.shape[:-1], 1))
        rival = jnp.where(jnp.arange(q.shape[-1]) == best[..., None], -1.0, q).max(-1)
        return (jnp.take_along_axis(q, at_best, axis=-1)[..., 0] < rival).astype(jnp.float32)

    return jnp.stack([cost(measure) for measure in measures], axis=-1)


def view_costs(
    measures: Measures, p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"]
) -> Float[Array, "B J measures R"]:
    """Return the cost of each view by itself."""
    return jnp.moveaxis(costs(measures, p, view_probs), 0, -1)


def mixture_costs(
    measures: Measures,
    p: Float[Array, "B J V"],
    view_probs: Float[Array, "R B J V"],
    weights: Float[Array, "points R"],
) -> Float[Array, "B J measures points"]:
    """Return the cost of the mixture at each of the points."""
    by_point = jax.lax.map(
        lambda w: costs(measures, p, mixture(view_probs, w)), weights, batch_size=CHUNK
    )
    return jnp.moveaxis(by_point, 0, -1)


def mixture(
    view_probs: Float[Array, "R B J V"], weights: Float[Array, "R ..."]
) -> Float[Array, "B J V"]:
    """Return sum_r w_r q_r, unrolled so that XLA fuses it with its consumers."""
    mixed = weights[0] * view_probs[0]
    for w, q in zip(weights[1:], view_probs[1:], strict=True):
        mixed = mixed + w * q
    return mixed


def total(values: Float[Array, "... V"]) -> Float[Array, " ..."]:
    """Return the sum over the vocabulary, as a product with ones.

    XLA's CPU code for it, fused with its inputs, is two to ten times as fast as for a plain sum
    (`results/cpu_passes/`).
    """
    return jnp.matmul(values, jnp.ones(values.shape[-1]), precision="highest")
