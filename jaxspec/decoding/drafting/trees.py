"""Draft a chain, a tree of a static shape, or a tree that each row chooses.

All nodes of a tree level are read in one pass. Sources hold the nodes in reading order: the root,
then the nodes with children, level by level. The last level is never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import TreeMask
from jaxspec.decoding.drafting.drafter import Drafter, Mixing, States
from jaxspec.decoding.drafting.shapes import Tree, TreeSpec, ancestors, likeliest_nodes, static_tree
from jaxspec.decoding.sources.source import Committed, Source
from jaxspec.sampling import argmax, draw, draw_siblings, filtered, largest
from jaxspec.typing import Array, Float, Int
from jaxspec.verification import Draft


@dataclass(frozen=True, kw_only=True)
class ChainDrafter(Drafter):
    """Draft a chain of `gamma` tokens."""

    @property
    def nodes(self) -> int:
        return self.gamma

    @property
    def reads(self) -> int:
        return self.gamma

    def _propose(
        self, committed: Committed, mixing: Mixing, scores: Float[Array, "R B 1 V"], scratch: States
    ) -> tuple[Draft, States]:
        """Draw the tokens one by one, each from the mixture after the tokens before it."""
        options, history = mixing.options, mixing.history

        def propose(
            scores: Array, place: Array, drafted: Array | None
        ) -> tuple[Array, Array, Array]:
            """Return the token at a place of the block, its distribution and those of the views."""
            behind = mixing
            if drafted is not None:
                behind = mixing.behind(drafted, (jnp.arange(self.gamma) < place)[None, None])
            mixed, view_probs = (probs[..., 0, :] for probs in self._mixed(behind, scores))
            best = argmax(mixed)
            if options.greedy:  # `match` needs no distribution
                return best, mixed, view_probs
            probs = filtered(mixed, options, best)
            return draw(mixing.keys(place), probs, options.temperature == 0), probs, view_probs

        def step(
            carry: tuple[Array, States, Array | None], place: Array
        ) -> tuple[tuple[Array, States, Array | None], tuple[Array, ...]]:
            token, scratch, drafted = carry
            scores, scratch = self.score(committed, scratch, token[:, None])
            if drafted is not None:
                drafted = drafted.at[:, place - 1].set(token)
            proposal = propose(scores, place, drafted)
            return (proposal[0], scratch, drafted), proposal

        drafted = None
        if history is not None:  # processors read the tokens drafted so far
            drafted = jnp.zeros((len(mixing.count), self.gamma), jnp.int32)
        first = propose(scores, jnp.zeros((), jnp.int32), drafted)
        carry = first[0], scratch, drafted
        (_, scratch, _), tails = jax.lax.scan(step, carry, jnp.arange(1, self.gamma))
        tokens, probs, view_probs = (
            jnp.concatenate([head[None], tail]) for head, tail in zip(first, tails)
        )
        tokens, probs = jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(probs, 0, 1)
        return Draft(tokens, probs, jnp.moveaxis(view_probs, 0, 2)), scratch


@dataclass(frozen=True, kw_only=True)
class _Grown(Drafter):
    """Draft a tree of the kind `tree`."""

    tree: TreeSpec

    @property
    def nodes(self) -> int:
        return self.tree.nodes(self.gamma)

    def _read_level(
        self,
        committed: Committed,
        mixing: Mixing,
        scratch: States,
        levels: Sequence[Int[Array, "B _T"]],
        lineage: Array,
    ) -> tuple[Mixing, Float[Array, "R B T V"], States]:
        """Read the last level; return the mixing of its scores, the scores and the scratch.

        Args:
          levels: Tokens that are read of each level below the root.
          lineage: Whether each node attends to each node read so far, [B or 1, T, nodes].
        """
        mask = TreeMask(jnp.full((1, levels[-1].shape[1]), len(levels)), lineage)
        scores, scratch = self.score(committed, scratch, levels[-1], mask)
        return mixing.behind(jnp.concatenate(levels, axis=1), lineage[..., 1:]), scores, scratch


@dataclass(frozen=True, kw_only=True)
class TreeDrafter(_Grown):
    """Draft a tree of a static shape.

    A node's children are drawn from its mixture without replacement; at temperature 0 they are its
    likeliest tokens.
    """

    @property
    def shape(self) -> Tree:
        return static_tree(self.tree, self.gamma)

    @property
    def reads(self) -> int:
        return len(self.shape.inner)

    def _propose(
        self, committed: Committed, mixing: Mixing, scores: Float[Array, "R B 1 V"], scratch: States
    ) -> tuple[Draft, States]:
        """Draw the children of all nodes of a level, then read those that have children."""
        shape = self.shape
        inner, parents = shape.inner, np.asarray((-1, *shape.parents))
        tokens, levels, nodes = [], [], []
        children = np.zeros(1, int)
        for depth in range(self.gamma):
            # Tree `2`, gamma 2: node 0 has the children 1, 2; node 1 has 3, 4; node 2 has 5, 6;
            # `inner` is [0, 1, 2]. At depth 1 `read` is [1, 2], `lineage` [[1, 1, 0], [1, 0, 1]],
            # `children` [3, 4, 5, 6], and `parent` [0, 0, 1, 1].
            (read,) = np.nonzero(shape.depth[inner] == depth)
            if depth:
                lineage = shape.seen[inner[read]][:, inner[: read[-1] + 1]]
                nodes.append(tokens[-1][:, np.searchsorted(children, inner[read])])
                mixing, scores, scratch = self._read_level(
                    committed, mixing, scratch, nodes, jnp.asarray(lineage)[None]
                )
            (children,) = np.nonzero(shape.depth == depth + 1)
            mixed, view_probs = self._mixed(mixing, scores)
            most = int(shape.rank[children].max()) + 1
            siblings, probs = self._siblings(mixing, mixed, read, most)
            parent = np.searchsorted(inner[read], parents[children])
            tokens.append(siblings[:, parent, shape.rank[children]])
            levels.append((probs, view_probs))
        draft = Draft(
            tokens=jnp.concatenate(tokens, axis=1),
            probs=jnp.concatenate([probs for probs, _ in levels], axis=1),
            view_probs=jnp.concatenate([view_probs for _, view_probs in levels], axis=2),
            tree=shape.token_tree(mixing.count.shape[0]),
        )
        return draft, scratch

    def _siblings(
        self, mixing: Mixing, mixed: Float[Array, "B T V"], read: np.ndarray, most: int
    ) -> tuple[Int[Array, "B T siblings"], Float[Array, "B T V"]]:
        """Return `most` children of T nodes, and the distributions that they were drawn from.

        In a greedy program the children are the likeliest tokens, and the distributions are unused.
        """
        options = mixing.options
        if options.greedy:
            return largest(mixed, most)[1], mixed

        def drawn(node: Array, mixed: Array) -> tuple[Array, Array]:
            probs = filtered(mixed, options, argmax(mixed))
            return draw_siblings(mixing.keys(node), probs, mixed, most), probs

        return jax.vmap(drawn, in_axes=(0, 1), out_axes=1)(jnp.asarray(read), mixed)


@dataclass(frozen=True, kw_only=True)
class DynamicTreeDrafter(_Grown):
    """Draft a tree that each row shapes by joint draft probability (EAGLE-2, Li et al. 2024).

    The `width` likeliest nodes of each level get their `width` likeliest children. The likeliest
    of all nodes, up to the budget, are proposed. A child is never likelier than its parent, so
    these form a tree. The tokens are chosen, not drawn, at any temperature: keeping the likelier of
    *drawn* siblings is not lossless, because the kept tokens no longer follow the draft's
    distribution.
    """

    @property
    def reads(self) -> int:
        return 1 + (self.gamma - 1) * self.tree.width

    def _propose(
        self, committed: Committed, mixing: Mixing, scores: Float[Array, "R B 1 V"], scratch: States
    ) -> tuple[Draft, States]:
        """Read the likeliest nodes of each level, then keep the likeliest of all nodes."""
        width, batch = self.tree.width, mixing.count.shape[0]
        # Nodes of the level read last, and the logarithms of their joint probabilities.
        read, value = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
        # Nodes of each level read so far, and their parents in reading order.
        expanded, above = [read], []
        # Tokens, parents and joint probabilities of each level's nodes; views' distributions.
        levels, views, nodes = [], [], []
        for depth in range(self.gamma):
            if depth:
                value, best = jax.lax.top_k(levels[-1][2], width)
                read = 1 + sum(tokens.shape[1] for tokens, *_ in levels[:-1]) + best
                expanded.append(read)
                above.append(max(0, 1 + (depth - 2) * width) + best // width)
                lineage = ancestors(jnp.concatenate(above, axis=1), depth)[:, -width:]
                nodes.append(jnp.take_along_axis(levels[-1][0], best, axis=1))
                mixing, scores, scratch = self._read_level(
                    committed, mixing, scratch, nodes, lineage
                )
            mixed, view_probs = self._mixed(mixing, scores)
            views.append(view_probs)
            chance, choice = largest(mixed, width)
            # A mixture that rounds to over 1 would rank a child before its parent.
            joint = value[..., None] + jnp.log(jnp.minimum(chance, 1.0))
            parents = jnp.repeat(read, width, axis=1)
            levels.append((choice.reshape(batch, -1), parents, joint.reshape(batch, -1)))
        tokens, parents, joint = (jnp.concatenate(parts, axis=1) for parts in zip(*levels))
        read = jnp.concatenate(expanded, axis=1)
        tokens, tree = likeliest_nodes(self.tree, self.gamma, tokens, parents, joint, read)
        return Draft(tokens, None, jnp.concatenate(views, axis=2), tree), scratch


def make_drafter(
    sources: Sequence[Source], gamma: int, vocabulary: int, tree: TreeSpec | None = None
) -> Drafter:
    """Return a drafter of the tree, or of a chain if `tree` is None."""
    mixture = tuple(sorted(sources, key=lambda source: source.partial))
    if tree is None:
        return ChainDrafter(sources=mixture, gamma=gamma, vocabulary=vocabulary)
    kind = DynamicTreeDrafter if tree.kind == "dynamic" else TreeDrafter
    return kind(sources=mixture, gamma=gamma, vocabulary=vocabulary, tree=tree)
