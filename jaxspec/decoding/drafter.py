"""Draft from a mixture of views: those of a draft model, and a head on the target.

IbED: one small model reads R views of every prompt as one batch of R*B rows. The views'
distributions are mixed, and all views are fed the same drawn tokens. A head reads the target's own
cache: its keys and values (AASD) or hidden states (EAGLE-3). It is one more view, or the only one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, hidden_before, keep_path
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.lookup import Text, backed_off
from jaxspec.decoding.state import DraftState, Plan, PromptBatch, rewound, step_keys
from jaxspec.models import LanguageModel
from jaxspec.models.head_cache import adopt_target_kv, pack, pack_own
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import KVHead, joined
from jaxspec.models.layers import apply
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.prompts.views import View
from jaxspec.sampling import Sampling, by_place, fit_vocabulary, mix, tempered
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Draft

ContextPolicy = Literal["extrapolate", "drop_view", "error"]


@dataclass(frozen=True)
class BlockInputs:
    """Hold all inputs of one block's draft but the draft's own state."""

    params: Params
    """{"target", "drafter", "head"}; the last two only if there is one."""
    tokens: Int[Array, "B C"]
    """New tokens; entries from `count` on are undefined."""
    count: Int[Array, " B"]
    """Number of committed new tokens."""
    weights: Float[Array, "B R"]
    """Weights of the views."""
    options: Sampling
    target: KVCache | None = None
    """Target's cache of all committed tokens but the newest, which EAGLE-3 heads read."""

    def newest(self, count: int | Array, width: int) -> Int[Array, "B T"]:
        """Return `width` new tokens, of which the first `count` are the newest committed ones."""
        first = jnp.broadcast_to(self.count - count, self.count.shape)
        places = first[:, None] + jnp.arange(width)
        last = self.tokens.shape[1] - 1
        return jnp.take_along_axis(self.tokens, jnp.clip(places, 0, last), axis=1)

    def keys(self, place: int | Array) -> Array:
        """Return the rows' keys for the draws at a place of the block."""
        return step_keys(self.options, self.count, place)


