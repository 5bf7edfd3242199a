"""Shapes of trees, and attention within them."""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jaxspec.cache import TreeMask, init_cache, keep_path
from jaxspec.decoding.tree import Tree, ancestors, branching, chains, likeliest_nodes, parse_tree
from jaxspec.errors import InputError

from tests import tiny

SHAPES = [branching(2, 3), branching(3, 4, 20), branching(1, 5), chains(3, 4), branching(4, 1), chains(1, 1)]


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Ranks from the root to every node."""
    found: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents, start=1):
        found.append((*found[parent], int(tree.rank[node])))
    return found


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_a_branching_tree_keeps_the_first_choices(width: int, depth: int, budget: int) -> None:
    every = [ranks for level in range(1, depth + 1) for ranks in product(range(width), repeat=level)]
    expected = sorted(every, key=lambda ranks: (sum(ranks), len(ranks), ranks))[:budget]
    assert sorted(paths(branching(width, depth, budget))[1:]) == sorted(expected)


@pytest.mark.parametrize("tree", SHAPES, ids=str)
def test_what_a_tree_says_of_its_nodes(tree: Tree) -> None:
    found = paths(tree)
    assert [*map(len, found)] == tree.depth.tolist() == sorted(tree.depth)
    assert tree.inner.tolist() == [i for i, path in enumerate(found) if (*path, 0) in found]
    for i, j in np.ndindex(tree.seen.shape):
        assert tree.seen[i, j] == (found[i][: len(found[j])] == found[j])
    tried = [sum((*path[:k], rank) in found for k in range(len(path) + 1) for rank in range(9)) for path in found]
    assert tree.tries == max(tried)
    parents = jnp.asarray([tree.parents, tree.parents])
    np.testing.assert_array_equal(ancestors(parents, int(tree.depth.max())), [tree.seen, tree.seen])


@pytest.mark.parametrize("text", ["2:0", "2x5", "2:4", "2:9:9", "chains:2:9", "dynamic:2:3"])
def test_a_text_that_is_no_tree(text: str) -> None:
    with pytest.raises(InputError, match="tree: "):
        parse_tree(text, 5)


def test_texts_of_trees() -> None:
    assert [parse_tree(text, 5).nodes(5) for text in ("1", "2", "2:9", "3", "chains:3")] == [5, 62, 9, 64, 15]
    assert [parse_tree(text, 5).nodes(5) for text in ("dynamic:2", "dynamic:4:24")] == [18, 24]


B, PROMPT, TREE = 3, 4, branching(2, 3, 9)


@pytest.fixture(scope="module")
def passes() -> tuple:
    """A ragged prompt, then the tree in one pass and in one pass a level: logits, caches, and the tokens."""
    model, params = tiny.text_only(*tiny.lvlm(16, 2, seed=0))
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, tiny.VOCABULARY, (B, PROMPT), dtype=np.int32)
    nodes = rng.integers(0, tiny.VOCABULARY, (B, len(TREE.seen)), dtype=np.int32)
    length, shift = jnp.asarray([4, 2, 0], jnp.int32), jnp.asarray([0, 3, -1], jnp.int32)

    @partial(jax.jit, compiler_options=tiny.QUICK)
    def run() -> tuple:
        empty = init_cache(model.text, B, PROMPT + len(TREE.seen) + 4, jnp.dtype(jnp.float32)).replace(shift=shift)
        _, start = model.extend(params, prompt, empty)
        start = start.replace(length=length)
        once = model.extend(params, nodes, start, TreeMask(TREE.depth[None], TREE.seen[None]))
        cache, parts = start, []
        for depth in range(4):
            (level,) = np.nonzero(TREE.depth == depth)
            mask = TreeMask(TREE.depth[None, level], TREE.seen[None, level, : level[-1] + 1])
            logits, cache = model.extend(params, nodes[:, level], cache, mask)
            parts.append(logits)
        return start, once, (jnp.concatenate(parts, axis=1), cache)

    extend = jax.jit(partial(model.extend, params))
    return run(), nodes, extend


def test_a_node_reads_its_own_path_alone(passes: tuple) -> None:
    """The tree in one pass, and level by level, equals every root-to-node path run as a chain."""
    (start, (once, _), (levels, _)), nodes, extend = passes
    np.testing.assert_allclose(levels, once, atol=1e-5)
    for node in range(len(TREE.seen)):
        (path,) = np.nonzero(TREE.seen[node])
        alone, _ = extend(nodes[:, path], start)
        np.testing.assert_allclose(once[:, node], alone[:, -1], atol=1e-5)


def test_a_kept_path_is_a_plain_sequence(passes: tuple) -> None:
    """Every path of every row, kept by different lengths: the cache is that of the path run as a chain."""
    (start, (_, tree), _), nodes, extend = passes
    kept = jax.jit(keep_path)
    leaves = [node for node in range(1, len(TREE.seen)) if TREE.depth[node] == 3]
    for shift in range(len(leaves)):
        ends = [leaves[(b + shift) % len(leaves)] for b in range(B)]
        path = np.stack([np.flatnonzero(TREE.seen[end]) for end in ends])
        _, chain = extend(np.take_along_axis(nodes, path, axis=1), start)
        moved = kept(tree, start.length, path[:, 1:])
        for leaf, expected in zip((*moved.k, *moved.v), (*chain.k, *chain.v), strict=True):
            for b in range(B):
                stop = int(start.length[b]) + 4
                np.testing.assert_allclose(leaf[b, :, :stop], expected[b, :, :stop], atol=1e-5)


def test_a_cache_at_its_end_keeps_what_it_holds(passes: tuple) -> None:
    (_, (_, cache), _), _, _ = passes
    root = jnp.asarray([cache.slots - 2] * B)
    moved = keep_path(cache, root, jnp.full((B, 3), 1))
    for leaf, before in zip(moved.k, cache.k, strict=True):
        np.testing.assert_array_equal(leaf, before)


@given(st.integers(0, 2**32 - 1))
def test_a_dynamic_tree_keeps_the_likeliest_nodes(seed: int) -> None:
    """Against sorting a pool in plain Python; with ties, and with nodes that cannot be."""
    rng = np.random.default_rng(seed)
    size, batch, budget = 12, 2, 7
    parents = np.stack([[rng.integers(0, node) for node in range(1, size + 1)] for _ in range(batch)])
    joint = np.zeros((batch, size + 1))
    for b in range(batch):
        for node, parent in enumerate(parents[b], start=1):
            joint[b, node] = joint[b, parent] + rng.choice([0.0, -0.5, -1.0, -np.inf], p=[0.3, 0.3, 0.3, 0.1])
    read = np.stack([np.concatenate([[0], rng.choice(size, 4, replace=False) + 1]) for _ in range(batch)])
    tokens = rng.integers(0, 99, (batch, size))
    chosen, tree = likeliest_of(tokens, parents, joint[:, 1:], read)
    for b in range(batch):
        order = sorted(range(1, size + 1), key=lambda node: (-joint[b, node], node))
        kept = [0, *sorted(order[:budget])]
        assert chosen[b].tolist() == tokens[b, np.asarray(kept[1:]) - 1].tolist()
        assert tree.parents[b].tolist() == [kept.index(parents[b, node - 1]) for node in kept[1:]]
        places = read[b].tolist()
        assert tree.expanded[b].tolist() == [places.index(node) if node in places else -1 for node in kept]
        depths = [0]
        for parent in tree.parents[b].tolist():
            depths.append(depths[parent] + 1)
        assert tree.mask.depth[b].tolist() == depths


@jax.jit
def likeliest_of(tokens: jax.Array, parents: jax.Array, joint: jax.Array, read: jax.Array) -> tuple:
    return likeliest_nodes(parse_tree("dynamic:3:7", 7), 7, tokens, parents, joint, read)
