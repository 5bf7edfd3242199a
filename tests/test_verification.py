"""Rejection sampling emits exactly the target's distribution: by algebra, by exact cases, and by
counting draws.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.sampling import draw
from jaxspec.typing import Array
from jaxspec.verification import Draft, Verdict, match, rejection, residual
from tests.tiny.oracles import goodness_of_fit

Verify = Callable[[Array, Draft, Array, Array], Verdict]

B, J, V = 8, 3, 5
ROWS = 100_000

seeds = st.integers(0, 2**32 - 1)
jit_rejection = jax.jit(rejection)
jit_match = jax.jit(match)
jit_residual = jax.jit(residual)


def distributions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random distributions over V tokens, float32, peaked, some of them with impossible
    tokens.
    """
    probs = rng.dirichlet(np.full(V, 0.6), shape)
    probs[probs < 0.02] = 0
    return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


def drawn(rng: np.random.Generator, probs: np.ndarray) -> np.ndarray:
    """Draw one token from each distribution [..., V], without jaxspec."""
    below = np.cumsum(probs, axis=-1, dtype=np.float64)
    token = (rng.random(probs.shape[:-1])[..., None] >= below / below[..., -1:]).sum(-1)
    assert (np.take_along_axis(probs, token[..., None], -1) > 0).all()
    return token.astype(np.int32)


def block(tokens: np.ndarray, q: np.ndarray) -> Draft:
    return Draft(jnp.asarray(tokens), jnp.asarray(q), jnp.asarray(q)[None])


def keys(seed: int, batch: int) -> Array:
    return jax.random.split(jax.random.key(seed), batch)


def one_hot(tokens: np.ndarray) -> np.ndarray:
    return np.eye(V, dtype=np.float32)[tokens]


COLD, WARM = jnp.ones(B, bool), jnp.zeros(B, bool)


@given(seeds)
def test_accepted_and_residual_mass_make_the_target(seed: int) -> None:
    """Accepted and residual mass make the target: P(x) = min(p, q)(x) + P(rejection) *
    norm(residual)(x) is p(x), for every token x.
    """
    p, q = distributions(np.random.default_rng(seed), 2, B)
    accepted = np.minimum(p, q)
    left = np.asarray(jit_residual(p, q, WARM))
    emitted = accepted + (1 - accepted.sum(-1, keepdims=True)) * left / left.sum(-1, keepdims=True)
    np.testing.assert_allclose(emitted, p, atol=1e-6)
    np.testing.assert_array_equal(jit_residual(p, q, COLD), p)  # the bonus token's
    # nothing is left: rounding alone gets here
    np.testing.assert_array_equal(jit_residual(p, p, WARM), p)


@given(seeds)
def test_a_draft_from_the_target_is_accepted_whole(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = distributions(rng, B, J + 1)
    verdict = jit_rejection(p, block(drawn(rng, p[:, :J]), p[:, :J]), keys(seed, B), WARM)
    assert verdict.count.tolist() == [J] * B
    assert (np.take_along_axis(p[:, J], np.asarray(verdict.next_token)[:, None], -1) > 0).all()


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_a_draft_without_a_distribution_changes_nothing(value: float) -> None:
    """No token of a q without mass, or of NaN, is accepted; the next token is drawn from p."""
    rng = np.random.default_rng(0)
    p = distributions(rng, J + 1)
    q = np.full((ROWS, J, V), value, np.float32)
    found = jit_rejection(
        jnp.broadcast_to(p, (ROWS, J + 1, V)),
        block(np.zeros((ROWS, J), np.int32), q),
        keys(1, ROWS),
        jnp.zeros(ROWS, bool),
    )
    assert not np.asarray(found.count).any()
    counts = np.bincount(np.asarray(found.next_token), minlength=V)
    assert goodness_of_fit(counts, p[0]) > 1e-4


@given(seeds)
def test_nothing_impossible_is_emitted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = distributions(rng, B, J + 1), distributions(rng, B, J)
    tokens = drawn(rng, q)
    verdict = jit_rejection(p, block(tokens, q), keys(seed, B), WARM)
    for b in range(B):
        emitted = [*tokens[b, : verdict.count[b]], int(verdict.next_token[b])]
        assert all(p[b, place, token] > 0 for place, token in enumerate(emitted))


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=J, max_size=J),
        min_size=B,
        max_size=B,
    )
)
def test_greedy_is_the_longest_matching_prefix(pairs: list[list[tuple[int, int]]]) -> None:
    drafted, best = np.moveaxis(np.asarray(pairs, np.int32), -1, 0)
    best = np.concatenate([best, best[:, :1]], axis=1)
    verdict = jit_rejection(one_hot(best), block(drafted, one_hot(drafted)), keys(0, B), COLD)
    jax.tree.map(
        np.testing.assert_array_equal, jit_match(best, block(drafted, one_hot(drafted))), verdict
    )
    for b in range(B):
        matches = [x == y for x, y in zip(drafted[b], best[b])]
        count = matches.index(False) if False in matches else J
        assert verdict.count[b] == count
        assert verdict.next_token[b] == best[b, count]


