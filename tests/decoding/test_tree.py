"""Shapes of trees are what their options say; what decoding makes of them is in
test_tree_greedy.py.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.decoding.drafting.shapes import Tree, branching, parse_tree
from jaxspec.errors import InputError


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Return the ranks from the root to every node."""
    found: list[tuple[int, ...]] = [()]
    for node, parent in enumerate(tree.parents, start=1):
        found.append((*found[parent], int(tree.rank[node])))
    return found


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40))
def test_a_branching_tree_keeps_the_first_choices(width: int, depth: int, budget: int) -> None:
    every = [
        ranks for level in range(1, depth + 1) for ranks in product(range(width), repeat=level)
    ]
    expected = sorted(every, key=lambda ranks: (sum(ranks), len(ranks), ranks))[:budget]
    assert sorted(paths(branching(width, depth, budget))[1:]) == sorted(expected)


@pytest.mark.parametrize(
    "text", ["2:0", "2x5", "2:4", "2:9:9", "chains:2", "dynamic:2:3", "2:513", "dynamic:513"]
)
def test_a_text_that_is_no_tree(text: str) -> None:
    with pytest.raises(InputError, match="tree: "):
        parse_tree(text, 5)


def test_texts_of_trees() -> None:
    assert [parse_tree(text, 5).nodes(5) for text in ("1", "2", "2:9", "3")] == [5, 62, 9, 64]
    assert [parse_tree(text, 5).nodes(5) for text in ("dynamic:2", "dynamic:4:24")] == [18, 24]
