"""Drafters: what proposes a block of tokens.

IbED's: one small model reads R views of every prompt as one batch of R*B rows, the views' distributions are
mixed, and all views are fed the same drawn tokens: a chain here, a tree in `tree_drafters.py`.

AASD's: a KV head reads the target's own cache. It is one more view, the last, or the only one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, TreeMask, hidden_before, keep_path
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.state import PromptBatch, step_keys
from jaxspec.decoding.views import View
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import KVHead, adopt_target_kv, joined, pack
from jaxspec.models.layers import apply
from jaxspec.sampling import Sampling, argmax, draw, filtered, fit_vocabulary, mix, tempered
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Draft

ContextPolicy = Literal["extrapolate", "drop_view", "error"]


class ChainState(struct.PyTreeNode):
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
class ViewDrafter:
    """What chains and trees drafted from a mixture of views share. Static: part of the compiled program."""

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
        slots: int,
    ) -> ChainState:
        """Runs every view of every prompt, and packs what a KV head reads of the target's cache.

        Args:
          params: {"target", "drafter", "head"}, the latter two where there is one.
          features: the target's, when the towers are the same.
          slots: of the target's cache.
        """
        state = self._prefill_views(params, batch, features, slots) if self.views else ChainState(None, None)
        if self.head is None:
            return state
        assert batch.head is not None
        new = slots - batch.target.tokens.shape[1]
        room = batch.head.text.shape[1] + batch.head.images.shape[1] * self.head.image_slots + new
        return state.replace(head=pack(self.head, params["head"], target, batch.head, room))

    def _prefill_views(
        self, params: Params, batch: PromptBatch, features: Float[Array, "B U P E"] | None, slots: int
    ) -> ChainState:
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
        _, cache = self.model.prefill(own, jnp.concatenate(embeds), rows, slots)
        last = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[:, 0]
        return ChainState(cache.replace(length=rows.length - 1), last)

    def commit(
        self, state: ChainState, emitted: Int[Array, " B"], target: KVCache, kept: Int[Array, "B J"] | None = None
    ) -> ChainState:
        """Keeps what was emitted; everything past it is rolled back by length. A KV head takes over what `target`,
        the target's cache, holds of it.

        Of a tree, `kept` are the nodes on the path that stands, counted in the order in which the draft read them.
        The last of them it may not have read (-1): the next block does, as the newest token but one.
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
        self, params: Params, tokens: Int[Array, "B T"], state: ChainState, mask: TreeMask | None = None
    ) -> tuple[Float[Array, "R B T V"], ChainState]:
        """All views read T more tokens, or nodes of a tree: logits of what follows each."""
        views, head = [], None
        if state.cache is not None:
            tiled = mask
            if mask is not None and mask.seen.shape[0] > 1:
                tiled = mask.replace(seen=self._feed(mask.seen))
            views = [self.model.extend(params["drafter"], self._feed(tokens), state.cache, tiled)]
        if state.head is not None:
            head = self._read_head(params, tokens, state.head, mask)
        return self._together(views, head, state)

    def _read_newest(
        self, params: Params, state: ChainState, recent: Int[Array, "B 2"], count: Int[Array, " B"]
    ) -> tuple[Float[Array, "R B V"], ChainState]:
        """Reads the two newest committed tokens; logits of what follows them. While `count` is 1, the first of the
        two is the prompt's last token, which each row knows for itself. A KV head reads the newest alone: the target
        has read the others."""
        views, head = [], None
        if state.cache is not None:
            assert state.last is not None
            before = jnp.where(count == 1, state.last.reshape(len(self.views), -1), recent[:, 0]).reshape(-1, 1)
            fed = jnp.concatenate([before, self._feed(recent[:, 1:])], axis=1)
            logits, cache = self.model.extend(params["drafter"], fed, state.cache)
            views = [(logits[:, -1:], cache)]
        if state.head is not None:
            head = self._read_head(params, recent[:, 1:], state.head, None)
        logits, state = self._together(views, head, state)
        return logits[:, :, 0], state

    def _read_head(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache, mask: TreeMask | None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        assert self.head is not None
        own, model = joined(params["head"], params["target"]), LanguageModel(self.head.text_config)
        if not self.head.reads_hidden:
            return model.extend(own, tokens, cache, mask)
        embeds = model.embed(own, PromptRows(tokens, cache.length), None)
        before = hidden_before(cache, tokens.shape[1], mask)
        fused = apply(KVHead(self.head), params["head"], embeds, before, method="fuse")
        return model.advance(own, fused, cache, mask)

    def _together(
        self, views: list[tuple[Array, KVCache]], head: tuple[Array, KVCache] | None, state: ChainState
    ) -> tuple[Float[Array, "R B T V"], ChainState]:
        """The logits of draft and head, fitted to the target's vocabulary, and the state after their reading."""
        parts = []
        for logits, cache in views:
            logits = fit_vocabulary(logits, self.vocabulary)
            parts.append(logits.reshape(len(self.views), -1, *logits.shape[1:]))
            state = state.replace(cache=cache)
        if head is not None:
            parts.append(fit_vocabulary(head[0], self.vocabulary)[None])
            state = state.replace(head=head[1])
        return jnp.concatenate(parts), state

    def _feed(self, tokens: Int[Array, "B ..."]) -> Int[Array, "R*B ..."]:
        return jnp.tile(tokens, (len(self.views), *[1] * (tokens.ndim - 1)))

    def _distributions(
        self, logits: Float[Array, "R B V"], weights: Float[Array, "B R"], options: Sampling
    ) -> tuple[Float[Array, "B V"], Float[Array, "R B V"]]:
        """The mixture of the views, and each view's own distribution."""
        view_probs = tempered(logits, options.temperature)
        return mix(view_probs, weights), view_probs

    def within_context(self, state: ChainState, weights: Float[Array, "B R"]) -> Float[Array, "B R"]:
        """The weights that a block is drafted with: those given, but for views that `context` drops."""
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


def rewound(state: ChainState, before: ChainState) -> ChainState:
    """The state with the lengths that it had before a block was drafted."""

    def shorter(cache: KVCache | None, earlier: KVCache | None) -> KVCache | None:
        return None if cache is None or earlier is None else cache.replace(length=earlier.length)

    return state.replace(cache=shorter(state.cache, before.cache), head=shorter(state.head, before.head))


@dataclass(frozen=True)
class ChainDrafter(ViewDrafter):
    """Drafts a chain of `gamma` tokens."""

    @property
    def nodes(self) -> int:
        """Tokens drafted in a block."""
        return self.gamma

    @property
    def reads(self) -> int:
        """Tokens that the draft reads in a block: the newest committed one and its own."""
        return self.gamma

    def draft(
        self,
        params: Params,
        state: ChainState,
        recent: Int[Array, "B 2"],
        count: Int[Array, " B"],
        weights: Float[Array, "B R"],
        options: Sampling,
    ) -> tuple[Draft, ChainState]:
        """Proposes `gamma` tokens after `recent`, the two newest committed ones."""
        initial, greedy = state, options.temperature == 0

        def propose(logits: Array, place: Array) -> tuple[Array, Array, Array]:
            mixed, view_probs = self._distributions(logits, weights, options)
            best = argmax(mixed)

            def drawn() -> tuple[Array, Array]:
                probs = filtered(mixed, options, best)
                return draw(step_keys(options, count, place), probs, greedy), probs

            # Where all rows are greedy none is drawn, and `match` does not ask from what.
            return *jax.lax.cond(jnp.all(greedy), lambda: (best, mixed), drawn), view_probs

        def step(carry: tuple[Array, ChainState], place: Array) -> tuple[tuple[Array, ChainState], tuple[Array, ...]]:
            token, state = carry
            logits, state = self.extend(params, token[:, None], state)
            proposal = propose(logits[:, :, 0], place)
            return (proposal[0], state), proposal

        logits, state = self._read_newest(params, state, recent, count)
        first = propose(logits, jnp.zeros((), jnp.int32))
        (_, state), rest = jax.lax.scan(step, (first[0], state), jnp.arange(1, self.gamma))
        tokens, probs, view_probs = (
            jnp.concatenate([head[None], tail]) for head, tail in zip(first, rest, strict=True)
        )
        draft = Draft(
            tokens=jnp.moveaxis(tokens, 0, 1),
            probs=jnp.moveaxis(probs, 0, 1),
            view_probs=jnp.moveaxis(view_probs, 0, 2),
        )
        return draft, rewound(state, initial)
