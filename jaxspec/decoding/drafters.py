"""Drafters: what proposes a block of tokens, as a chain or as a tree.

IbED's: one small model reads R views of every prompt as one batch of R*B rows, the views' distributions are
mixed, and all views are fed the same drawn tokens. AASD's: a KV head reads the target's own cache. It is one more
view, the last, or the only one.

Of a tree all nodes of a level are read in one pass. The draft's cache holds the nodes that it has read, in the order
in which it read them: the root, then those nodes of each level that get children. The last level is never read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache, TreeMask, hidden_before, keep_path
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.state import PromptBatch, rewound, step_keys
from jaxspec.decoding.tree import Tree, TreeSpec, ancestors, likeliest_nodes, static_tree
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import KVHead, adopt_target_kv, joined, pack
from jaxspec.models.layers import apply
from jaxspec.prompts.views import View
from jaxspec.sampling import (
    Sampling,
    argmax,
    by_place,
    draw,
    draw_siblings,
    filtered,
    fit_vocabulary,
    largest,
    mix,
    tempered,
)
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Draft

ContextPolicy = Literal["extrapolate", "drop_view", "error"]


class DraftState(struct.PyTreeNode):
    """What a draft remembers."""

    cache: KVCache | None
    """The draft's cache, rows view-major (row r*B + b is view r of request b); None of a KV head alone.

    Between blocks a row's length is two short of the committed tokens: after full acceptance the draft has not
    read its own last proposal, so every block begins by (re-)reading the two newest tokens."""
    last: Int[Array, " R*B"] | None
    """Last token of each row's prompt: what the first block re-reads."""
    head: KVCache | None = None
    """A KV head's cache, B rows: what it reads of the target, which has read all committed tokens but the newest.
    Behind that stand, within a block, the head's own keys and values."""


