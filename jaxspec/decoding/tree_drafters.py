"""Drafters of token trees: all nodes of a level are read in one pass over the R*B rows of the views.

The draft's cache holds the nodes that it has read, in the order in which it read them: the root, then those nodes
of each level that get children. Nodes of the last level are never read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import TreeMask
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.drafters import ChainDrafter, ChainState, ContextPolicy, ViewDrafter, rewound
from jaxspec.decoding.state import step_keys
from jaxspec.decoding.tree import Tree, TreeSpec, grow
from jaxspec.decoding.views import View
from jaxspec.models import LanguageModel
from jaxspec.sampling import Sampling, argmax, draw_siblings, filtered
from jaxspec.typing import Array, Bool, Float, Int, Params
from jaxspec.verification import Draft, TokenTree


@dataclass(frozen=True)
class _Drafter(ViewDrafter):
    """What both kinds share."""

    tree: TreeSpec = field(kw_only=True)

    @property
    def nodes(self) -> int:
        """Tokens drafted in a block."""
        return self.tree.nodes(self.gamma)

    def _level(
        self, logits: Float[Array, "R B T V"], weights: Float[Array, "B R"], options: Sampling
    ) -> tuple[Float[Array, "B T V"], Float[Array, "R B T V"]]:
        """The mixture at T nodes, and each view's own distribution."""
        each = jax.vmap(lambda node: self._distributions(node, weights, options), in_axes=2, out_axes=(1, 2))
        return each(logits)

    def _read(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        depth: int,
        seen: Bool[Array, "#B T E"],
        state: ChainState,
    ) -> tuple[Float[Array, "R B T V"], ChainState]:
        """Reads T nodes of one level; E are those read so far, with them."""
        return self.extend(params, tokens, state, TreeMask(jnp.full((1, tokens.shape[1]), depth), seen))


@dataclass(frozen=True)
class TreeDrafter(_Drafter):
    """Drafts a tree of a static shape.

    The children of a node are drawn from its mixture without replacement; at temperature 0 they are its likeliest.
    """

    @property
    def shape(self) -> Tree:
        return grow(self.tree, self.gamma)

    @property
    def reads(self) -> int:
        """Tokens that the draft reads in a block: the newest committed one and its own that have children."""
        return len(self.shape.inner)

    def draft(
        self,
        params: Params,
        state: ChainState,
        recent: Int[Array, "B 2"],
        count: Int[Array, " B"],
        weights: Float[Array, "B R"],
        options: Sampling,
    ) -> tuple[Draft, ChainState]:
        """Proposes a tree after `recent`, the two newest committed tokens."""
        shape = self.shape
        inner, parents = shape.inner, np.asarray((-1, *shape.parents))
        initial = state
        newest, state = self._read_newest(params, state, recent, count)
        logits = newest[:, :, None]
        tokens, levels = [], []
        for depth in range(self.gamma):
            (parts,) = np.nonzero(shape.depth[inner] == depth)  # of the nodes read, those at this depth
            (children,) = np.nonzero(shape.depth == depth + 1)
            mixed, view_probs = self._level(logits, weights, options)
            most = int(shape.rank[children].max()) + 1
            siblings, probs = self._siblings(mixed, parts, most, count, options)
            parent = np.searchsorted(inner[parts], parents[children])
            tokens.append(siblings[:, parent, shape.rank[children]])
            levels.append((probs, view_probs))
            if depth + 1 < self.gamma:
                (parts,) = np.nonzero(shape.depth[inner] == depth + 1)
                seen = shape.seen[inner[parts]][:, inner[: parts[-1] + 1]]
                fed = tokens[-1][:, np.searchsorted(children, inner[parts])]
                logits, state = self._read(params, fed, depth + 1, jnp.asarray(seen)[None], state)
        draft = Draft(
            tokens=jnp.concatenate(tokens, axis=1),
            probs=jnp.concatenate([probs for probs, _ in levels], axis=1),
            view_probs=jnp.concatenate([view_probs for _, view_probs in levels], axis=2),
            tree=self._token_tree(count.shape[0]),
        )
        return draft, rewound(state, initial)

    def _siblings(
        self, mixed: Float[Array, "B T V"], nodes: np.ndarray, most: int, count: Int[Array, " B"], options: Sampling
    ) -> tuple[Int[Array, "B T most"], Float[Array, "B T V"]]:
        """Children of T nodes, and what they were drawn from. Where all rows are greedy they are the likeliest, and
        `match` does not ask from what."""

        def drawn(node: Array, mixed: Array) -> tuple[Array, Array]:
            probs = filtered(mixed, options, argmax(mixed))
            return draw_siblings(step_keys(options, count, node), probs, mixed, most), probs

        return jax.lax.cond(
            jnp.all(options.temperature == 0),
            lambda: (jax.lax.top_k(mixed, most)[1], mixed),
            lambda: jax.vmap(drawn, in_axes=(0, 1), out_axes=1)(jnp.asarray(nodes), mixed),
        )

    def _token_tree(self, batch: int) -> TokenTree:
        shape = self.shape
        expanded = np.full(len(shape.seen), -1)
        expanded[shape.inner] = np.arange(len(shape.inner))
        parents, expanded = (
            jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch, len(x))) for x in (shape.parents, expanded)
        )
        mask = TreeMask(jnp.asarray(shape.depth)[None], jnp.asarray(shape.seen)[None])
        return TokenTree(parents, expanded, mask, tries=shape.tries, depth=self.gamma)


