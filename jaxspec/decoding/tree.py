"""Shapes of token trees: which drafted token follows which.

A drafted tree hangs from the newest committed token, its node 0; nodes 1, 2, ... are drafted. Nodes stand in
level order, children of one node beside each other in order of rank: rank 0 is the first that was drawn, which
at temperature 0 is the likeliest.

| text              | shape                                                                                      |
|-------------------|--------------------------------------------------------------------------------------------|
| `2`, `2:32`       | every node has 2 children, cut to 64 (32) nodes                                            |
| `chains:2`        | 2 chains that part at the root                                                             |
| `dynamic:4:24`    | chosen anew for every row and block: of all that 4 children of the 4 likeliest nodes of a  |
|                   | level give, the 24 (64) nodes of the highest joint draft probability (EAGLE-2, Li et al. 2024) |
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from jaxspec.errors import InputError

BUDGET = 64
"""Drafted nodes at most, where the text names no other number."""


@dataclass(frozen=True)
class TreeSpec:
    """What kind of tree a drafter grows; its depth is the drafter's gamma. Static: part of the compiled program."""

    kind: Literal["branching", "chains", "dynamic"]
    width: int
    """Children of a node; at the root alone for `chains`."""
    budget: int = BUDGET
    """Drafted nodes at most; `chains` needs all of its own."""

    def nodes(self, depth: int) -> int:
        """Drafted nodes of a tree of this depth."""
        if self.kind == "dynamic":
            return min(self.budget, self.width + (depth - 1) * self.width**2)
        return len(grow(self, depth).parents)


def parse_tree(text: str, depth: int) -> TreeSpec:
    """The tree that `text` asks for (see the module), which must have room for a path of `depth` nodes."""
    first, *parts = text.split(":")
    named = first in ("chains", "dynamic")
    kind, numbers = (first, parts) if named else ("branching", [first, *parts])
    most = 1 if kind == "chains" else 2
    if not 1 <= len(numbers) <= most or not all(part.isdecimal() and int(part) for part in numbers):
        raise InputError(f"tree: {text!r}; give a width as 2, a node budget too as 2:32, chains:2 or dynamic:4:24")
    spec = TreeSpec(kind, *map(int, numbers))
    if kind != "chains" and spec.budget < depth:
        raise InputError(f"tree: {text!r} has no room for a path of {depth} tokens; raise its budget or lower gamma")
    return spec


@dataclass(frozen=True)
class Tree:
    """A static shape."""

    parents: tuple[int, ...]
    """Parents of the nodes 1, 2, ..."""

    @cached_property
    def seen(self) -> np.ndarray:
        """Ancestors and self of every node, bool [nodes+1, nodes+1]."""
        seen = np.eye(len(self.parents) + 1, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            seen[node] |= seen[parent]
        return seen

    @cached_property
    def depth(self) -> np.ndarray:
        """Steps below the root, int [nodes+1]."""
        return self.seen.sum(1) - 1

    @cached_property
    def rank(self) -> np.ndarray:
        """Elder siblings, int [nodes+1]."""
        before = [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
        return np.asarray([0, *before])

    @cached_property
    def inner(self) -> np.ndarray:
        """Nodes with children, in order: those that the draft reads."""
        return np.unique(self.parents)

    @cached_property
    def tries(self) -> int:
        """The most nodes that verification can try: all children of the nodes on one path."""
        children = np.bincount(self.parents, minlength=len(self.seen))
        return int((self.seen @ children).max())


@lru_cache
def grow(spec: TreeSpec, depth: int) -> Tree:
    """The tree of a static kind."""
    assert spec.kind != "dynamic"
    return branching(spec.width, depth, spec.budget) if spec.kind == "branching" else chains(spec.width, depth)


def branching(width: int, depth: int, budget: int = BUDGET) -> Tree:
    """`width` children of every node, cut to `budget` nodes.

    A node is known by the ranks on the path to it. Those with the smallest sum of ranks stay, of equal ones the
    shallower, then the lexicographically first: the chain of all first choices, then every path with one second
    choice, and so on.
    """
    kept: list[tuple[int, ...]] = []
    heap: list[tuple[int, int, tuple[int, ...]]] = [(rank, 1, (rank,)) for rank in range(width)]
    while heap and len(kept) < budget:
        total, level, ranks = heapq.heappop(heap)
        kept.append(ranks)
        if level < depth:
            for rank in range(width):
                heapq.heappush(heap, (total + rank, level + 1, (*ranks, rank)))
    return _tree(kept)


def chains(width: int, depth: int) -> Tree:
    """`width` chains of `depth` nodes that part at the root."""
    return _tree([(rank, *[0] * below) for rank in range(width) for below in range(depth)])


def _tree(paths: list[tuple[int, ...]]) -> Tree:
    """The tree of these nodes, each given by the ranks on its path."""
    paths = sorted([(), *paths], key=lambda ranks: (len(ranks), ranks))
    number = {ranks: node for node, ranks in enumerate(paths)}
    return Tree(tuple(number[ranks[:-1]] for ranks in paths[1:]))
