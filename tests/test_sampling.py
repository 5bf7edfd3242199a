"""The distributions that tokens are drawn from equal an independent numpy version and transformers'
own filters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxspec.sampling import (
    Sampling,
    argmax,
    distribution,
    draw,
    draw_siblings,
    filtered,
    largest,
    largest_without_sort,
    mix,
    tempered,
)
from tests.tiny.oracles import (
    clear_of_the_cut,
    goodness_of_fit,
    numpy_distribution,
    numpy_filtered,
    numpy_softmax,
)

B, V = 4, 13

seeds = st.integers(0, 2**32 - 1)
temperatures = st.lists(st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]), min_size=B, max_size=B)
ks = st.lists(st.integers(0, V + 2), min_size=B, max_size=B)
ps = st.lists(st.sampled_from([0.01, 0.3, 0.5, 0.8, 0.95, 1.0]), min_size=B, max_size=B)

jit_distribution = jax.jit(distribution)
jit_mixture = jax.jit(lambda mixed, options: filtered(mixed, options, argmax(mixed)))
jit_draw = jax.jit(draw)
jit_siblings = jax.jit(draw_siblings, static_argnums=3)


def options(temperature: list[float], top_k: list[int], top_p: list[float]) -> Sampling:
    batch = len(temperature)
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.asarray(top_k, jnp.int32),
        top_p=jnp.asarray(top_p, jnp.float32),
        max_new_tokens=jnp.full(batch, 9),
        eos=jnp.asarray([-1]),
        key_data=jax.random.key_data(jax.random.split(jax.random.key(0), batch)),
    )


def random_logits(seed: int, batch: int = B) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (batch, V)).astype(np.float32)


@given(seeds, temperatures, ks, ps)
def test_distribution_equals_numpy(seed: int, temperature: list, top_k: list, top_p: list) -> None:
    logits = random_logits(seed)
    warm = [b for b in range(B) if temperature[b] > 0]
    assume(
        all(
            clear_of_the_cut(numpy_softmax(logits[b], temperature[b]), top_k[b], top_p[b])
            for b in warm
        )
    )
    probs = np.asarray(jit_distribution(logits, options(temperature, top_k, top_p)))
    for b in range(B):
        expected = numpy_distribution(logits[b], temperature[b], top_k[b], top_p[b])
        np.testing.assert_allclose(probs[b], expected, atol=2e-6)
        np.testing.assert_array_equal(probs[b] > 0, expected > 0)


@given(seeds, temperatures, ks, ps)
def test_mixture_is_filtered_after_mixing(
    seed: int, temperature: list, top_k: list, top_p: list
) -> None:
    weights = np.random.default_rng(seed).dirichlet([1, 1], B)
    logits = np.stack([random_logits(seed), random_logits(seed + 1)])
    softmax = [[numpy_softmax(x, t or 1.0) for x, t in zip(view, temperature)] for view in logits]
    mixed = np.einsum("RBV,BR->BV", np.asarray(softmax), weights)
    warm = [b for b in range(B) if temperature[b] > 0]
    assume(all(clear_of_the_cut(mixed[b], top_k[b], top_p[b]) for b in warm))
    view_probs = tempered(jnp.asarray(logits), jnp.asarray(temperature, jnp.float32))
    weights = jnp.asarray(weights, jnp.float32)
    probs = np.asarray(jit_mixture(mix(view_probs, weights), options(temperature, top_k, top_p)))
    for b in range(B):
        expected = (
            numpy_filtered(mixed[b], top_k[b], top_p[b])
            if temperature[b]
            else np.eye(V)[mixed[b].argmax()]
        )
        np.testing.assert_allclose(probs[b], expected, atol=2e-6)


def test_top_p_of_one_keeps_a_long_tail_beside_a_narrow_row() -> None:
    """A top-p of one keeps a long tail next to a narrow row, although the head's mass rounds to one
    in float32.
    """
    logits = np.zeros((2, 30_000), np.float32)
    logits[:, 0] = 25.0
    probs = np.asarray(jax.jit(distribution)(logits, options([1.0, 1.0], [0, 0], [1.0, 0.5])))
    assert (probs > 0).sum(-1).tolist() == [30_000, 1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38])
def test_a_temperature_near_zero_is_almost_greedy(temperature: float) -> None:
    logits = random_logits(0) * 10
    probs = np.asarray(jit_distribution(logits, options([temperature] * B, [0] * B, [1.0] * B)))
    np.testing.assert_allclose(probs, np.eye(V)[logits.argmax(-1)], atol=1e-6)


@given(seeds, st.integers(0, V), st.integers(1, 128))
def test_equals_go_by_index(seed: int, top_k: int, share: int) -> None:
    """Equal probabilities go by index. Shares of 64 and sums of them are exact, so that ties, and
    masses that are just reached, are decided exactly.
    """
    shares = np.random.default_rng(seed).multinomial(64, [1 / V] * V)
    # one at a time: after the other, the shares are of another whole
    top_p = 1.0 if top_k else share / 128
    order = np.argsort(-shares, kind="stable")
    before = np.cumsum(shares[order]) - shares[order]
    kept = order[(np.arange(V) < (top_k or V)) & (before < 64 * top_p)]
    expected = np.zeros(V)
    expected[kept] = shares[kept] / shares[kept].sum()
    row = jnp.asarray(shares / 64, jnp.float32)[None]
    probs = jit_mixture(jnp.repeat(row, B, axis=0), options([1.0] * B, [top_k] * B, [top_p] * B))
    np.testing.assert_allclose(probs, [expected] * B, rtol=1e-6)


@pytest.mark.parametrize("top_p", [1e-3, 1e-50])
def test_the_likeliest_token_stays_whatever_top_p(top_p: float) -> None:
    logits = random_logits(0)
    probs = np.asarray(jit_distribution(logits, options([1.0] * B, [0] * B, [top_p] * B)))
    np.testing.assert_allclose(probs, np.eye(V)[logits.argmax(-1)], rtol=1e-6)


@settings(max_examples=30)
@given(
    seeds,
    st.sampled_from([0.4, 1.0, 1.6]),
    st.integers(1, V),
    st.sampled_from([0.2, 0.6, 0.9, 0.999]),
)
def test_filters_equal_transformers(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    torch = pytest.importorskip(
        "torch", reason="torch is the oracle of parity: install the `parity` extra"
    )
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = random_logits(seed)
    assume(all(clear_of_the_cut(numpy_softmax(row, temperature), top_k, top_p) for row in logits))
    scores = torch.from_numpy(logits)
    for warper in (
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
    ):
        scores = warper(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    probs = np.asarray(
        jit_distribution(logits, options([temperature] * B, [top_k] * B, [top_p] * B))
    )
    np.testing.assert_allclose(probs, expected, atol=2e-6)
    np.testing.assert_array_equal(probs > 0, expected > 0)


@given(seeds)
def test_a_token_of_weight_zero_is_never_drawn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random((256, V)).astype(np.float32) * 10 ** rng.uniform(-30, 0, (256, 1)).astype(
        np.float32
    )
    weights[rng.random((256, V)) < 0.7] = 0
    weights[:, 5] = np.maximum(weights[:, 5], 1e-30)
    keys = jax.random.split(jax.random.key(seed), 256)
    drawn = jit_draw(keys, weights, jnp.zeros(256, bool))
    assert (weights[np.arange(256), drawn] > 0).all()


def test_draws_follow_the_weights_at_any_scale() -> None:
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.full(V, 0.5))
    keys = jax.random.split(jax.random.key(3), 100_000)
    weights = jnp.broadcast_to(jnp.asarray(probs * 1e-6, jnp.float32), (100_000, V))
    counts = np.bincount(jit_draw(keys, weights, jnp.zeros(100_000, bool)), minlength=V)
    assert goodness_of_fit(counts, probs) > 1e-3
    assert goodness_of_fit(counts, rng.permutation(probs)) < 1e-6


def test_siblings_are_draws_without_replacement() -> None:
    """Siblings are draws without replacement: all ordered pairs follow q(x) q(y) / (1 - q(x)), and
    the first of them is what `draw` draws.
    """
    q = np.asarray([0.4, 0.3, 0.2, 0.1, 0.0], np.float32)
    keys, cold = jax.random.split(jax.random.key(0), 100_000), jnp.zeros(100_000, bool)
    probs = jnp.broadcast_to(q, (100_000, 5))
    pairs = np.asarray(jit_siblings(keys, probs, probs, 2))
    expected = np.outer(q, q) / (1 - q[:, None]) * (1 - np.eye(5))
    assert (
        goodness_of_fit(np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25), expected) > 1e-3
    )
    np.testing.assert_array_equal(pairs[:, 0], jit_draw(keys, probs, cold))


def test_siblings_past_what_can_be_drawn_are_the_likeliest() -> None:
    """Siblings past what can be drawn are the likeliest: two tokens pass the filters of the first
    row; the second row is greedy, and its probabilities tiny.
    """
    mixed = jnp.asarray([[0.1, 0.4, 0.2, 0.3, 0.0], [2e-30, 1e-36, 3e-30, 1.0, 1e-30]])
    probs = jnp.asarray([[0.0, 0.6, 0.0, 0.4, 0.0], [0.0, 0.0, 0.0, 1.0, 0.0]])
    for seed in range(20):
        drawn = np.asarray(jit_siblings(jax.random.split(jax.random.key(seed), 2), probs, mixed, 4))
        assert set(drawn[0, :2].tolist()) == {1, 3}
        assert drawn[0, 2:].tolist() == [2, 0]
        assert drawn[1].tolist() == [3, 2, 0, 4]


@settings(max_examples=20)
@given(seed=seeds, count=st.sampled_from([1, 4, V]))
def test_the_largest_are_the_same_sorted_and_one_by_one(seed: int, count: int) -> None:
    # many are equal
    scores = np.random.default_rng(seed).integers(0, 6, (2, B, V)).astype(np.float32)
    scores[scores == 0] = -np.inf  # as of a token of probability 0
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    for function in (largest, largest_without_sort):
        values, indices = function(jnp.asarray(scores), count)
        np.testing.assert_array_equal(indices, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(scores, expected, -1))


@given(seeds, st.sampled_from([(3,), (2, 5), (4, 3, 7)]))
def test_likeliest_is_the_first_of_the_largest(seed: int, shape: tuple[int, ...]) -> None:
    scores = np.random.default_rng(seed).integers(0, 4, shape).astype(np.float32)  # with ties
    scores[scores == 1] = -np.inf
    np.testing.assert_array_equal(argmax(jnp.asarray(scores)), scores.argmax(-1))
    np.testing.assert_array_equal(argmax(jnp.asarray(scores > 1)), (scores > 1).argmax(-1))


def test_the_mixture_is_made_without_a_product_that_devices_round() -> None:
    """The mixture is made without a product that devices round, so a block's first token, drawn
    from the normalised mixture and accepted against the mixture, follows the law.
    """
    rng = np.random.default_rng(0)
    views = jnp.asarray(rng.dirichlet([0.05, 0.2, 0.2], (2, 64)), jnp.float32)
    weights = jnp.asarray(rng.dirichlet([1, 1], 64), jnp.float32)
    assert "dot_general" not in str(jax.make_jaxpr(mix)(views, weights))
    q = np.asarray(mix(views, weights), np.float64)
    p = np.asarray([0.99, 0.005, 0.005])
    stands = q / q.sum(-1, keepdims=True) * np.minimum(1, p / np.maximum(q, 1e-30))
    left = np.maximum(p - q, 0)
    law = stands + (1 - stands.sum(-1, keepdims=True)) * left / left.sum(-1, keepdims=True)
    np.testing.assert_allclose(law, np.broadcast_to(p, law.shape), atol=1e-6)