@dataclass(frozen=True)
class DynamicTreeDrafter(_Drafter):
    """Drafts a tree whose shape each row chooses by joint draft probability (EAGLE-2, Li et al. 2024).

    On each level the `width` likeliest nodes get their `width` likeliest children; of all nodes the budget's
    likeliest are proposed. A child is never likelier than its parent, so these form a tree. The tokens are choices,
    not draws, at any temperature: keeping the likelier of *drawn* siblings would no longer be lossless, because
    what stands in the tree would then not be distributed as the draft's.
    """

    @property
    def reads(self) -> int:
        """Tokens that the draft reads in a block: the newest committed one and `width` of each level but the last."""
        return 1 + (self.gamma - 1) * self.tree.width

    def draft(
        self,
        params: Params,
        state: ChainState,
        recent: Int[Array, "B 2"],
        count: Int[Array, " B"],
        weights: Float[Array, "B R"],
        options: Sampling,
    ) -> tuple[Draft, ChainState]:
        """Proposes a tree after `recent`, the two newest committed tokens."""
        width, batch = self.tree.width, count.shape[0]
        initial = state
        newest, state = self._read_newest(params, state, recent, count)
        logits = newest[:, :, None]
        # The nodes of the level that were read: their numbers, and the logarithms of their joint probabilities.
        read, value = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
        seen = jnp.ones((batch, 1, 1), bool)
        expanded = [read]
        pool: list[tuple[Array, Array, Array]] = []  # of each level: tokens, parents, joint probabilities
        views = []
        for depth in range(self.gamma):
            mixed, view_probs = self._level(logits, weights, options)
            views.append(view_probs)
            chance, choice = jax.lax.top_k(mixed, width)
            # Where a mixture rounds to over 1, a child would come before its parent.
            joint = (value[..., None] + jnp.log(jnp.minimum(chance, 1.0))).reshape(batch, -1)
            choice = choice.reshape(batch, -1)
            pool.append((choice, jnp.repeat(read, width, axis=1), joint))
            if depth + 1 < self.gamma:
                before = 1 + sum(tokens.shape[1] for tokens, _, _ in pool[:-1])
                value, best = jax.lax.top_k(joint, width)
                read = before + best
                expanded.append(read)
                parent = seen.shape[1] - mixed.shape[1] + best // width
                rows = jnp.take_along_axis(seen, parent[..., None], axis=1)
                own = jnp.broadcast_to(jnp.eye(width, dtype=bool), (batch, width, width))
                rows = jnp.concatenate([rows, own], axis=2)
                seen = jnp.concatenate([jnp.pad(seen, ((0, 0), (0, 0), (0, width))), rows], axis=1)
                fed = jnp.take_along_axis(choice, best, axis=1)
                logits, state = self._read(params, fed, depth + 1, rows, state)
        tokens, parents, joint = (jnp.concatenate(levels, axis=1) for levels in zip(*pool, strict=True))
        tokens, tree = self._likeliest(tokens, parents, joint, jnp.concatenate(expanded, axis=1))
        draft = Draft(tokens, None, jnp.concatenate(views, axis=2), tree)
        return draft, rewound(state, initial)

    def _likeliest(
        self,
        tokens: Int[Array, "B pool"],
        parents: Int[Array, "B pool"],
        joint: Float[Array, "B pool"],
        read: Int[Array, "B E"],
    ) -> tuple[Int[Array, "B nodes"], TokenTree]:
        """The likeliest of the nodes 1, 2, ... of a pool, as a tree; of equal ones the first, so parents come along."""
        batch, size = tokens.shape
        rows = jnp.arange(batch)[:, None]
        kept = jnp.sort(jax.lax.top_k(joint, self.nodes)[1], axis=1) + 1
        number = jnp.zeros((batch, size + 1), jnp.int32).at[rows, kept].set(jnp.arange(1, self.nodes + 1))
        place = jnp.full((batch, size + 1), -1).at[rows, read].set(jnp.arange(read.shape[1]))

        def of_kept(values: Array) -> Array:
            return jnp.take_along_axis(values, kept - 1, axis=1)

        parents = jnp.take_along_axis(number, of_kept(parents), axis=1)
        expanded = jnp.take_along_axis(place, jnp.pad(kept, ((0, 0), (1, 0))), axis=1)
        seen = ancestors(parents, self.gamma)
        tree = TokenTree(
            parents,
            expanded,
            TreeMask(seen.sum(-1) - 1, seen),
            tries=min(self.gamma * self.tree.width, self.nodes),
            depth=self.gamma,
        )
        return of_kept(tokens), tree


def view_drafter(
    model: LanguageModel,
    views: tuple[View, ...],
    gamma: int,
    vocabulary: int,
    tree: TreeSpec | None = None,
    context: ContextPolicy = "extrapolate",
    head: KVHeadConfig | None = None,
) -> ChainDrafter | TreeDrafter | DynamicTreeDrafter:
    """The drafter of this tree, or of a chain."""
    if tree is None:
        return ChainDrafter(model, views, gamma, vocabulary, context, head)
    kind = DynamicTreeDrafter if tree.kind == "dynamic" else TreeDrafter
    return kind(model, views, gamma, vocabulary, context, head, tree=tree)


def ancestors(parents: Int[Array, "B nodes"], depth: int) -> Bool[Array, "B nodes+1 nodes+1"]:
    """Ancestors and self of every node of trees of at most this depth; `parents` are those of the nodes from 1 on."""
    parents = jnp.pad(parents, ((0, 0), (1, 0)))
    order = jnp.arange(parents.shape[1])
    here = jnp.broadcast_to(order, parents.shape)
    seen = here[..., None] == order
    for _ in range(depth):
        here = jnp.take_along_axis(parents, here, axis=1)
        seen |= here[..., None] == order
    return seen
