"""Losses in float32, as masked means over the positions that count."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxspec.typing import Array, Bool, Float, Int


def next_token_loss(
    logits: Float[Array, "B L V"], tokens: Int[Array, "B L"], mask: Bool[Array, "B L"]
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross entropy (nats) of the masked tokens, each predicted from the position before it; accuracy; `tokens`."""
    logits, labels = logits[:, :-1], tokens[:, 1:]
    weight = mask[:, 1:].astype(jnp.float32)
    count = weight.sum()
    total = jnp.maximum(count, 1.0)
    loss = (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight).sum() / total
    accuracy = ((logits.argmax(-1) == labels) * weight).sum() / total
    return loss, {"loss": loss, "accuracy": accuracy, "tokens": count}


def draft_loss(
    score: Callable[[Float[Array, "... D"]], Float[Array, "... V"]],
    drafted: Float[Array, "B A J D"],
    teacher: Float[Array, "B A J D"],
    labels: Int[Array, "B A J"],
    mask: Int[Array, "B A J"],
    soft: bool,
    decay: float,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Loss of blocks of drafted tokens: sum_s decay^s mean(loss at step s), over the sum of the weights.

    The output head runs over one step of all blocks at a time, and again in the backward pass: J times fewer logits
    exist at once.

    Args:
      score: the output head, hidden states to logits.
      drafted, teacher: hidden states of draft and target at the same tokens.
      labels: the tokens that follow.
      mask: which of them count; within a block, a run from its beginning.
      soft: KL(target || draft) in nats; else cross entropy of the labels.

    Metrics: `acceptance`, the chance that a drawn token is accepted (sum_v min(p, q)); `accuracy`, how often both have
    the same likeliest token; `tokens_per_block`, tokens per target pass that greedy blocks from these places would
    have, the correction or bonus token counted, over the blocks that are whole.
    """

    @jax.checkpoint
    def step(drafted: Array, teacher: Array, labels: Array, mask: Array) -> tuple[Array, ...]:
        q = jax.nn.log_softmax(score(drafted))
        p = jax.lax.stop_gradient(jax.nn.log_softmax(score(teacher)))
        named = jnp.take_along_axis(q, labels[..., None], axis=-1)[..., 0]
        loss = (jnp.exp(p) * (p - q)).sum(-1) if soft else -named
        accepted = jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(-1)
        agrees = (p.argmax(-1) == q.argmax(-1)) & (mask > 0)
        return (loss * mask).sum(), (accepted * mask).sum(), agrees

    over = (jnp.moveaxis(x, 2, 0) for x in (drafted, teacher, labels, mask.astype(jnp.float32)))
    losses, accepted, agrees = jax.lax.map(lambda xs: step(*xs), tuple(over))
    count = mask.sum((0, 1)).astype(jnp.float32)
    each = losses / jnp.maximum(count, 1.0)
    weights = decay ** jnp.arange(len(each)) * (count > 0)
    loss = (weights * each).sum() / jnp.maximum(weights.sum(), 1e-9)
    whole = mask.prod(-1)
    runs = jnp.cumprod(agrees, axis=0).sum(0)
    total = jnp.maximum(count.sum(), 1.0)
    return loss, {
        "loss": loss,
        "tokens": count.sum(),
        "accuracy": agrees.sum() / total,
        "acceptance": accepted.sum() / total,
        "tokens_per_block": 1 + (runs * whole).sum() / jnp.maximum(whole.sum(), 1),
    }
