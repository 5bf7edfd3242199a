"""Distillation losses equal sums written out in numpy float64, and keep their bounds."""

from __future__ import annotations

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.losses import (
    BlockLoss,
    block_loss,
    coarsen,
    distillation_loss,
    divergence,
    top_k,
)

KINDS = ("forward_kl", "reverse_kl", "tvd")
RNG = np.random.default_rng(0)
STUDENT, TEACHER = RNG.normal(size=(2, 6, 9)) * 2, RNG.normal(size=(2, 6, 11)) * 2
MASK = RNG.random((2, 6)) < 0.6
COUNT = MASK[:, 1:].sum(dtype=np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def reference(kind: str, p: np.ndarray, q: np.ndarray) -> float:
    if kind == "tvd":
        return float(np.maximum(p - q, 0).sum())
    a, b = (p, q) if kind == "forward_kl" else (q, p)
    return float(sum(x * np.log(x / y) for x, y in zip(a, b)))


def logs(*logits: np.ndarray) -> list[jax.Array]:
    return [jax.nn.log_softmax(jnp.asarray(part, jnp.float32)) for part in logits]


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_mean_over_masked_tokens_and_shared_words(kind) -> None:
    loss, acceptance = distillation_loss(
        jnp.asarray(STUDENT), jnp.asarray(TEACHER), jnp.asarray(MASK), COUNT, kind
    )
    places = [(b, t) for b in range(2) for t in range(5) if MASK[b, t + 1]]
    pairs = [(softmax(TEACHER[b, t, :9]), softmax(STUDENT[b, t])) for b, t in places]
    assert float(loss) == pytest.approx(
        np.mean([reference(kind, p, q) for p, q in pairs]), rel=1e-5
    )
    kept = np.mean([np.minimum(p, q).sum() for p, q in pairs])
    assert float(acceptance) == pytest.approx(kept, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_a_lower_bound_and_exact_when_it_holds_all(kind) -> None:
    log_p, log_q = logs(TEACHER[..., :9], STUDENT)
    exact = divergence(kind, log_p, log_q)
    bounds = []
    for k in (1, 4, 8):
        ids, compressed = top_k(log_p, k)
        assert compressed.shape == (2, 6, k + 1)
        np.testing.assert_allclose(jnp.exp(compressed).sum(-1), 1, rtol=1e-5)
        bounds.append(divergence(kind, compressed, coarsen(log_q, ids)))
    assert (bounds[0] <= bounds[1] + 1e-5).all()
    assert (bounds[1] <= exact + 1e-5).all()
    np.testing.assert_allclose(bounds[2], exact, rtol=1e-3, atol=1e-4)  # 8 tokens and the one other


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_divergence_where_a_teacher_excludes_words(kind) -> None:
    teacher = np.where(np.arange(9) < 4, TEACHER[..., :9], -1e9)

    def loss(student: jax.Array) -> jax.Array:
        return distillation_loss(student, jnp.asarray(teacher), jnp.asarray(MASK), COUNT, kind)[0]

    p, q = softmax(teacher), softmax(STUDENT)
    log_p = teacher - teacher.max(-1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    by_q = {"forward_kl": -p / q, "reverse_kl": np.log(q) - log_p + 1, "tvd": np.sign(q - p) / 2}[
        kind
    ]
    expected = q * (by_q - (by_q * q).sum(-1, keepdims=True)) / MASK[:, 1:].sum()
    expected *= np.pad(MASK[:, 1:], ((0, 0), (0, 1)))[..., None]
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(STUDENT)), expected, rtol=1e-4, atol=1e-6)


def test_words_that_neither_model_may_say_cost_nothing() -> None:
    p, q = (
        jnp.where(jnp.arange(9) < 4, part, -jnp.inf) for part in logs(TEACHER[..., :9], STUDENT)
    )
    for kind in get_args(BlockLoss):
        loss, slope = jax.value_and_grad(
            lambda q, kind=kind: block_loss(kind, p, q, jnp.zeros((2, 6), int))[0].sum()
        )(q)
        few = block_loss(kind, p[..., :4], q[..., :4], jnp.zeros((2, 6), int))[0].sum()
        assert float(loss) == pytest.approx(float(few), rel=1e-6), kind
        assert jnp.isfinite(slope).all(), kind


@pytest.mark.parametrize("excluded", [-np.inf, np.log(1e-30)])
def test_reverse_kl_stays_finite_where_the_teacher_has_no_probability(excluded: float) -> None:
    """Reverse KL stays finite where the teacher has no probability, as of a teacher with
    `known_tokens`, whose other tokens have the score -inf.
    """
    log_p, log_q = logs(TEACHER[..., :9], STUDENT)
    p = jnp.where(jnp.arange(9) < 4, log_p, excluded)

    def loss(q: jax.Array) -> jax.Array:
        return block_loss("reverse_kl", p, jax.nn.log_softmax(q), jnp.zeros((2, 6), int))[0].sum()

    value, slope = jax.value_and_grad(loss)(log_q)
    known = np.arange(9) < 4
    floored = np.where(known, np.asarray(log_p, np.float64), np.log(1e-30))
    q = softmax(STUDENT)
    assert float(value) == pytest.approx((q * (np.log(q) - floored)).sum(), rel=1e-5)
    assert jnp.isfinite(slope).all()
    assert (slope[..., 4:].sum(-1) > 0).all()  # excluded tokens become less probable


def test_no_gradient_goes_to_the_teacher() -> None:
    student, mask = jnp.asarray(STUDENT), jnp.asarray(MASK)
    gradient = jax.grad(
        lambda teacher: distillation_loss(student, teacher, mask, COUNT, "forward_kl")[0]
    )
    np.testing.assert_array_equal(gradient(jnp.asarray(TEACHER)), 0)