@dataclass(frozen=True)
class Drafter(ABC):
    """What drafts from a mixture of views. Static: part of the compiled program."""

    model: LanguageModel
    """The draft; of a KV head alone, its decoder."""
    views: tuple[View, ...]
    """What the draft is shown; empty for a KV head alone."""
    gamma: int
    """J: drafted tokens on the longest path."""
    vocabulary: int
    """V of the target; the draft's logits are fitted to it."""
    context: ContextPolicy = "extrapolate"
    """What happens to a view whose row would pass the draft's trained positions: `extrapolate` drafts on, as the
    papers did; `drop_view` gives it weight 0 (the shortest row stays if none fits); `error` is refused by the
    engine before decoding."""
    head: KVHeadConfig | None = None
    """A KV head, which is one more view, behind the others. It reads as far as its target does."""
    tree: TreeSpec | None = None
    """The tree that a block is; None for a chain."""

    @property
    def nodes(self) -> int:
        """Tokens drafted in a block."""
        return self.gamma if self.tree is None else self.tree.nodes(self.gamma)

    @property
    @abstractmethod
    def reads(self) -> int:
        """Tokens that the draft reads in a block: the newest committed one, and its own that get children."""

    @property
    def width(self) -> int:
        """R: distributions that are mixed."""
        return len(self.views) + (self.head is not None)

    def prefill(
        self,
        params: Params,
        batch: PromptBatch,
        features: Float[Array, "B U P E"] | None,
        target: KVCache,
        room: int,
    ) -> DraftState:
        """Run every view of every prompt, and pack what a KV head reads of the target's cache.

        Args:
          params: {"target", "drafter", "head"}, the latter two where there is one.
          features: the target's, when the towers are the same.
          room: slots behind the prompt.
        """
        state = (
            self._prefill_views(params, batch, features, room)
            if self.views
            else DraftState(None, None)
        )
        if self.head is None:
            return state
        assert batch.head is not None
        packed = batch.head.text.shape[1] + batch.head.images.shape[1] * self.head.image_slots
        return state.replace(
            head=pack(self.head, params["head"], target, batch.head, packed + room)
        )

    def _prefill_views(
        self,
        params: Params,
        batch: PromptBatch,
        features: Float[Array, "B U P E"] | None,
        room: int,
    ) -> DraftState:
        own = params["drafter"]
        if features is None and batch.view_images is not None:
            features = self.model.encode(own, batch.view_images)
        embeds = [
            self.model.embed(own, rows, features, view.pool)
            for view, rows in zip(self.views, batch.views, strict=True)
        ]
        # What the views show of images went into their embeddings; the rest is one batch.
        shown = [rows.replace(sources=None, blend=None) for rows in batch.views]
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *shown)
        _, cache = self.model.prefill(
            own, jnp.concatenate(embeds), rows, rows.tokens.shape[1] + room
        )
        last = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[:, 0]
        return DraftState(cache.replace(length=rows.length - 1), last)

    def draft(
        self,
        params: Params,
        state: DraftState,
        recent: Int[Array, "B 2"],
        count: Int[Array, " B"],
        weights: Float[Array, "B R"],
        options: Sampling,
    ) -> tuple[Draft, DraftState]:
        """Propose a block after `recent`, the two newest committed tokens."""
        logits, read = self._read_newest(params, state, recent, count)
        draft, read = self._propose(params, read, logits, count, weights, options)
        return draft, rewound(read, state)

    @abstractmethod
    def _propose(
        self,
        params: Params,
        state: DraftState,
        logits: Float[Array, "R B 1 V"],
        count: Int[Array, " B"],
        weights: Float[Array, "B R"],
        options: Sampling,
    ) -> tuple[Draft, DraftState]:
        """Propose a block, given the logits of what follows the newest token."""

    def commit(
        self,
        state: DraftState,
        emitted: Int[Array, " B"],
        target: KVCache,
        kept: Int[Array, "B J"] | None = None,
    ) -> DraftState:
        """Keep what was emitted, and roll back all past it by length; a KV head adopts what `target`, the target's
        cache, holds of it.

        Of a tree, `kept` are the nodes on the path that stands, counted in the order in which the draft read them: if
        it read the root, a and b, and b stands, kept is [2, -1, ...], and b moves to the slot behind the root. The
        last node of the path it may not have read (-1): the next block does, as the newest token but one.
        """
        cache, head = state.cache, state.head
        if cache is not None:
            if kept is not None:
                cache = keep_path(cache, cache.length + 1, self._feed(jnp.maximum(kept, 0)))
            cache = cache.replace(length=cache.length + jnp.tile(emitted, len(self.views)))
        if head is not None:
            assert self.head is not None
            head = adopt_target_kv(self.head, head, target, emitted, self.gamma + 1)
        return state.replace(cache=cache, head=head)

    def extend(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        state: DraftState,
        mask: TreeMask | None = None,
    ) -> tuple[Float[Array, "R B T V"], DraftState]:
        """Return the logits of what follows each of T more tokens, or nodes of a tree, that all views read."""
        return self._read(params, self._feed(tokens), tokens, state, mask)

    def _read_newest(
        self, params: Params, state: DraftState, recent: Int[Array, "B 2"], count: Int[Array, " B"]
    ) -> tuple[Float[Array, "R B 1 V"], DraftState]:
        """Return the logits of what follows the two newest committed tokens, read by all views.

        While `count` is 1, the first of the two is the prompt's last token, which each row knows for itself. A KV head
        reads the newest alone: the target has read the others.
        """
        fed = self._feed(recent)
        if state.last is not None:
            fed = fed.at[:, 0].set(jnp.where(self._feed(count) == 1, state.last, fed[:, 0]))
        return self._read(params, fed, recent[:, 1:], state)

    def _read(
        self,
        params: Params,
        fed: Array,
        tokens: Int[Array, "B T"],
        state: DraftState,
        mask: TreeMask | None = None,
    ) -> tuple[Float[Array, "R B T V"], DraftState]:
        """Return the logits of what follows each of `tokens`, fitted to the target's vocabulary.

        The draft reads `fed`, of which they are the last, and a KV head the tokens themselves.
        """
        parts, width = [], tokens.shape[1]
        if state.cache is not None:
            # A mask of all rows alike is that of all views too; others are laid out view-major, as the rows are.
            tiled = (
                mask
                if mask is None or len(mask.seen) == 1
                else mask.replace(seen=self._feed(mask.seen))
            )
            logits, cache = self.model.extend(params["drafter"], fed, state.cache, tiled)
            logits = fit_vocabulary(logits[:, -width:], self.vocabulary)
            parts.append(logits.reshape(len(self.views), -1, *logits.shape[1:]))
            state = state.replace(cache=cache)
        if state.head is not None:
            logits, cache = self._read_head(params, tokens, state.head, mask)
            parts.append(fit_vocabulary(logits, self.vocabulary)[None])
            state = state.replace(head=cache)
        return jnp.concatenate(parts), state

    def _read_level(
        self, params: Params, tokens: Int[Array, "B T"], depth: int, seen: Array, state: DraftState
    ) -> tuple[Float[Array, "R B T V"], DraftState]:
        """Read T nodes of one level; `seen` [B or 1, T, nodes read so far, with them] are those that each reads."""
        return self.extend(
            params, tokens, state, TreeMask(jnp.full((1, tokens.shape[1]), depth), seen)
        )

    def _read_head(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache, mask: TreeMask | None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        assert self.head is not None
        model = LanguageModel(self.head.text_config)
        own = joined(params["head"], params["target"], model.text.draft_vocabulary)
        if not self.head.reads_hidden:
            return model.extend(own, tokens, cache, mask)
        embeds = model.embed(own, PromptRows(tokens, cache.length), None)
        before = hidden_before(cache, tokens.shape[1], mask)
        fused = apply(KVHead(self.head), params["head"], embeds, before, method="fuse")
        return model.advance(own, fused, cache, mask)

    def _feed(self, tokens: Int[Array, "B ..."]) -> Int[Array, "R*B ..."]:
        """Return what all views are fed: with the views M and T, of the rows [a, b] the rows [a, b, a, b]."""
        return jnp.tile(tokens, (len(self.views), *[1] * (tokens.ndim - 1)))

    def _distributions(
        self, logits: Float[Array, "R B T V"], weights: Float[Array, "B R"], options: Sampling
    ) -> tuple[Float[Array, "B T V"], Float[Array, "R B T V"]]:
        """Return the mixture of the views at T places, and each view's own distributions."""
        view_probs = by_place(lambda place: tempered(place, options.temperature))(logits)
        return by_place(lambda place: mix(place, weights))(view_probs), view_probs

    def within_context(
        self, state: DraftState, weights: Float[Array, "B R"]
    ) -> Float[Array, "B R"]:
        """Return the weights that a block is drafted with: those given, but for views that `context` drops."""
        if self.context != "drop_view" or state.cache is None:
            return weights
        length = state.cache.length.reshape(len(self.views), -1).T
        if self.head is not None:
            length = jnp.pad(length, ((0, 0), (0, 1)))
        fits = length + 1 + self.gamma <= self.model.text.max_position_embeddings
        kept = jnp.where(fits, weights, 0.0)
        total = kept.sum(-1, keepdims=True)
        shortest = jax.nn.one_hot(jnp.argmin(length, axis=-1), self.width)
        return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), shortest)


