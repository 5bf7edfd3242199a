"""Define the shapes of token trees: which drafted token follows which.

Node 0 of a tree is the newest committed token; nodes 1, 2, ... are drafted. Nodes are in level
order, and the children of one node are neighbours in order of rank: rank 0 is the child drawn
first, which at temperature 0 is the likeliest.

| text           | shape                                                                          |
|----------------|--------------------------------------------------------------------------------|
| `2`, `2:32`    | every node has 2 children, cut to 64 (32) nodes                                |
| `dynamic:4:24` | for each row and block the 24 (default 64) nodes of highest joint probability, |
|                | if the 4 likeliest nodes of a level get 4 children (EAGLE-2, Li et al. 2024)   |
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import TreeMask
from jaxspec.errors import InputError
from jaxspec.typing import Array, Bool, Float, Int
from jaxspec.verification import TokenTree

BUDGET = 64
"""Default limit of drafted nodes."""
MOST_NODES = 512
"""Largest width and budget: masks and candidates grow with their squares."""


@dataclass(frozen=True)
class TreeSpec:
    """Specify a kind of tree, whose depth is the drafter's gamma. Static: compiled in."""

    kind: Literal["branching", "dynamic"]
    width: int
    """Number of children of a node."""
    budget: int = BUDGET
    """Maximum drafted nodes."""

    def nodes(self, depth: int) -> int:
        """Return the number of drafted nodes of a tree of this depth."""
        if self.kind == "dynamic":
            return min(self.budget, self.width + (depth - 1) * self.width**2)
        return len(static_tree(self, depth).parents)


def parse_tree(text: str, depth: int) -> TreeSpec:
    """Return the tree that `text` names (see the module).

    Raises InputError if its budget is too small for a path of `depth` nodes.
    """
    first, *parts = text.split(":")
    kind, numbers = ("dynamic", parts) if first == "dynamic" else ("branching", [first, *parts])
    if not 1 <= len(numbers) <= 2 or not all(part.isdecimal() and int(part) for part in numbers):
        raise InputError(f"tree: {text!r}; give one as 2, 2:32 or dynamic:4:24")
    spec = TreeSpec(kind, *map(int, numbers))
    if (largest := max(spec.width, spec.budget)) > MOST_NODES:
        raise InputError(f"tree: {text!r} has {largest}; give numbers up to {MOST_NODES}")
    if spec.budget < depth:
        raise InputError(
            f"tree: {text!r} has no room for a path of {depth} tokens; raise its budget or lower "
            f"gamma"
        )
    return spec