@dataclass(frozen=True, kw_only=True)
class Drafter(ABC):
    """Draft from a mixture of views. Static: part of the compiled program."""

    model: LanguageModel
    """Draft model; any model if there are no `views`."""
    views: tuple[View, ...]
    """Views of the draft model; empty without one."""
    gamma: int
    """Draft length J: number of drafted tokens on the longest path."""
    vocabulary: int
    """Target's V, to which the draft's logits are fitted."""
    context: ContextPolicy = "extrapolate"
    """Policy for a view whose row would pass the draft's trained positions. `extrapolate` drafts
    on, as the papers did. `drop_view` gives it weight 0, but keeps the shortest row if none fits.
    `error` makes the engine refuse the request."""
    head: KVHeadConfig | None = None
    """Head on the target, the view after `views`, whose context is the target's."""
    lookup: bool = False
    """Whether lookup is one more view, the last."""

    @property
    @abstractmethod
    def nodes(self) -> int:
        """Return the number of tokens drafted in a block."""

    @property
    @abstractmethod
    def reads(self) -> int:
        """Return the number of tokens that the draft reads: the newest and the drafted parents."""

    @property
    def width(self) -> int:
        """Return R, the number of distributions in the mixture."""
        return len(self.views) + (self.head is not None) + self.lookup

    def prefill(
        self,
        params: Params,
        batch: PromptBatch,
        features: Float[Array, "B U P E"] | None,
        target: KVCache,
        room: int,
    ) -> DraftState:
        """Run every view of every prompt, and pack the target's cache for a KV head.

        Args:
          params: {"target", "drafter", "head"}; the last two only if there is one.
          features: Target's image features, if the towers are equal.
          target: Target's cache after its prefill.
          room: Number of slots after the prompt.
        """
        state = DraftState(None, None)
        if self.views:
            state = self._prefill_views(params["drafter"], batch, features, room)
        if self.lookup:
            state = state.replace(text=Text.of(batch.prompt, room))
        if self.head is None:
            return state
        if self.head.fused:
            return state.replace(head=self._prefill_own(params, batch, target, room))
        assert batch.head is not None
        packed = batch.head.text.shape[1] + batch.head.images.shape[1] * self.head.image_slots
        return state.replace(
            head=pack(self.head, params["head"], target, batch.head, packed + room)
        )

    def _prefill_own(
        self, params: Params, batch: PromptBatch, target: KVCache, room: int
    ) -> KVCache:
        assert self.head is not None
        rows = batch.prompt
        model, own = self._head_model(params)
        slots = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        rotary = rows.rotary if self.head.text_config.rope_scaling.mrope_section else None
        return pack_own(
            self.head,
            params["head"],
            target,
            model.embed(own, rows, None),
            slots if rotary is None else rotary,
            rows.tokens.shape[1] + room,
        )

    def _prefill_views(
        self, own: Params, batch: PromptBatch, features: Array | None, room: int
    ) -> DraftState:
        if features is None and batch.view_images is not None:
            features = self.model.encode(own, batch.view_images)
        embeds = [
            self.model.embed(own, rows, features, view.pool)
            for view, rows in zip(self.views, batch.views, strict=True)
        ]
        # Images are in the embeddings by now; without them all views' rows are one batch.
        shown = [rows.replace(sources=None, blend=None) for rows in batch.views]
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *shown)
        _, cache = self.model.prefill(
            own, jnp.concatenate(embeds), rows, rows.tokens.shape[1] + room
        )
        last = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[:, 0]
        return DraftState(cache.replace(length=rows.length - 1), last)

    def draft(self, inputs: BlockInputs, state: DraftState) -> tuple[Draft, DraftState]:
        """Propose a block; the state keeps its lengths until `commit`."""
        if state.text is not None:
            state = state.replace(text=state.text.holding(inputs.tokens, inputs.count))
        logits, read = self._read_newest(inputs, state)
        draft, read = self._propose(inputs, logits, read)
        return draft, rewound(read.replace(plan=None), state)

    @abstractmethod
    def _propose(
        self, inputs: BlockInputs, logits: Float[Array, "R B 1 V"], state: DraftState
    ) -> tuple[Draft, DraftState]:
        """Propose a block, given the logits of the token after the newest one."""

    def commit(
        self,
        state: DraftState,
        emitted: Int[Array, " B"],
        target: KVCache,
        kept: Int[Array, "B J"] | None = None,
    ) -> DraftState:
        """Keep the emitted tokens; shorter lengths drop everything behind them.

        target: The target's cache, from which a KV head takes the keys of the emitted tokens.
        kept: For a tree, the nodes on the accepted path, numbered in the order in which the draft
          read them. If it read the root, a and b, and b is accepted, kept is [2, -1, ...] and b
          moves to the slot behind the root. The path's last node may be unread (-1): the next
          block reads it, as the second newest token.
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
        """Return the logits after each of T more tokens, or tree nodes, that all views read."""
        return self._read(params, self._feed(tokens), tokens, state, mask)

    def _read_newest(
        self, inputs: BlockInputs, state: DraftState
    ) -> tuple[Float[Array, "R B 1 V"], DraftState]:
        """Return the logits after the newest committed token; all views read the two newest.

        While `count` is 1, the first of the two is the last token of each view's own prompt. A KV
        head reads the newest alone, since the target has read the others.
        """
        recent = inputs.newest(2, 2)
        fed, head = self._feed(recent), state.head
        if state.last is not None:
            first = jnp.where(self._feed(inputs.count) == 1, state.last, fed[:, 0])
            fed = fed.at[:, 0].set(first)
        if self.head is not None and self.head.parallel:
            state = self.planned(inputs.params, recent[:, 1], state)
        if head is None or self.head is None or not self.head.fused:
            return self._read(inputs.params, fed, recent[:, 1:], state)
        logits, read = self._read_verified(inputs, head)
        parts = [fit_vocabulary(logits, self.vocabulary)[None]]
        if state.cache is not None or state.text is not None:
            others, state = self._read(inputs.params, fed, recent[:, 1:], state.replace(head=None))
            parts = [others[: len(self.views)], *parts, others[len(self.views) :]]
        return jnp.concatenate(parts), state.replace(head=read)

    def _read_verified(
        self, inputs: BlockInputs, head: KVCache
    ) -> tuple[Float[Array, "B 1 V"], KVCache]:
        """Let an EAGLE-3 head read the tokens that it has not read with the target's states.

        These are the tokens of the last block, of each row as many as it emitted. All J + 1 are
        read, and the next tokens overwrite those that a row has fewer.
        """
        assert self.head is not None
        assert inputs.target is not None
        assert inputs.target.hidden is not None
        width = self.gamma + 1
        count = inputs.target.length - head.length
        slots = head.length[:, None] + jnp.arange(width)
        states = jnp.take_along_axis(
            inputs.target.hidden, slots[:, None, :, None], axis=2, mode="clip"
        )[:, 0]
        model, own = self._head_model(inputs.params)
        tokens = PromptRows(inputs.newest(count, width), head.length)
        read = partial(apply, KVHead(self.head), inputs.params["head"])
        before = read(states, method="combine")
        fused = read(model.embed(own, tokens, None), before, method="fuse")
        last = jnp.maximum(count - 1, 0)[:, None]
        logits, cache = model.advance(own, fused, head, scored=last)
        return logits, cache.replace(length=head.length + count)

    def _read(
        self,
        params: Params,
        fed: Array,
        tokens: Int[Array, "B T"],
        state: DraftState,
        mask: TreeMask | None = None,
    ) -> tuple[Float[Array, "R B T V"], DraftState]:
        """Return the logits after each of `tokens`, fitted to the target's vocabulary.

        Lookup gives the probabilities of its matches instead of logits.

        fed: Draft model's tokens, which end in `tokens`. The other views read only `tokens`.
        """
        parts, width = [], tokens.shape[1]
        if state.cache is not None:
            tiled = mask
            if mask is not None and len(mask.seen) > 1:  # a mask per row; else one for all rows
                tiled = mask.replace(seen=self._feed(mask.seen))
            logits, cache = self.model.extend(params["drafter"], fed, state.cache, tiled)
            logits = fit_vocabulary(logits[:, -width:], self.vocabulary)
            parts.append(logits.reshape(len(self.views), -1, *logits.shape[1:]))
            state = state.replace(cache=cache)
        if state.plan is not None:
            logits, plan = self._read_plan(params, tokens, state.plan)
            parts.append(fit_vocabulary(logits, self.vocabulary)[None])
            state = state.replace(plan=plan)
        elif state.head is not None:
            logits, cache = self._read_head(params, tokens, state.head, mask)
            parts.append(fit_vocabulary(logits, self.vocabulary)[None])
            state = state.replace(head=cache)
        if state.text is not None:
            found, text = state.text.read(tokens, self.vocabulary, mask)
            parts.append(found[None])
            state = state.replace(text=text)
        return jnp.concatenate(parts), state

    def _read_head(
        self, params: Params, tokens: Int[Array, "B T"], cache: KVCache, mask: TreeMask | None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        assert self.head is not None
        model, own = self._head_model(params)
        if not self.head.reads_hidden:
            return model.extend(own, tokens, cache, mask)
        embeds = model.embed(own, PromptRows(tokens, cache.length), None)
        before = hidden_before(cache, tokens.shape[1], mask)
        fused = apply(KVHead(self.head), params["head"], embeds, before, method="fuse")
        return model.advance(own, fused, cache, mask)

    def planned(self, params: Params, newest: Int[Array, " B"], state: DraftState) -> DraftState:
        """Run one pass of a parallel head over the newest token and the masks behind it."""
        assert self.head is not None
        assert state.head is not None
        model, own = self._head_model(params)
        cache = state.head
        embeds = model.embed(own, PromptRows(newest[:, None], cache.length), None)[:, 0]
        before = hidden_before(cache, 1, None)[:, 0] if self.head.reads_hidden else None
        given = embeds, before, self.gamma
        block = apply(KVHead(self.head), params["head"], *given, method="masked")
        scores, cache = model.advance(own, block, cache)
        return state.replace(head=cache, plan=Plan(scores, jnp.zeros((), jnp.int32)))

    def _read_plan(
        self, params: Params, tokens: Int[Array, "B T"], plan: Plan
    ) -> tuple[Float[Array, "B T V"], Plan]:
        """Return the scores of what follows each of T tokens at the plan's place."""
        assert self.head is not None
        scores = jax.lax.dynamic_slice_in_dim(plan.scores, plan.place, 1, axis=1)
        scores = jnp.broadcast_to(scores, (*tokens.shape, scores.shape[-1]))
        if self.head.markov:
            model, own = self._head_model(params)
            embeds = model.embed(own, PromptRows(tokens, tokens[:, 0]), None)
            added = apply(KVHead(self.head), params["head"], embeds, method="correction")
            scores += fill_vocabulary(model.text, added)
        return scores, plan.replace(place=plan.place + 1)

    def _head_model(self, params: Params) -> tuple[LanguageModel, Params]:
        assert self.head is not None
        model = LanguageModel(self.head.text_config)
        return model, joined(params["head"], params["target"], model.text.draft_vocabulary)

    def _feed(self, tokens: Int[Array, "B ..."]) -> Int[Array, "R*B ..."]:
        """Repeat the rows for each view: [a, b] becomes [a, b, a, b] with the views M and T."""
        return jnp.tile(tokens, (len(self.views), *[1] * (tokens.ndim - 1)))

    def _distributions(
        self, inputs: BlockInputs, logits: Float[Array, "R B T V"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "R B T V"]]:
        """Return the mixture of the views at T places, and each view's own distributions."""
        temperature, weights = inputs.options.temperature, inputs.weights
        models = len(logits) - self.lookup
        view_probs = by_place(lambda place: tempered(place, temperature))(logits[:models])
        if self.lookup:
            found = backed_off(logits[-1], view_probs)
            view_probs = jnp.concatenate([view_probs, found[None]])
        return by_place(lambda place: mix(place, weights))(view_probs), view_probs

    def within_context(
        self, state: DraftState, weights: Float[Array, "B R"]
    ) -> Float[Array, "B R"]:
        """Return the weights for the next block, 0 for views that `context` drops."""
        if self.context != "drop_view" or state.cache is None:
            return weights
        length = state.cache.length.reshape(len(self.views), -1).T
        length = jnp.pad(length, ((0, 0), (0, self.width - len(self.views))))
        fits = length + 1 + self.gamma <= self.model.text.max_position_embeddings
        kept = jnp.where(fits, weights, 0.0)
        total = kept.sum(-1, keepdims=True)
        shortest = jax.nn.one_hot(jnp.argmin(length, axis=-1), self.width)
        return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), shortest)
