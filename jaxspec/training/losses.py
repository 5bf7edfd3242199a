"""Compute losses in float32: masked means over tokens, a teacher's distributions, or blocks.

Forward KL is Hinton et al. 2015 (arXiv 1503.02531). DistillSpec (arXiv 2310.08461) compares reverse
KL and total variation distance for drafts. A drafted token is accepted with probability 1 - TVD
(arXiv 2211.17192), which LK losses raise (Samarin et al., arXiv 2602.23881).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxspec.decoding.drafting.mixtures import TINY
from jaxspec.typing import Array, Bool, Float, Int, Params

Divergence = Literal["forward_kl", "reverse_kl", "tvd"]
BlockLoss = Literal["kl", "ce", "reverse_kl", "tvd", "lk_alpha", "lk_lambda"]
"""Loss of a head at a token, of the target's distribution p and the head's q."""
LK_DECAY = 3.0
"""The eta of LK losses (their paper's section 4.2)."""
Metrics = dict[str, Float[Array, ""]]
Sums = dict[str, Any]
"""Metrics of a part of a batch. Those of all parts add up, pair by pair where two are a ratio."""


@dataclass(frozen=True)
class Loss:
    """Hold a mean loss that can be computed in parts of a batch, whose shares add up to it."""

    share: Callable[[Params, Any, Any], tuple[Float[Array, ""], Sums]]
    """(parameters, part, `count` of the whole batch) -> (the part's share of the loss, metrics)."""
    count: Callable[[Any], Any]
    """Batch -> the number of positions in each mean that the loss is made of."""

    def __call__(self, params: Params, batch: Any) -> tuple[Float[Array, ""], Metrics]:
        """Return the loss of a whole batch, and its metrics."""
        loss, sums = self.share(params, batch, self.count(batch))
        return loss, metrics_of(sums)


def mean_of_rows(loss_fn: Callable[[Params, Any], tuple[Array, Sums]]) -> Loss:
    """Return the loss of a function whose loss and metrics are means over rows."""

    def count(batch: Any) -> int:
        return len(jax.tree.leaves(batch)[0])

    def share(params: Params, part: Any, rows: int) -> tuple[Array, Sums]:
        return jax.tree.map(lambda mean: mean * (count(part) / rows), loss_fn(params, part))

    return Loss(share, count)


def metrics_of(sums: Sums) -> Metrics:
    """Return the metrics of a whole batch from their sums over its parts."""
    return {
        name: value[0] / jnp.maximum(value[1], 1) if isinstance(value, tuple) else value
        for name, value in sums.items()
    }


def next_token_loss(
    logits: Float[Array, "B L V"],
    tokens: Int[Array, "B L"],
    mask: Bool[Array, "B L"],
    count: Float[Array, ""],
) -> tuple[Float[Array, ""], Sums]:
    """Return the cross entropy of masked tokens, predicted one position before, and metrics."""
    return cross_entropy(logits[:, :-1], tokens[:, 1:], mask[:, 1:], count)


def cross_entropy(
    logits: Float[Array, "B K V"],
    labels: Int[Array, "B K"],
    mask: Bool[Array, "B K"],
    count: Float[Array, ""],
) -> tuple[Float[Array, ""], Sums]:
    """Return the cross entropy of the masked labels, and metrics.

    count: Masked labels of the whole batch, of which these may be a part.
    """
    weight, total = mask.astype(jnp.float32), jnp.maximum(count, 1.0)
    loss = (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weight).sum() / total
    accuracy = ((logits.argmax(-1) == labels) * weight).sum() / total
    return loss, {"loss": loss, "accuracy": accuracy, "tokens": weight.sum()}


def divergence(
    kind: Divergence, log_p: Float[Array, "... V"], log_q: Float[Array, "... V"]
) -> Array:
    """Return a divergence, in nats, of the student's distribution q from the teacher's p.

    forward_kl: sum p (log p - log q)
    reverse_kl: sum q (log q - log p); a token that p excludes costs 69 nats, not inf
    tvd: sum |p - q| / 2
    """
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    if kind == "tvd":
        return jnp.abs(p - q).sum(-1) / 2
    if kind == "forward_kl":
        return _expected_difference(p, log_p, log_q)
    return _expected_difference(q, log_q, jnp.where(jnp.isneginf(log_p), math.log(TINY), log_p))


def block_loss(
    kind: BlockLoss,
    p: Float[Array, "... V"],
    q: Float[Array, "... V"],
    labels: Int[Array, ...],
) -> tuple[Array, Array]:
    """Return the losses of a head's tokens, and the probabilities that they are accepted.

    ce: cross entropy of the labels
    kl, reverse_kl, tvd: as `divergence`
    lk_alpha: -log alpha, where alpha is the probability of acceptance
    lk_lambda: lambda KL + (1 - lambda) TVD, with lambda = exp(-3 alpha) of each token, fixed

    Args:
      p: Log-probabilities of the target, without a gradient.
      q: Log-probabilities of the head.
    """
    accepted = jnp.minimum(jnp.exp(p), jnp.exp(q)).sum(-1)
    if kind == "ce":
        return -jnp.take_along_axis(q, labels[..., None], axis=-1)[..., 0], accepted
    if kind == "tvd":
        return 1 - accepted, accepted
    if kind == "reverse_kl":
        return divergence(kind, p, q), accepted
    if kind == "lk_alpha":
        return -jnp.log(jnp.maximum(accepted, jnp.finfo(jnp.float32).tiny)), accepted
    kl = divergence("forward_kl", p, q)
    if kind == "kl":
        return kl, accepted
    share = jax.lax.stop_gradient(jnp.exp(-LK_DECAY * accepted))
    return share * kl + (1 - share) * (1 - accepted), accepted


def _expected_difference(weight: Array, log_a: Array, log_b: Array) -> Array:
    """Return sum w (log a - log b) over the tokens with a weight."""
    counts = weight > 0
    # The inner `where` keeps infinities out of the gradient: 0 * inf would be NaN.
    difference = jnp.where(counts, log_a, 0.0) - jnp.where(counts, log_b, 0.0)
    return jnp.where(counts, weight * difference, 0.0).sum(-1)


def top_k(
    log_p: Float[Array, "... V"], k: int
) -> tuple[Int[Array, "... top"], Float[Array, "... top+1"]]:
    """Return a teacher's k most probable tokens, and log-probabilities of these and of the rest."""
    largest, ids = jax.lax.top_k(log_p, k)
    return ids, jnp.concatenate([largest, _log_rest(largest)], axis=-1)


def coarsen(log_q: Float[Array, "... V"], ids: Int[Array, "... top"]) -> Float[Array, "... top+1"]:
    """Return the student's distribution over the teacher's k tokens and the rest.

    A divergence of the two is at most the exact one, and 0 if the exact one is.
    """
    log_top = jnp.take_along_axis(log_q, ids, axis=-1)
    return jnp.concatenate([log_top, _log_rest(log_top)], axis=-1)


def _log_rest(log_p: Float[Array, "... top"]) -> Float[Array, "... 1"]:
    """Return the log of the rest's probability, at least float32's resolution."""
    remainder = 1.0 - jnp.exp(log_p).sum(-1, keepdims=True)
    return jnp.log(jnp.maximum(remainder, jnp.finfo(jnp.float32).eps))


def distillation_loss(
    logits: Float[Array, "B L V"],
    teacher: Float[Array, "B L teacher"],
    mask: Bool[Array, "B L"],
    count: Float[Array, ""],
    kind: Divergence,
    k: int | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean divergence at the masked tokens, and the acceptance.

    The acceptance is the mean of 1 - TVD: the share of the student's samples that verification
    keeps at temperature 1. Only tokens of both vocabularies count. The teacher gets no gradient.

    Args:
      count: Masked tokens of the whole batch, of which these may be a part.
      k: Number of the teacher's most probable tokens to compare, next to the rest; None: all.
    """
    size = min(logits.shape[-1], teacher.shape[-1])
    log_q = jax.nn.log_softmax(logits[:, :-1, :size].astype(jnp.float32))
    log_p = jax.nn.log_softmax(jax.lax.stop_gradient(teacher)[:, :-1, :size].astype(jnp.float32))
    weight, total = mask[:, 1:].astype(jnp.float32), jnp.maximum(count, 1.0)
    acceptance = ((1 - divergence("tvd", log_p, log_q)) * weight).sum() / total
    if k is not None:
        ids, log_p = top_k(log_p, k)
        log_q = coarsen(log_q, ids)
    return (divergence(kind, log_p, log_q) * weight).sum() / total, acceptance


def draft_loss(
    score: Callable[[Any], Float[Array, "... V"]],
    drafted: Any,
    teacher: Float[Array, "B A J D"],
    labels: Int[Array, "B A J"],
    mask: Int[Array, "B A J"],
    kind: BlockLoss,
    weights: Sequence[float],
    score_teacher: Callable[[Array], Array],
    count: Float[Array, " J"],
) -> tuple[Float[Array, ""], Sums]:
    """Return the loss of blocks, the weighted mean over their places, and metrics.

    The output matrix scores one step of all blocks at a time, also in the backward pass, so J times
    fewer logits exist at once.

    Args:
      score: Output matrix, `drafted` to logits.
      drafted: The draft's hidden states, and what else its output matrix reads, each
        [B, A, J, ...].
      teacher: The target's hidden states at the same tokens.
      labels: Following tokens; -1, a token that the draft does not score, ends a block.
      mask: Tokens that count, from the beginning of a block.
      kind: Loss of a token; see `block_loss`.
      weights: Weight of each of the J places.
      score_teacher: The target's output matrix.
      count: `count_places` of the whole batch, of which these blocks may be a part.

    Metrics:
      acceptance: Probability that a sampled token is accepted, sum_v min(p, q).
      accuracy: Share of tokens whose most probable token is the target's.
      tokens_per_pass: Tokens per target pass of greedy, whole blocks from these anchors, with the
        correction or bonus token.
    """

    @jax.checkpoint
    def step(drafted: Any, teacher: Array, labels: Array, mask: Array) -> tuple[Array, ...]:
        q = jax.nn.log_softmax(score(drafted))
        p = jax.lax.stop_gradient(jax.nn.log_softmax(score_teacher(teacher)))
        loss, accepted = block_loss(kind, p, q, labels)
        agrees = (p.argmax(-1) == q.argmax(-1)) & (mask > 0)
        return (loss * mask).sum(), (accepted * mask).sum(), agrees

    learned = _learned_places(labels, mask)
    over = drafted, teacher, labels, learned.astype(jnp.float32)
    steps = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), over)
    losses, accepted, agrees = jax.lax.map(lambda xs: step(*xs), steps)
    each = losses / jnp.maximum(count, 1.0)
    weight = jnp.asarray(weights, jnp.float32) * (count > 0)
    loss = (weight * each).sum() / jnp.maximum(weight.sum(), 1e-9)
    whole = mask.prod(-1)
    runs = jnp.cumprod(agrees, axis=0).sum(0)
    total = jnp.maximum(count.sum(), 1.0)
    return loss, {
        "loss": loss,
        "tokens": count_places(labels, mask).sum(),
        "accuracy": agrees.sum() / total,
        "acceptance": accepted.sum() / total,
        "tokens_per_pass": (((1 + runs) * whole).sum(), whole.sum()),
    }


def count_places(labels: Int[Array, "B A J"], mask: Int[Array, "B A J"]) -> Float[Array, " J"]:
    """Count the tokens that blocks learn at each place; arguments as of `draft_loss`."""
    return _learned_places(labels, mask).sum((0, 1)).astype(jnp.float32)


def _learned_places(labels: Int[Array, "B A J"], mask: Int[Array, "B A J"]) -> Int[Array, "B A J"]:
    return mask * jnp.cumprod(labels >= 0, axis=-1)


def count_blocks(
    agree: Bool[Array, "B L"], mask: Bool[Array, "B L"], gamma: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the (tokens, blocks) of greedy speculative decoding of the masked answers, simulated.

    A block is a run of agreements, at most gamma, and the token that the target adds: while drafts
    are accepted, the draft reads exactly this row.

    # gamma = 2, agree 1 1 1 0 1: blocks 1 1 1 | 0 | 1, so 5 tokens in 3 blocks

    If the answers are the target's own greedy ones, tokens / blocks is the engine's
    `tokens_per_pass`, up to near-ties. The first token of an answer comes from prefill and
    is in no block. The last block may be short.

    Args:
      agree: Whether the draft, after the row up to t - 1, drafts token t.
      mask: Tokens of the answers.
    """
    # Tokens whose predecessor is in the same answer.
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
    """Return whether a greedy draft with these logits drafts token t after the row up to t - 1."""
    return jnp.pad(logits[:, :-1].argmax(-1) == tokens[:, 1:], ((0, 0), (1, 0)))