@dataclass(frozen=True)
class Tree:
    """Describe a static shape by its nodes' parents."""

    parents: tuple[int, ...]
    """Parent of each of the nodes 1, 2, ..."""

    @cached_property
    def seen(self) -> np.ndarray:
        """Return for each node which nodes are its ancestors or itself, bool [nodes+1, nodes+1]."""
        lineage = np.eye(len(self.parents) + 1, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            lineage[node] |= lineage[parent]
        return lineage

    @cached_property
    def depth(self) -> np.ndarray:
        """Return each node's depth below the root, int [nodes+1]."""
        return self.seen.sum(1) - 1

    @cached_property
    def rank(self) -> np.ndarray:
        """Return each node's number of earlier siblings, int [nodes+1].

        With parents (0, 0, 1, 1) of the nodes 1 to 4 it is [0, 0, 1, 0, 1].
        """
        before = [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
        return np.asarray([0, *before])

    @cached_property
    def inner(self) -> np.ndarray:
        """Return the nodes with children, in order: the nodes that the draft reads."""
        return np.unique(self.parents)

    @cached_property
    def tries(self) -> int:
        """Return the most nodes that verification can try: all children along one path."""
        children = np.bincount(self.parents, minlength=len(self.seen))
        return int((self.seen @ children).max())

    def token_tree(self, batch: int) -> TokenTree:
        """Return the tree for each row of a batch; the draft reads the inner nodes, in order."""
        expanded = np.full(len(self.seen), -1)
        expanded[self.inner] = np.arange(len(self.inner))
        parents, expanded = (
            jnp.tile(jnp.asarray(x, jnp.int32), (batch, 1)) for x in (self.parents, expanded)
        )
        mask = TreeMask(jnp.asarray(self.depth)[None], jnp.asarray(self.seen)[None])
        return TokenTree(parents, expanded, mask, tries=self.tries, depth=int(self.depth.max()))


@lru_cache
def static_tree(spec: TreeSpec, depth: int) -> Tree:
    """Return the tree of a static kind."""
    assert spec.kind != "dynamic"
    return branching(spec.width, depth, spec.budget)


def branching(width: int, depth: int, budget: int = BUDGET) -> Tree:
    """Return the tree with `width` children of every node, cut to `budget` nodes.

    A node is named by the ranks on its path. The nodes with the smallest sum of ranks stay; ties go
    to the shallower node, then to the lexicographically first. So the chain of all first choices
    comes first, then every path with one second choice, and so on.
    """
    nodes: list[tuple[int, ...]] = []
    heap: list[tuple[int, int, tuple[int, ...]]] = [(rank, 1, (rank,)) for rank in range(width)]
    while heap and len(nodes) < budget:
        total, level, ranks = heapq.heappop(heap)
        nodes.append(ranks)
        if level < depth:
            for rank in range(width):
                heapq.heappush(heap, (total + rank, level + 1, (*ranks, rank)))
    paths = sorted([(), *nodes], key=lambda ranks: (len(ranks), ranks))
    number = {ranks: node for node, ranks in enumerate(paths)}
    return Tree(tuple(number[ranks[:-1]] for ranks in paths[1:]))


def ancestors(parents: Int[Array, "B nodes"], depth: int) -> Bool[Array, "B nodes+1 nodes+1"]:
    """Return the ancestors and self of every node of trees of at most this depth.

    `parents` lists the parents of nodes 1, 2, ...: [0, 0, 1] is a root with the children 1 and 2,
    and 3 below 1, which gives the rows 1000, 1100, 1010, 1101.
    """
    parents = jnp.pad(parents, ((0, 0), (1, 0)))
    order = jnp.arange(parents.shape[1])
    here = jnp.broadcast_to(order, parents.shape)
    lineage = here[..., None] == order
    for _ in range(depth):
        here = jnp.take_along_axis(parents, here, axis=1)
        lineage |= here[..., None] == order
    return lineage


def likeliest_nodes(
    spec: TreeSpec,
    depth: int,
    tokens: Int[Array, "B pool"],
    parents: Int[Array, "B pool"],
    joint: Float[Array, "B pool"],
    read: Int[Array, "B expanded"],
) -> tuple[Int[Array, "B nodes"], TokenTree]:
    """Return the likeliest of the nodes 1, 2, ... of a pool, as a tree.

    Ties go to the first node, so a node's parent is always kept. If nodes 2 and 3 of the nodes 1,
    2, 3 with parents 0, 0, 2 are kept, they become 1 and 2, with parents 0, 1.

    read: Nodes that the draft has read, in order.
    """
    batch, size = tokens.shape
    rows, count = jnp.arange(batch)[:, None], spec.nodes(depth)
    nodes = jnp.sort(jax.lax.top_k(joint, count)[1], axis=1) + 1
    number = jnp.zeros((batch, size + 1), jnp.int32).at[rows, nodes].set(jnp.arange(1, count + 1))
    reading = jnp.full((batch, size + 1), -1).at[rows, read].set(jnp.arange(read.shape[1]))
    tokens, parents = (
        jnp.take_along_axis(values, nodes - 1, axis=1) for values in (tokens, parents)
    )
    parents = jnp.take_along_axis(number, parents, axis=1)
    expanded = jnp.take_along_axis(reading, jnp.pad(nodes, ((0, 0), (1, 0))), axis=1)
    lineage = ancestors(parents, depth)
    mask = TreeMask(lineage.sum(-1) - 1, lineage)
    return tokens, TokenTree(
        parents, expanded, mask, tries=min(depth * spec.width, count), depth=depth
    )
