"""Losses in float32, as masked means over the positions that count."""

from __future__ import annotations

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
