"""Verifying trees accepts the longest matching path at temperature 0, follows the target's law
above, and treats chains as a special case.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import verification
from jaxspec.cache import TreeMask
from jaxspec.decoding.drafting.shapes import Tree, branching
from jaxspec.decoding.state import step_keys
from jaxspec.typing import Array
from jaxspec.verification import Draft, TokenTree, Verdict, chain_of_path, match, tree_rejection
from tests import tiny
from tests.test_verification import (
    COLD,
    WARM,
    B,
    J,
    V,
    distributions,
    drawn,
    jit_rejection,
    keys,
    one_hot,
)
from tests.tiny.oracles import goodness_of_fit

Verify = Callable[[Array, Draft, Array, Array], Verdict]

ROWS = 60_000
SHAPE = Tree((0, 0, 0, 1, 1, 2))
"""Three first tokens; the first of them has two children, the second one, the third none."""

TABLES = [(0, False), (4, False), (9, True)]
"""Seeds of tables in which every node is accepted now and then, and whether q has but two first
tokens for three nodes.
"""

seeds = st.integers(0, 2**32 - 1)
jit_match = jax.jit(match)
jit_tree_rejection = jax.jit(tree_rejection)


def siblings(rng: np.random.Generator, probs: np.ndarray, count: int) -> np.ndarray:
    """Return `count` tokens drawn without replacement from each distribution [..., V]; then the
    smallest that are left.
    """
    left, out = probs.astype(np.float64), []
    for _ in range(count):
        taken = np.sum([np.eye(V)[token] for token in out], axis=0) if out else np.zeros_like(left)
        rest = np.where(
            left.sum(-1, keepdims=True) > 0, left, np.cumsum(1 - taken, axis=-1) * (1 - taken) == 1
        )
        out.append(drawn(rng, rest / rest.sum(-1, keepdims=True)))
        left = left * (1 - np.eye(V)[out[-1]])
    return np.stack(out, axis=-1)


def block(tokens: np.ndarray, q: np.ndarray | None, shape: Tree) -> Draft:
    """Return a drafted tree; `q` [B, E, V] at the nodes with children."""
    batch = len(tokens)
    expanded = np.full(len(shape.seen), -1)
    expanded[shape.inner] = np.arange(len(shape.inner))
    tree = TokenTree(
        jnp.tile(jnp.asarray(shape.parents), (batch, 1)),
        jnp.tile(jnp.asarray(expanded), (batch, 1)),
        TreeMask(jnp.asarray(shape.depth)[None], jnp.asarray(shape.seen)[None]),
        shape.tries,
        int(shape.depth.max()),
    )
    views = jnp.zeros((1, batch, len(shape.inner), 1 if q is None else q.shape[-1]))
    return Draft(jnp.asarray(tokens), None if q is None else jnp.asarray(q), views, tree)


@settings(max_examples=40)
@given(seeds)
def test_a_chain_is_a_tree(seed: int) -> None:
    """A chain is a tree: it has the same verdict, draw for draw, greedy and sampled rows in one
    batch.
    """
    rng = np.random.default_rng(seed)
    p, q, greedy = distributions(rng, B, J + 1), distributions(rng, B, J), rng.random(B) < 0.3
    best = rng.integers(0, 2, (2, B, J + 1), dtype=np.int32)
    p[greedy], q[greedy] = one_hot(best[0, greedy]), one_hot(best[1, greedy, :J])
    draft = block(drawn(rng, q), q, branching(1, J))
    verdict = jit_tree_rejection(p, draft, keys(seed, B), greedy)
    expected = jit_rejection(p, draft.replace(tree=None), keys(seed, B), greedy)
    np.testing.assert_array_equal(verdict.count, expected.count)
    np.testing.assert_array_equal(verdict.next_token, expected.next_token)
    places = np.arange(1, J + 1)
    np.testing.assert_array_equal(
        verdict.path, np.where(places <= expected.count[:, None], places, 0)
    )


@settings(max_examples=40)
@given(seeds)
def test_greedy_is_the_longest_matching_path(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = branching(2, 3, 9)
    tokens = np.zeros((B, 9), np.int32)
    for b in range(B):
        for parent in shape.inner:
            children = np.flatnonzero(np.asarray(shape.parents) == parent)
            tokens[b, children] = rng.choice(3, len(children), replace=False)
    best = rng.integers(0, 3, (B, 10))
    draft = block(tokens, one_hot(rng.integers(0, 3, (B, len(shape.inner)))), shape)
    drafts = (draft.replace(probs=probs) for probs in (draft.probs, None))
    rejected = [jit_tree_rejection(one_hot(best), draft, keys(seed, B), COLD) for draft in drafts]
    for verdict in (*rejected, jit_match(best, draft)):
        for b in range(B):
            node, path = 0, []
            while (found := [i + 1 for i, parent in enumerate(shape.parents) if parent == node
                             and tokens[b, i] == best[b, node]]):  # fmt: skip
                node = found[0]
                path.append(node)
            assert verdict.count[b] == len(path)
            assert verdict.path[b].tolist() == path + [0] * (3 - len(path))
            assert verdict.next_token[b] == best[b, node]


@settings(max_examples=40)
@given(seeds)
def test_nothing_impossible_is_emitted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = distributions(rng, B, 7), distributions(rng, B, 3)
    tokens = np.concatenate([siblings(rng, q[:, i], n) for i, n in enumerate((3, 2, 1))], axis=1)
    verdict = jit_tree_rejection(p, block(tokens, q, SHAPE), keys(seed, B), WARM)
    for b in range(B):
        path = [0, *verdict.path[b, : verdict.count[b]].tolist()]
        written = [*(int(tokens[b, node - 1]) for node in path[1:]), int(verdict.next_token[b])]
        assert all(p[b, node, token] > 0 for node, token in zip(path, written, strict=True))


def test_a_verified_tree_is_a_chain() -> None:
    rng = np.random.default_rng(0)
    q, tokens = distributions(rng, 2, 3), rng.integers(0, V, (2, 6))
    draft = block(tokens, q, SHAPE).replace(view_probs=jnp.asarray(q)[None])
    chain, nodes, read = chain_of_path(draft, jnp.asarray([[1, 5], [3, 0]]))
    assert nodes.tolist() == [[0, 1, 5], [0, 3, 0]]
    assert read.tolist() == [[0, 1, -1], [0, -1, 0]]
    assert chain.tokens.tolist() == [[tokens[0, 0], tokens[0, 4]], [tokens[1, 2], tokens[1, 0]]]
    np.testing.assert_array_equal(chain.view_probs[0, 0], q[0, :2])
    np.testing.assert_array_equal(chain.view_probs[0, 1, 0], q[1, 0])


# The law of whole sequences, as in `test_verification`: target and draft are tables of what follows
# a prefix. ROWS trees are drafted and verified; a sequence that ends early is completed from the
# target's tables.

DraftTree = Callable[[np.random.Generator, np.ndarray, int], np.ndarray]


def law_p_value(
    verify: Verify,
    seed: int,
    narrow: bool = False,
    grow: DraftTree = siblings,
    chosen: bool = False,
    told: float | None = None,
) -> float:
    """Return the p-value of the first three tokens that `verify` emits, as draws from the target's
    tables.

    `chosen`: the tokens are not draws to the verifier. `told`: the value that it sees in place of
    every probability of q.
    """
    rng = np.random.default_rng(seed)
    p0, p1, p2 = distributions(rng), distributions(rng, V), distributions(rng, V, V)
    q0, q1 = distributions(rng), distributions(rng, V)
    if narrow:
        q0 = q0 * (q0 >= np.sort(q0)[-2]) / np.sort(q0)[-2:].sum()
    first = grow(rng, np.broadcast_to(q0, (ROWS, V)), 3)
    below = [grow(rng, q1[first[:, 0]], 2), grow(rng, q1[first[:, 1]], 1)]
    tokens = np.concatenate([first, *below], axis=1)
    q = np.stack([np.broadcast_to(q0, (ROWS, V)), q1[first[:, 0]], q1[first[:, 1]]], axis=1)
    after_second = [p2[tokens[:, i], tokens[:, j]] for i, j in ((0, 3), (0, 4), (1, 5))]
    p = np.stack(
        [np.broadcast_to(p0, (ROWS, V)), *(p1[first[:, i]] for i in range(3)), *after_second],
        axis=1,
    )
    q = q if told is None else np.full_like(q, told)
    draft = block(tokens, None if chosen else q, SHAPE)
    verdict = jax.jit(verify)(p, draft, keys(seed, ROWS), jnp.zeros(ROWS, bool))
    count, after, path = map(np.asarray, (verdict.count, verdict.next_token, verdict.path))
    assert set(path[count > 0, 0].tolist()) == {1, 2, 3}
    assert set(path[count > 1, 1].tolist()) == {4, 5, 6}

    rows = np.arange(ROWS)
    one = np.where(count >= 1, tokens[rows, path[:, 0] - 1], after)
    two = np.where(
        count >= 2, tokens[rows, path[:, 1] - 1], np.where(count == 1, after, drawn(rng, p1[one]))
    )
    three = np.where(count == 2, after, drawn(rng, p2[one, two]))
    counts = np.bincount((one * V + two) * V + three, minlength=V**3)
    return goodness_of_fit(counts, p0[:, None, None].astype(float) * p1[:, :, None] * p2)


def with_replacement(rng: np.random.Generator, probs: np.ndarray, count: int) -> np.ndarray:
    return np.stack([drawn(rng, probs) for _ in range(count)], axis=-1)


def backwards(rng: np.random.Generator, probs: np.ndarray, count: int) -> np.ndarray:
    """Try siblings in another order than that in which they were drawn."""
    return siblings(rng, probs, count)[:, ::-1]


def likelier_first(rng: np.random.Generator, probs: np.ndarray, count: int) -> np.ndarray:
    """Sort drawn siblings by their probability, as a tree pruned by joint probability would keep
    them.
    """
    found = siblings(rng, probs, count)
    order = np.argsort(-np.take_along_axis(probs, found, -1), axis=-1, kind="stable")
    return np.take_along_axis(found, order, -1)


def mutant(old: str, new: str) -> Verify:
    """Return `tree_rejection` with a piece of its source replaced."""
    source = inspect.getsource(tree_rejection)
    assert source.count(old) == 1, old
    names: dict[str, Any] = dict(vars(verification))
    exec(source.replace(old, new), names)
    return names["tree_rejection"]


@pytest.mark.parametrize(("seed", "narrow"), TABLES)
def test_sequences_follow_the_target(seed: int, narrow: bool) -> None:
    assert law_p_value(tree_rejection, seed, narrow) > 1e-3


@pytest.mark.parametrize("told", [0.0, np.nan])
def test_a_draft_without_distributions_changes_nothing(told: float) -> None:
    """A draft without distributions changes nothing: the law holds for a q without mass, or of what
    is no number.
    """
    assert law_p_value(tree_rejection, 4, told=told) > 1e-4


@pytest.mark.parametrize("grow", [siblings, backwards, with_replacement])
def test_chosen_tokens_may_be_any(grow: DraftTree) -> None:
    assert law_p_value(tree_rejection, 4, grow=grow, chosen=True) > 1e-3


@pytest.mark.parametrize("grow", [backwards, likelier_first, with_replacement])
def test_the_law_rejects_other_draws(grow: DraftTree) -> None:
    assert law_p_value(tree_rejection, 4, grow=grow) < 1e-6


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("walk.q / jnp.where(mass > 0, mass, 1.0)", "walk.q", id="q not renormalised"),
        pytest.param("1.0), here)", "1.0), 0 * here)", id="exhausted q takes all"),
        pytest.param("walk.q * (1 - here)", "walk.q", id="q keeps what fell"),
        pytest.param("excess / excess.sum(-1, keepdims=True)", "excess", id="p not renormalised"),
        pytest.param("residual(walk.p, q,", "residual(walk.p, walk.q,", id="residual of another q"),
        pytest.param("bonus=~rejected", "bonus=jnp.ones_like(rejected)", id="no residual"),
        pytest.param(
            "jnp.where(accepted[:, None], _pick(p, child), excess)",
            "excess",
            id="p of the root everywhere",
        ),
    ],
)
def test_the_law_rejects_mutants(old: str, new: str) -> None:
    assert any(law_p_value(mutant(old, new), *tables) < 1e-6 for tables in TABLES[1:])


def test_greedy_rows_beside_sampled_ones() -> None:
    """Greedy rows next to sampled ones get the verdicts that they get alone."""
    rng = np.random.default_rng(1)
    p, q = distributions(rng, B, 7), distributions(rng, B, 3)
    greedy = np.arange(B) % 2 == 0
    p[greedy], q[greedy] = one_hot(p[greedy].argmax(-1)), one_hot(q[greedy].argmax(-1))
    tokens = np.concatenate([siblings(rng, q[:, i], n) for i, n in enumerate((3, 2, 1))], axis=1)
    together = jit_tree_rejection(p, block(tokens, q, SHAPE), keys(0, B), greedy)
    for rows in (greedy, ~greedy):
        alone = jit_tree_rejection(
            p[rows], block(tokens[rows], q[rows], SHAPE), keys(0, B)[rows], greedy[rows]
        )
        for here, there in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_array_equal(here, np.asarray(there)[rows])


def test_a_verdict_draws_from_a_stream_of_its_own() -> None:
    """A verdict shares no stream of draws with a drafted node.

    Of five nodes the root and nodes 1 and 3 have children, each with a stream of its own.
    """
    model, _ = tiny.lvlm(32, 1, seed=0)
    program, rows = tiny.speculator(model, model, ("T",), 3, tree="2:5"), 64
    shape = branching(2, 3, 5)
    assert shape.inner.tolist() == [0, 1, 3]
    draft = block(np.tile([0, 1, 0, 1, 0], (rows, 1)), np.full((rows, 3, V), 1 / V), shape)
    options, state = tiny.sampling(rows, 1.0), cast("Any", Namespace(count=jnp.zeros(rows, int)))
    verdict = program.judge(jnp.zeros((rows, 6, V)), draft, state, options)
    for node in shape.inner:
        keys = step_keys(options, state.count, int(node))
        drafted = tree_rejection(jnp.full((rows, 6, V), 1 / V), draft, keys, jnp.zeros(rows, bool))
        assert (verdict.next_token != drafted.next_token).any(), node
