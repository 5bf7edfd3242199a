"""Losses in float32, as masked means over the positions that count: of tokens, of a teacher's distributions, of blocks.

Forward KL is Hinton et al. 2015 (arXiv 1503.02531); reverse KL and total variation distance are compared for drafts
by DistillSpec (arXiv 2310.08461). The probability that a drafted token is accepted is 1 - TVD (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import optax

from jaxspec.errors import InputError
from jaxspec.typing import Array, Bool, Float, Int

Divergence = Literal["forward_kl", "reverse_kl", "tvd"]
Metrics = dict[str, Float[Array, ""]]


def next_token_loss(
    logits: Float[Array, "B L V"], tokens: Int[Array, "B L"], mask: Bool[Array, "B L"]
) -> tuple[Float[Array, ""], Metrics]:
    """Cross entropy (nats) of the masked tokens, each predicted from the position before it; accuracy; `tokens`."""
    logits, labels = logits[:, :-1], tokens[:, 1:]
    weight = mask[:, 1:].astype(jnp.float32)
    count = weight.sum()
    total = jnp.maximum(count, 1.0)
    loss = (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight).sum() / total
    accuracy = ((logits.argmax(-1) == labels) * weight).sum() / total
    return loss, {"loss": loss, "accuracy": accuracy, "tokens": count}


def divergence(
    kind: Divergence, log_p: Float[Array, "... V"], log_q: Float[Array, "... V"]
) -> Array:
    """Return how far, in nats, the student's distribution q is from the teacher's p, both given as log-probabilities.

    forward_kl: sum p (log p - log q); reverse_kl: sum q (log q - log p); tvd: sum |p - q| / 2.
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "tvd":
        return jnp.abs(p - q).sum(-1) / 2
    if kind == "forward_kl":
        return _expected(p, log_p, log_q)
    if kind == "reverse_kl":
        return _expected(q, log_q, log_p)
    raise InputError(
        f"divergence: {kind!r} is unknown; use one of {', '.join(get_args(Divergence))}"
    )


def _expected(weight: Array, log_a: Array, log_b: Array) -> Array:
    """sum w (log a - log b), where what has no weight counts nothing, however unlikely."""
    counts = weight > 0
    # The inner `where` keeps infinities out of the gradient, which the outer one would multiply by 0.
    difference = jnp.where(counts, log_a, 0.0) - jnp.where(counts, log_b, 0.0)
    return jnp.where(counts, weight * difference, 0.0).sum(-1)


def top_k(
    log_p: Float[Array, "... V"], k: int
) -> tuple[Int[Array, "... top"], Float[Array, "... top+1"]]:
    """Return a teacher's distribution in little space: its k most probable tokens, and k + 1 log-probabilities, of each
    and of all others together."""
    largest, ids = jax.lax.top_k(log_p, k)
    return ids, jnp.concatenate([largest, _rest(largest)], axis=-1)


def coarsen(log_q: Float[Array, "... V"], ids: Int[Array, "... top"]) -> Float[Array, "... top+1"]:
    """Return the student's distribution over the teacher's k tokens and all others together.

    A divergence between the two is at most the exact one, and equal to it at 0.
    """
    chosen = jnp.take_along_axis(log_q, ids, axis=-1)
    return jnp.concatenate([chosen, _rest(chosen)], axis=-1)


def _rest(log_p: Float[Array, "... top"]) -> Float[Array, "... 1"]:
    """Return the log of what the k leave of 1; no less than float32 resolves."""
    left = 1.0 - jnp.exp(log_p).sum(-1, keepdims=True)
    return jnp.log(jnp.maximum(left, jnp.finfo(jnp.float32).eps))


def distillation_loss(
    logits: Float[Array, "B L V"],
    teacher: Float[Array, "B L teacher"],
    mask: Bool[Array, "B L"],
    kind: Divergence = "forward_kl",
    k: int | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return mean divergence of what student and teacher expect at the masked tokens, each from the position before it.

    Where one vocabulary is padded to be longer, only the words of both count. No gradient goes to the teacher.

    Args:
      k: compare over the teacher's k most probable tokens and all others together; None: over all.

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


def draft_loss(
    score: Callable[[Float[Array, "... D"]], Float[Array, "... V"]],
    drafted: Float[Array, "B A J D"],
    teacher: Float[Array, "B A J D"],
    labels: Int[Array, "B A J"],
    mask: Int[Array, "B A J"],
    soft: bool,
    decay: float,
) -> tuple[Float[Array, ""], Metrics]:
    """Loss of blocks of drafted tokens: sum_s decay^s mean(loss at step s), over the sum of the weights.

    The output head runs over one step of all blocks at a time, and again in the backward pass: J times fewer logits
    exist at once.

    Args:
      score: the output head, hidden states to logits.
      drafted, teacher: hidden states of draft and target at the same tokens.
      labels: the tokens that follow; -1 where they are not scored, so that no block goes on behind them.
      mask: which of them count; within a block, a run from its beginning.
      soft: KL(target || draft) in nats; else cross entropy of the labels.

    Metrics: `acceptance`, the chance that a drawn token is accepted (sum_v min(p, q)); `accuracy`, how often both have
    the same most probable token; `tokens_per_block`, tokens per target pass that greedy blocks from these places would
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

    learned = mask * jnp.cumprod(labels >= 0, axis=-1)
    over = (jnp.moveaxis(x, 2, 0) for x in (drafted, teacher, labels, learned.astype(jnp.float32)))
    losses, accepted, agrees = jax.lax.map(lambda xs: step(*xs), tuple(over))
    count = learned.sum((0, 1)).astype(jnp.float32)
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


def count_blocks(
    agree: Bool[Array, "B L"], mask: Bool[Array, "B L"], gamma: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(tokens, blocks) that greedy speculative decoding would take to write the masked answers, without decoding.

    `agree[b, t]` says that the draft, shown the row up to t - 1, would have drafted token t. As long as drafts are
    accepted the draft has seen exactly that row, so that a block is a run of agreements, cut at gamma, and the token
    that the target adds to it. Example, gamma 2 and `agree` 1 1 1 0 1: blocks 1 1 1 | 0 | 1, so 5 tokens in 3 blocks.
    The sum over rows is exact where the answers are the target's own greedy ones: `tokens / blocks` is then
    `tokens_per_pass` of the engine, up to near-ties of the draft's logits.

    The first token of every answer comes from prefill and belongs to no block; a last block may be cut short.
    """
    # Tokens whose predecessor is of the same answer.
    drafted = mask & jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]

    def step(accepted: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        right, live = at
        closes = (accepted == gamma) | ~right
        opens = live & (accepted == 0)
        return jnp.where(live & ~closes, accepted + 1, 0), opens

    none = jnp.zeros(agree.shape[0], jnp.int32)
    _, opens = jax.lax.scan(step, none, (agree.T, drafted.T))
    return drafted.sum(), opens.sum()


def agreement(logits: Float[Array, "B L V"], tokens: Int[Array, "B L"]) -> Bool[Array, "B L"]:
    """Return whether a draft with these logits would have drafted token t, greedily, after the row up to t - 1."""
    return jnp.pad(logits[:, :-1].argmax(-1) == tokens[:, 1:], ((0, 0), (1, 0)))
