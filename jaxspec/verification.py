"""Accept rules: which drafted tokens stand, and which token follows them.

Leviathan et al. 2023, Algorithm 1: the draft token x, drawn from q, stands with probability min(1, p(x)/q(x));
the first that falls is replaced by a draw from the residual norm(max(0, p - q)). The outcome is distributed
exactly as p. With one-hot p and q (temperature 0) this is greedy matching.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.sampling import draw
from jaxspec.typing import Array, Bool, Float, Int


class Draft(struct.PyTreeNode):
    """A block of J proposed tokens a row."""

    tokens: Int[Array, "B J"]
    probs: Float[Array, "B J V"]
    """The very distributions that the tokens were drawn from (for an ensemble, the mixture)."""
    view_probs: Float[Array, "R B J V"]
    """Each view's own distribution at temperature; what a weighting learns from."""


class Verdict(struct.PyTreeNode):
    """How many drafted tokens of each row stand, and the token after them (correction or bonus)."""

    count: Int[Array, " B"]
    next_token: Int[Array, " B"]


def rejection(p: Float[Array, "B J+1 V"], draft: Draft, keys: Array, greedy: Bool[Array, " B"]) -> Verdict:
    """Verifies a chain against the target's distributions at the J drafted places and the one after them."""
    length = draft.tokens.shape[1]
    accept_keys, next_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
    chosen = draft.tokens[..., None]
    p_x = jnp.take_along_axis(p[:, :length], chosen, axis=-1)[..., 0]
    q_x = jnp.take_along_axis(draft.probs, chosen, axis=-1)[..., 0]
    u = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(accept_keys)
    stands = jnp.cumprod(u * q_x < p_x, axis=1, dtype=jnp.int32)
    count = stands.sum(axis=1)
    at = count[:, None, None]
    p_next = jnp.take_along_axis(p, at, axis=1)[:, 0]
    q_next = jnp.take_along_axis(draft.probs, jnp.minimum(at, length - 1), axis=1)[:, 0]
    return Verdict(count, draw(next_keys, _residual(p_next, q_next, count == length), greedy))


def _residual(p: Array, q: Array, bonus: Array) -> Array:
    """max(0, p - q), unnormalised; p itself where no draft token stood against it, or where rounding left nothing."""
    left = jnp.maximum(p - q, 0.0)
    whole = bonus | (left.sum(-1) <= 0)
    return jnp.where(whole[:, None], p, left)