@given(seeds)
def test_a_greedy_draft_for_a_sampled_target_and_back(seed: int) -> None:
    """With a one-hot q the token is accepted with probability p(x); with a one-hot p the emitted
    block is p's.
    """
    rng = np.random.default_rng(seed)
    p, tokens = distributions(rng, B, J + 1), rng.integers(0, V, (B, J), dtype=np.int32)
    verdict = jit_rejection(p, block(tokens, one_hot(tokens)), keys(seed, B), WARM)
    for b, count in enumerate(verdict.count.tolist()):
        assert all(p[b, place, tokens[b, place]] > 0 for place in range(count))
        assert count == J or verdict.next_token[b] != tokens[b, count]
    best = rng.integers(0, V, (B, J + 1), dtype=np.int32)
    q = distributions(rng, B, J)
    tokens = drawn(rng, q)
    verdict = jit_rejection(one_hot(best), block(tokens, q), keys(seed, B), WARM)
    for b, count in enumerate(verdict.count.tolist()):
        assert [*tokens[b, :count], int(verdict.next_token[b])] == best[b, : count + 1].tolist()
        assert count == J or tokens[b, count] != best[b, count]


# The law of whole sequences. Target and draft are tables: what follows a prefix of 0, 1 and 2
# tokens. ROWS chains of two tokens are drafted and verified; a sequence that ends early is
# completed from the target's tables.


def law_p_value(verify: Verify, seed: int) -> float:
    """Return the p-value of the first three tokens that `verify` emits, as draws from the target's
    tables.
    """
    rng = np.random.default_rng(seed)
    p0, p1, p2 = distributions(rng), distributions(rng, V), distributions(rng, V, V)
    q0, q1 = distributions(rng), distributions(rng, V)
    x0 = drawn(rng, np.broadcast_to(q0, (ROWS, V)))
    x1 = drawn(rng, q1[x0])
    q = np.stack([np.broadcast_to(q0, (ROWS, V)), q1[x0]], axis=1)
    p = np.stack([np.broadcast_to(p0, (ROWS, V)), p1[x0], p2[x0, x1]], axis=1)
    verdict = jax.jit(verify)(
        p, block(np.stack([x0, x1], 1), q), keys(seed, ROWS), jnp.zeros(ROWS, bool)
    )
    count, after = np.asarray(verdict.count), np.asarray(verdict.next_token)
    assert {0, 2} <= set(count.tolist())

    first = np.where(count >= 1, x0, after)
    second = np.where(count >= 2, x1, np.where(count == 1, after, drawn(rng, p1[first])))
    third = np.where(count == 2, after, drawn(rng, p2[first, second]))
    counts = np.bincount((first * V + second) * V + third, minlength=V**3)
    return goodness_of_fit(counts, p0[:, None, None].astype(float) * p1[:, :, None] * p2)


def without_residual(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Draw what replaces a fallen token from p, not from max(p - q, 0)."""
    verdict = rejection(p, draft, keys, greedy)
    at_next = jnp.take_along_axis(p, verdict.count[:, None, None], axis=1)[:, 0]
    fresh = jax.vmap(jax.random.fold_in, (0, None))(keys, 9)
    return verdict.replace(next_token=draw(fresh, at_next, greedy))


def against_another_draft(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Accept against a distribution that is not the one drawn from, as with unfiltered or
    single-view q.
    """
    return rejection(p, draft.replace(probs=0.8 * draft.probs + 0.2 / V), keys, greedy)


def accepting_all(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Keep the whole block whenever its first token is accepted."""
    verdict = rejection(p, draft, keys, greedy)
    return verdict.replace(count=jnp.where(verdict.count > 0, draft.tokens.shape[1], 0))


@pytest.mark.parametrize("seed", range(3))
def test_sequences_follow_the_target(seed: int) -> None:
    assert law_p_value(rejection, seed) > 1e-3


@pytest.mark.parametrize("mutant", [without_residual, against_another_draft, accepting_all])
def test_the_law_rejects_mutants(mutant: Verify) -> None:
    assert law_p_value(mutant, seed=0) < 1e-6
