"""Lookup finds what a search in plain Python does, in chains and trees, and gives the mixture what
it found.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.cache import TreeMask
from jaxspec.decoding.drafting.shapes import branching
from jaxspec.decoding.sources.lookup import CONFIDENCE, EARLIER, Lookup, Text, backed_off
from jaxspec.models.inputs import PromptRows, in_order

B, LENGTH, NEW, WORDS, IMAGE = 3, 14, 10, 4, 3
TREE = branching(2, 3, 9)
"""A tree of which nodes 1 to 9 are drafted."""
ROOM = NEW + len(TREE.seen)


@jax.jit
def read(
    tokens: jax.Array, length: jax.Array, new: jax.Array, count: jax.Array, nodes: jax.Array
) -> tuple:
    """Return what follows each node of a chain, read one by one, and of a tree, read a level at a
    time; [B, nodes+1, V].
    """
    rows = PromptRows(tokens, length, in_order(tokens == IMAGE))
    start = Text.of(rows, ROOM).holding(new, count)
    newest = jnp.take_along_axis(new, count[:, None] - 1, axis=1)
    fed = jnp.concatenate([newest, nodes], axis=1)
    text, chain, levels = start, [], []
    for node in range(fed.shape[1]):
        found, text = text.read(fed[:, node, None], WORDS)
        chain.append(found)
    text = start
    for depth in range(4):
        (level,) = np.nonzero(TREE.depth == depth)
        mask = TreeMask(
            jnp.full((1, len(level)), depth), jnp.asarray(TREE.seen)[None, level, : level[-1] + 1]
        )
        found, text = text.read(fed[:, level], WORDS, mask)
        levels.append(found)
    once, _ = start.read(fed, WORDS)
    return jnp.concatenate(chain, axis=1), once, jnp.concatenate(levels, axis=1)


def searched(text: list[int], path: list[int]) -> np.ndarray:
    """Return what follows a path behind the text, whose image slots are -1."""
    written = [*text, *path]
    proposals = []
    for length, confidence in CONFIDENCE.items():
        suffix = written[-length:]
        followed = [
            text[i]
            for i in range(len(text) - 1, length - 1, -1)
            if text[i - length : i] == suffix and text[i] >= 0 and -1 not in suffix
        ]
        for rank, token in enumerate(dict.fromkeys(followed)):
            if rank < EARLIER:
                proposals.append((rank, -length, token, confidence * 0.5**rank))
    probs, left = np.zeros(WORDS), 1.0
    for _, _, token, confidence in sorted(proposals):
        probs[token] += left * confidence
        left *= 1 - confidence
    return probs


@given(st.integers(0, 2**32 - 1))
def test_the_compiled_search_is_the_plain_one(seed: int) -> None:
    """The compiled search finds what the plain one does in texts of few words, where most suffixes
    occur several times; placeholders anywhere in the prompt match nothing.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.choice(WORDS, (B, LENGTH), p=[0.4, 0.3, 0.2, 0.1]).astype(np.int32)
    length = rng.integers(1, LENGTH + 1, B).astype(np.int32)
    new = rng.integers(0, WORDS, (B, NEW)).astype(np.int32)
    count = rng.integers(1, NEW + 1, B).astype(np.int32)
    nodes = rng.integers(0, WORDS, (B, len(TREE.seen) - 1)).astype(np.int32)
    chain, once, tree = read(tokens, length, new, count, nodes)
    np.testing.assert_allclose(once, chain, atol=1e-6)
    for b in range(B):
        prompt = np.where(tokens[b, : length[b]] == IMAGE, -1, tokens[b, : length[b]])
        text, drafted = [*prompt.tolist(), *new[b, : count[b]].tolist()], nodes[b].tolist()
        for node in range(len(TREE.seen)):
            np.testing.assert_allclose(
                chain[b, node], searched(text + drafted[:node], []), atol=1e-6
            )
            path = [drafted[above - 1] for above in np.flatnonzero(TREE.seen[node])[1:]]
            np.testing.assert_allclose(tree[b, node], searched(text, path), atol=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_the_host_foresees_what_the_search_proposes_first(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.choice(np.array([-1, 0, 1, 2]), rng.integers(0, LENGTH), p=[0.2, 0.4, 0.3, 0.1])
    text = np.concatenate([prompt, rng.integers(0, 3, 1 + NEW)])
    hits = Lookup(WORDS).foreseen(text, NEW)
    for hit, end in zip(hits, range(len(text) - NEW, len(text)), strict=True):
        probs = searched(text[:end].tolist(), [])
        assert hit == (probs.any() and probs.argmax() == text[end])


def test_the_remaining_probability_goes_to_the_other_views() -> None:
    found = jnp.asarray([0.6, 0, 0, 0.2])[None, None]
    others = jnp.asarray([[0.5, 0.5, 0, 0], [0.1, 0.1, 0.4, 0.4]])[:, None, None]
    np.testing.assert_allclose(backed_off(found, others)[0, 0], [0.66, 0.06, 0.04, 0.24], atol=1e-6)