@dataclass(frozen=True)
class ChainDrafter(Drafter):
    """Drafts a chain of `gamma` tokens."""

    @property
    def reads(self) -> int:
        return self.gamma

    def _propose(
        self,
        params: Params,
        state: DraftState,
        logits: Array,
        count: Array,
        weights: Array,
        options: Sampling,
    ) -> tuple[Draft, DraftState]:
        def propose(logits: Array, place: Array) -> tuple[Array, Array, Array]:
            mixed, view_probs = (
                probs[..., 0, :] for probs in self._distributions(logits, weights, options)
            )
            best = argmax(mixed)
            if options.greedy:  # `match` does not ask what tokens were drawn from
                return best, mixed, view_probs
            probs = filtered(mixed, options, best)
            token = draw(step_keys(options, count, place), probs, options.temperature == 0)
            return token, probs, view_probs

        def step(
            carry: tuple[Array, DraftState], place: Array
        ) -> tuple[tuple[Array, DraftState], tuple[Array, ...]]:
            token, state = carry
            logits, state = self.extend(params, token[:, None], state)
            proposal = propose(logits, place)
            return (proposal[0], state), proposal

        first = propose(logits, jnp.zeros((), jnp.int32))
        (_, state), rest = jax.lax.scan(step, (first[0], state), jnp.arange(1, self.gamma))
        tokens, probs, view_probs = (
            jnp.concatenate([head[None], tail]) for head, tail in zip(first, rest)
        )
        tokens, probs = jnp.moveaxis(tokens, 0, 1), jnp.moveaxis(probs, 0, 1)
        return Draft(tokens, probs, jnp.moveaxis(view_probs, 0, 2)), state


