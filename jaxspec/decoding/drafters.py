"""Drafters: what proposes a block of tokens.

IbED's: one small model reads R views of every prompt as one batch of R*B rows, the views' distributions are
mixed, and all views are fed the same drawn tokens: a chain here, a tree in `tree_drafters.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, keep_path
from jaxspec.decoding.state import PromptBatch, step_keys
from jaxspec.decoding.views import View
from jaxspec.models import LanguageModel
from jaxspec.sampling import Sampling, draw, filtered, fit_vocabulary, mix, tempered
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Draft

ContextPolicy = Literal["extrapolate", "drop_view", "error"]


class ChainState(struct.PyTreeNode):
    """The draft's cache, rows view-major (row r*B + b is view r of request b).

    Between blocks a row's length is two short of the committed tokens: after full acceptance the draft has not
    read its own last proposal, so every block begins by (re-)reading the two newest tokens.
    """

    cache: KVCache
    last: Int[Array, " R*B"]
    """Last token of each row's prompt: what the first block re-reads."""


@dataclass(frozen=True)
class ViewDrafter:
    """What chains and trees drafted from a mixture of views share. Static: part of the compiled program."""

    model: LanguageModel
    views: tuple[View, ...]
    gamma: int
    """J: drafted tokens on the longest path."""
    vocabulary: int
    """V of the target; the draft's logits are fitted to it."""
    context: ContextPolicy = "extrapolate"
    """What happens to a view whose row would pass the draft's trained positions: `extrapolate` drafts on, as the
    papers did; `drop_view` gives it weight 0 (the shortest row stays if none fits); `error` is refused by the
    engine before decoding."""

    def prefill(
        self, params: Params, batch: PromptBatch, features: Float[Array, "B U P E"] | None, slots: int
    ) -> ChainState:
        """Runs every view of every prompt. `features` are the target's, when the towers are the same."""
        if features is None and batch.view_images is not None:
            features = self.model.encode(params, batch.view_images)
        embeds = [
            self.model.embed(params, rows, features, view.pool)
            for view, rows in zip(self.views, batch.views, strict=True)
        ]
        # What the views show of images went into their embeddings; the rest is one batch.
        shown = [rows.replace(sources=None, blend=None) for rows in batch.views]
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *shown)
        _, cache = self.model.prefill(params, jnp.concatenate(embeds), rows, slots)
        last = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[:, 0]
        return ChainState(cache.replace(length=rows.length - 1), last)

    def commit(self, state: ChainState, emitted: Int[Array, " B"], kept: Int[Array, "B J"] | None = None) -> ChainState:
        """Keeps what was emitted; everything past it is rolled back by length.

        Of a tree, `kept` are the nodes on the path that stands, counted in the order in which the draft read them.
        The last of them it may not have read (-1): the next block does, as the newest token but one.
        """
        cache = state.cache
        if kept is not None:
            cache = keep_path(cache, cache.length + 1, self._feed(jnp.maximum(kept, 0)))
        return state.replace(cache=cache.replace(length=cache.length + jnp.tile(emitted, len(self.views))))

    def _read_newest(
        self, params: Params, state: ChainState, recent: Int[Array, "B 2"], count: Int[Array, " B"]
    ) -> tuple[Float[Array, "R*B V"], KVCache]:
        """Reads the two newest committed tokens; logits of what follows them. While `count` is 1, the first of the
        two is the prompt's last token, which each row knows for itself."""
        before = jnp.where(count == 1, state.last.reshape(len(self.views), -1), recent[:, 0]).reshape(-1, 1)
        fed = jnp.concatenate([before, self._feed(recent[:, 1:])], axis=1)
        logits, cache = self.model.extend(params, fed, state.cache)
        return logits[:, -1], cache

    def _feed(self, tokens: Int[Array, "B T"]) -> Int[Array, "R*B T"]:
        return jnp.tile(tokens, (len(self.views), 1))

    def _distributions(
        self, logits: Float[Array, "R*B V"], weights: Float[Array, "B R"], options: Sampling
    ) -> tuple[Float[Array, "B V"], Float[Array, "B V"], Float[Array, "R B V"]]:
        """The mixture of the views, the same filtered, which is what tokens are drawn from, and each view's own."""
        logits = fit_vocabulary(logits, self.vocabulary)
        view_probs = tempered(logits.reshape(len(self.views), -1, logits.shape[-1]), options.temperature)
        mixed = mix(view_probs, weights)
        return mixed, filtered(mixed, options, jnp.argmax(mixed, axis=-1)), view_probs

    def _within_context(self, state: ChainState, weights: Float[Array, "B R"]) -> Float[Array, "B R"]:
        if self.context != "drop_view":
            return weights
        length = state.cache.length.reshape(len(self.views), -1).T
        fits = length + 1 + self.gamma <= self.model.text.max_position_embeddings
        kept = jnp.where(fits, weights, 0.0)
        total = kept.sum(-1, keepdims=True)
        shortest = jax.nn.one_hot(jnp.argmin(length, axis=-1), len(self.views))
        return jnp.where(total > 0, kept / jnp.where(total > 0, total, 1.0), shortest)


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
        weights = self._within_context(state, weights)

        def propose(logits: Array, place: Array) -> tuple[Array, Array, Array]:
            _, probs, view_probs = self._distributions(logits, weights, options)
            return draw(step_keys(options, count, place), probs, options.temperature == 0), probs, view_probs

        def step(carry: tuple[Array, KVCache], place: Array) -> tuple[tuple[Array, KVCache], tuple[Array, ...]]:
            token, cache = carry
            logits, cache = self.model.extend(params, self._feed(token[:, None]), cache)
            proposal = propose(logits[:, -1], place)
            return (proposal[0], cache), proposal

        logits, cache = self._read_newest(params, state, recent, count)
        first = propose(logits, jnp.zeros((), jnp.int32))
        (_, cache), rest = jax.lax.scan(step, (first[0], cache), jnp.arange(1, self.gamma))
        tokens, probs, view_probs = (
            jnp.concatenate([head[None], tail]) for head, tail in zip(first, rest, strict=True)
        )
        draft = Draft(
            tokens=jnp.moveaxis(tokens, 0, 1),
            probs=jnp.moveaxis(probs, 0, 1),
            view_probs=jnp.moveaxis(view_probs, 0, 2),
        )
        return draft, state.replace(cache=cache.replace(length=state.cache.length))
