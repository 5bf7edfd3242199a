"""Learning from a teacher's distributions: divergences in nats, exact or over the teacher's k likeliest tokens.

Forward KL is Hinton et al. 2015 (arXiv 1503.02531); reverse KL and total variation distance are compared for drafts
by DistillSpec (arXiv 2310.08461). The probability that a drafted token is accepted is 1 - TVD (arXiv 2211.17192).
"""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxspec.errors import InputError
from jaxspec.typing import Array, Bool, Float, Int

Divergence = Literal["forward_kl", "reverse_kl", "tvd"]


def divergence(kind: Divergence, log_p: Float[Array, "... V"], log_q: Float[Array, "... V"]) -> Array:
    """How far the student's distribution q is from the teacher's p, both given as log-probabilities.

    forward_kl: sum p (log p - log q); reverse_kl: sum q (log q - log p); tvd: sum |p - q| / 2.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "tvd":
        return jnp.abs(p - q).sum(-1) / 2
    if kind == "forward_kl":
        return _expected(p, log_p, log_q)
    if kind == "reverse_kl":
        return _expected(q, log_q, log_p)
    raise InputError(f"divergence: {kind!r} is unknown; use one of {', '.join(get_args(Divergence))}")


def _expected(weight: Array, log_a: Array, log_b: Array) -> Array:
    """sum w (log a - log b), where what has no weight counts nothing, however unlikely."""
    counts = weight > 0
    # The inner `where` keeps infinities out of the gradient, which the outer one would multiply by 0.
    difference = jnp.where(counts, log_a, 0.0) - jnp.where(counts, log_b, 0.0)
    return jnp.where(counts, weight * difference, 0.0).sum(-1)


def top_k(log_p: Float[Array, "... V"], k: int) -> tuple[Int[Array, "... top"], Float[Array, "... top+1"]]:
    """A teacher's distribution in little space: its k likeliest tokens, and k + 1 log-probabilities, of each and
    of all others together."""
    likeliest, ids = jax.lax.top_k(log_p, k)
    return ids, jnp.concatenate([likeliest, _rest(likeliest)], axis=-1)


def coarsen(log_q: Float[Array, "... V"], ids: Int[Array, "... top"]) -> Float[Array, "... top+1"]:
    """The student's distribution over the teacher's k tokens and all others together.

    A divergence between the two is at most the exact one, and equal to it at 0.
    """
    chosen = jnp.take_along_axis(log_q, ids, axis=-1)
    return jnp.concatenate([chosen, _rest(chosen)], axis=-1)


def _rest(log_p: Float[Array, "... top"]) -> Float[Array, "... 1"]:
    """The log of what the k leave of 1; no less than float32 resolves."""
    left = 1.0 - jnp.exp(log_p).sum(-1, keepdims=True)
    return jnp.log(jnp.maximum(left, jnp.finfo(jnp.float32).eps))


def distillation_loss(
    logits: Float[Array, "B L V"],
    teacher: Float[Array, "B L teacher"],
    mask: Bool[Array, "B L"],
    kind: Divergence = "forward_kl",
    k: int | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Mean divergence of what student and teacher expect at the masked tokens, each from the position before it.

    Where one vocabulary is padded to be longer, only the words of both count. No gradient goes to the teacher.

    Args:
      k: compare over the teacher's k likeliest tokens and all others together; None: over all.

    Returns the loss, and with it `acceptance`, the mean of 1 - TVD: the share of tokens drawn from the student that
    verification would keep at temperature 1.
    """
    words = min(logits.shape[-1], teacher.shape[-1])
    log_q = jax.nn.log_softmax(logits[:, :-1, :words].astype(jnp.float32))
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher)[:, :-1, :words].astype(jnp.float32))
    weight = mask[:, 1:].astype(jnp.float32)
    total = jnp.maximum(weight.sum(), 1.0)
    acceptance = ((1 - divergence("tvd", log_p, log_q)) * weight).sum() / total
    if k is not None:
        ids, log_p = top_k(log_p, k)
        log_q = coarsen(log_q, ids)
    loss = (divergence(kind, log_p, log_q) * weight).sum() / total
    return loss, {"loss": loss, "acceptance": acceptance}
