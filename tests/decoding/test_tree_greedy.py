"""Trees at temperature 0 write the target's tokens, and accept as many a block as the tree drawn up
by hand has of them.

All trees run on the batch of `test_greedy`: ragged prompts with 0 to 2 images, one program a tree.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.drafting.shapes import parse_tree, static_tree
from jaxspec.models.inputs import PromptRows, in_order
from tests import tiny
from tests.decoding.test_greedy import (
    DRAFT_PARAMS,
    NEW,
    NOBODY,
    TARGET,
    B,
    batch_of,
    check_stats,
    plain,
    same_stats,
    speculative,
)

VIEWS, GAMMA, WEIGHTS = ("M", "T"), 3, (0.7, 0.3)
TREES = ["2:9", "dynamic:2:6"]
Path = tuple[int, ...]

all_trees = pytest.mark.parametrize("tree", TREES)


@cache
def mixed_probs(b: int, written: Path) -> np.ndarray:
    """Return the mixture of the views [V] after row b's prompt and these tokens: for each view one
    pass over them all.
    """
    batch = batch_of(*VIEWS)
    width = batch.target.tokens.shape[1] + NEW + GAMMA
    probs = np.zeros(tiny.VOCABULARY)
    for view, weight in zip(tiny.view_rows(batch), WEIGHTS, strict=True):
        length = int(view.length[b])
        row = np.zeros((1, width), np.int32)
        row[0, : length + len(written)] = [*np.asarray(view.tokens[b, :length]), *written]
        # A placeholder that was written is a token like others, and shows no image.
        shown = (row == TARGET.config.image_token_index) & (np.arange(width) < length)
        rows = PromptRows(jnp.asarray(row), jnp.asarray([length + len(written)]), in_order(shown))
        probs += weight * np.asarray(
            forward(rows, jax.tree.map(lambda x, b=b: x[b : b + 1], batch.images))
        )
    return probs


@jax.jit
def forward(rows: PromptRows, images: dict[str, jax.Array]) -> jax.Array:
    embeds = TARGET.embed(DRAFT_PARAMS, rows, TARGET.encode(DRAFT_PARAMS, images))
    return jax.nn.softmax(TARGET.prefill(DRAFT_PARAMS, embeds, rows, rows.tokens.shape[1])[0][0])


def likeliest(b: int, written: Path, count: int) -> list[tuple[int, float]]:
    probs = mixed_probs(b, written)
    return [
        (int(token), float(probs[token])) for token in np.argsort(-probs, kind="stable")[:count]
    ]


def static_nodes(tree: str, b: int, written: Path) -> set[Path]:
    shape = static_tree(parse_tree(tree, GAMMA), GAMMA)
    paths: list[Path] = [()]
    for parent, rank in zip(shape.parents, shape.rank[1:], strict=True):
        before = paths[parent]
        paths.append((*before, likeliest(b, written + before, rank + 1)[rank][0]))
    return set(paths[1:])


def dynamic_nodes(tree: str, b: int, written: Path) -> set[Path]:
    """Return EAGLE-2's nodes: on each level the likeliest are expanded, and of all nodes the
    likeliest stay.
    """
    spec = parse_tree(tree, GAMMA)
    level, pool = {(): 1.0}, {}
    for _ in range(GAMMA):
        grown = {
            (*path, token): joint * chance
            for path, joint in level.items()
            for token, chance in likeliest(b, written + path, spec.width)
        }
        pool |= grown
        level = {
            path: grown[path] for path in sorted(grown, key=lambda path: -grown[path])[: spec.width]
        }
    return set(sorted(pool, key=lambda path: -pool[path])[: spec.budget])


@all_trees
def test_blocks_accept_what_the_tree_has_of_the_answer(tree: str) -> None:
    """Blocks accept exactly what the tree has of the answer, in every row. Were a path not where
    the next block of either model looks for it, or a node read with the wrong ancestors or
    position, later blocks would accept otherwise.
    """
    options = tiny.sampling(B, new=NEW, eos=NOBODY)
    answers = plain(options)
    state = speculative(VIEWS, GAMMA, options, weights=WEIGHTS, tree=tree)
    assert tiny.outputs(state) == answers
    check_stats(state)
    nodes_of = dynamic_nodes if tree.startswith("dynamic") else static_nodes
    beyond_first = 0
    for b, answer in enumerate(answers):
        histogram, count = np.zeros(GAMMA + 1, int), 1
        while count < NEW:
            nodes = nodes_of(tree, b, tuple(answer[:count]))
            accepted = 0
            while tuple(answer[count : count + accepted + 1]) in nodes and count + accepted < NEW:
                accepted += 1
            first = [likeliest(b, tuple(answer[: count + i]), 1)[0][0] for i in range(accepted)]
            beyond_first += first != answer[count : count + accepted]
            histogram[accepted] += 1
            count += min(accepted + 1, NEW - count)
        assert state.stats.histogram[b].tolist() == histogram.tolist()
    assert beyond_first > 5, "no path but that of the first choices was ever taken"


@pytest.mark.full
def test_a_tree_of_width_one_is_the_chain() -> None:
    """A tree of width one writes the chain's tokens and counts, also drawn, as weights learn."""
    options = tiny.sampling(
        B, temperature=[0.0, 1.0, 0.7, 0.0], top_k=[0, 0, 4, 3], new=NEW, eos=NOBODY
    )
    chain = speculative(VIEWS, GAMMA, options, weights=WEIGHTS, weighting="inverse_error_power")
    state = speculative(
        VIEWS, GAMMA, options, weights=WEIGHTS, weighting="inverse_error_power", tree="1"
    )
    assert tiny.outputs(state) == tiny.outputs(chain)
    assert same_stats(state, chain)