@dataclass(frozen=True)
class TreeDrafter(Drafter):
    """Drafts a tree of a static shape.

    The children of a node are drawn from its mixture without replacement; at temperature 0 they are its likeliest.
    """

    @property
    def shape(self) -> Tree:
        assert self.tree is not None
        return static_tree(self.tree, self.gamma)

    @property
    def reads(self) -> int:
        return len(self.shape.inner)

    def _propose(
        self,
        params: Params,
        state: DraftState,
        logits: Array,
        count: Array,
        weights: Array,
        options: Sampling,
    ) -> tuple[Draft, DraftState]:
        shape = self.shape
        inner, parents = shape.inner, np.asarray((-1, *shape.parents))
        tokens, levels = [], []
        children = np.zeros(1, int)
        for depth in range(self.gamma):
            # Tree `2` of gamma 2: 0 has the children 1, 2; 1 has 3, 4; 2 has 5, 6; `inner` is [0, 1, 2]. At depth 1
            # `read` is [1, 2], `seen` [[1, 1, 0], [1, 0, 1]], `children` [3, 4, 5, 6], and `parent` [0, 0, 1, 1].
            (read,) = np.nonzero(shape.depth[inner] == depth)
            if depth:
                seen = shape.seen[inner[read]][:, inner[: read[-1] + 1]]
                fed = tokens[-1][:, np.searchsorted(children, inner[read])]
                logits, state = self._read_level(params, fed, depth, jnp.asarray(seen)[None], state)
            (children,) = np.nonzero(shape.depth == depth + 1)
            mixed, view_probs = self._distributions(logits, weights, options)
            most = int(shape.rank[children].max()) + 1
            siblings, probs = self._siblings(mixed, read, most, count, options)
            parent = np.searchsorted(inner[read], parents[children])
            tokens.append(siblings[:, parent, shape.rank[children]])
            levels.append((probs, view_probs))
        draft = Draft(
            tokens=jnp.concatenate(tokens, axis=1),
            probs=jnp.concatenate([probs for probs, _ in levels], axis=1),
            view_probs=jnp.concatenate([view_probs for _, view_probs in levels], axis=2),
            tree=shape.token_tree(count.shape[0]),
        )
        return draft, state

    def _siblings(
        self,
        mixed: Float[Array, "B T V"],
        read: np.ndarray,
        most: int,
        count: Int[Array, " B"],
        options: Sampling,
    ) -> tuple[Int[Array, "B T siblings"], Float[Array, "B T V"]]:
        """Return `most` children of T nodes, and what they were drawn from. Where the program is of greedy rows alone
        they are the likeliest, and `match` does not ask from what."""
        if options.greedy:
            return largest(mixed, most)[1], mixed

        def drawn(node: Array, mixed: Array) -> tuple[Array, Array]:
            probs = filtered(mixed, options, argmax(mixed))
            return draw_siblings(step_keys(options, count, node), probs, mixed, most), probs

        return jax.vmap(drawn, in_axes=(0, 1), out_axes=1)(jnp.asarray(read), mixed)


@dataclass(frozen=True)
class DynamicTreeDrafter(Drafter):
    """Drafts a tree whose shape each row chooses by joint draft probability (EAGLE-2, Li et al. 2024).

    On each level the `width` likeliest nodes get their `width` likeliest children; of all nodes the budget's
    likeliest are proposed. A child is never likelier than its parent, so these form a tree. The tokens are choices,
    not draws, at any temperature: keeping the likelier of *drawn* siblings would no longer be lossless, because
    what stands in the tree would then not be distributed as the draft's.
    """

    @property
    def reads(self) -> int:
        assert self.tree is not None
        return 1 + (self.gamma - 1) * self.tree.width

    def _propose(
        self,
        params: Params,
        state: DraftState,
        logits: Array,
        count: Array,
        weights: Array,
        options: Sampling,
    ) -> tuple[Draft, DraftState]:
        assert self.tree is not None
        width, batch = self.tree.width, count.shape[0]
        # The nodes of the level that was read last: their numbers, and the logarithms of their joint probabilities.
        read, value = jnp.zeros((batch, 1), jnp.int32), jnp.zeros((batch, 1))
        expanded, above = (
            [read],
            [],
        )  # of each level that was read: its nodes, and their parents in reading order
        levels, views = (
            [],
            [],
        )  # of each level: tokens, parents and joint probabilities of its nodes
        for depth in range(self.gamma):
            if depth:
                value, best = jax.lax.top_k(levels[-1][2], width)
                read = 1 + sum(tokens.shape[1] for tokens, *_ in levels[:-1]) + best
                expanded.append(read)
                above.append(max(0, 1 + (depth - 2) * width) + best // width)
                seen = ancestors(jnp.concatenate(above, axis=1), depth)[:, -width:]
                fed = jnp.take_along_axis(levels[-1][0], best, axis=1)
                logits, state = self._read_level(params, fed, depth, seen, state)
            mixed, view_probs = self._distributions(logits, weights, options)
            views.append(view_probs)
            chance, choice = largest(mixed, width)
            # Where a mixture rounds to over 1, a child would come before its parent.
            joint = value[..., None] + jnp.log(jnp.minimum(chance, 1.0))
            levels.append(
                (
                    choice.reshape(batch, -1),
                    jnp.repeat(read, width, axis=1),
                    joint.reshape(batch, -1),
                )
            )
        tokens, parents, joint = (
            jnp.concatenate(parts, axis=1) for parts in zip(*levels, strict=True)
        )
        read = jnp.concatenate(expanded, axis=1)
        tokens, tree = likeliest_nodes(self.tree, self.gamma, tokens, parents, joint, read)
        return Draft(tokens, None, jnp.concatenate(views, axis=2), tree), state


def make_drafter(
    model: LanguageModel,
    views: tuple[View, ...],
    gamma: int,
    vocabulary: int,
    tree: TreeSpec | None = None,
    context: ContextPolicy = "extrapolate",
    head: KVHeadConfig | None = None,
) -> Drafter:
    """Return the drafter of this tree, or of a chain."""
    kind = (
        ChainDrafter
        if tree is None
        else DynamicTreeDrafter
        if tree.kind == "dynamic"
        else TreeDrafter
    )
    return kind(model, views, gamma, vocabulary, context, head, tree)
