"""Draft with a model that reads the prompt in several views (IbED).

The views of a request share weights and drafted tokens, and differ in their caches: the model is
mapped over a leading axis of views with `jax.vmap`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache, TreeMask, keep_path
from jaxspec.decoding.inputs import Images, Member
from jaxspec.decoding.sources.source import Buckets, Committed, Prefilled, Source, Verified
from jaxspec.models.families import abstract_params, split_tower
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.prompts.rows import bucket
from jaxspec.typing import Array, Float, Int, Params, Tokens

Tree = TypeVar("Tree")


class ViewRows(struct.PyTreeNode):
    """Hold the prompts of B requests in each view."""

    rows: tuple[PromptRows, ...]
    images: Images
    """Tiles for the draft's own tower; None if it has none or shares the target's features."""


class DraftState(struct.PyTreeNode):
    """Carry the draft's cache from block to block, view-major: row r*B + b is view r of request b.

    Between blocks a row is two tokens short of the committed ones: after full acceptance the draft
    has not read its own last proposal, so every block reads the two newest tokens again.
    """

    cache: KVCache
    last: Int[Array, " rows"]
    """Last token of each row's prompt, which the first block reads again."""
    start: Int[Array, " rows"]
    """Slot of the first new token."""


@dataclass(frozen=True)
class DraftModel(Source[DraftState, KVCache]):
    """Draft with a model, mapped over its R views of a prompt."""

    name = "draft"
    views: tuple[Member, ...]
    """The model with each of its views."""
    shares_tower: bool = False
    """Whether it reads the target's image features, because both towers are equal."""

    @property
    def model(self) -> LanguageModel:
        return self.views[0].model

    @property
    def width(self) -> int:
        return len(self.views)

    @property
    def vocabulary(self) -> int:
        return self.model.text.scored_tokens

    @property
    def forms(self) -> tuple[Member, ...]:
        return self.views

    @property
    def tower(self) -> LanguageModel | None:
        reads = any(view.reads_images for view in self.views)
        return self.model if reads and not self.shares_tower else None

    def prefill(self, prefilled: Prefilled, inputs: ViewRows) -> DraftState:
        """Read all views' prompts as one batch; `begin` reads their last tokens again."""
        weights, features = prefilled.params[self.name], prefilled.features
        if not self.shares_tower:
            features = None if inputs.images is None else self.model.encode(weights, inputs.images)
        embeds = [
            self.model.embed(weights, rows, features, view.pool)
            for view, rows in zip(self.views, inputs.rows, strict=True)
        ]
        # Images are in the embeddings by now, so all views' rows can be one batch.
        rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *_marked(inputs.rows))
        slots = rows.tokens.shape[1] + prefilled.room
        _, cache = self.model.prefill(weights, jnp.concatenate(embeds), rows, slots)
        last = jnp.take_along_axis(rows.tokens, rows.length[:, None] - 1, axis=1)[:, 0]
        return DraftState(cache.replace(length=rows.length - 1), last, rows.length)

    def catch_up(self, committed: Committed, state: DraftState) -> DraftState:
        """Read committed tokens, a block at a time, until only two are left for `begin`."""
        last, start, cache = self._by_view((state.last, state.start, state.cache))
        extend = partial(self.model.extend, committed.params[self.name])

        def missing(cache: KVCache) -> Int[Array, "R B"]:
            return start + committed.count - 2 - cache.length

        def read(cache: KVCache) -> KVCache:
            first = cache.length - start  # -1: the prompt's last token
            tokens = jax.vmap(
                lambda first, last: _newest_tokens(committed.tokens, last, first, committed.reads)
            )(first, last)
            count = jnp.minimum(missing(cache), committed.reads)
            _, longer = jax.vmap(extend)(tokens, cache)
            return longer.replace(length=cache.length + count)

        cache = jax.lax.while_loop(lambda cache: jnp.any(missing(cache) > 0), read, cache)
        return state.replace(cache=_flat_views(cache))

    def begin(
        self, committed: Committed, state: DraftState
    ) -> tuple[Float[Array, "R B one V"], KVCache]:
        """Read the two newest tokens.

        While `count` is 1, the first of the two is the last token of each view's own prompt.
        """
        last, cache = self._by_view((state.last, state.cache))
        tokens = jax.vmap(
            lambda last: _newest_tokens(committed.tokens, last, committed.count - 2, 2)
        )(last)
        extend = partial(self.model.extend, committed.params[self.name])
        scores, cache = jax.vmap(extend)(tokens, cache)
        return scores[:, :, 1:], cache

    def score(
        self, committed: Committed, scratch: KVCache, tokens: Tokens, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "R B T V"], KVCache]:
        """Let all views read the same tokens."""
        extend = partial(self.model.extend, committed.params[self.name])
        return jax.vmap(lambda cache: extend(tokens, cache, tree))(scratch)

    def commit(self, state: DraftState, scratch: KVCache, verified: Verified) -> DraftState:
        """Keep the emitted tokens; a shorter length drops everything behind them.

        The accepted path of a tree moves behind the root. Its last node may be unread: the next
        block reads it, as the second newest token.
        """
        cache = scratch.replace(length=self._by_view(state.cache.length))
        if verified.path is not None:
            nodes = jnp.maximum(verified.path, 0)
            cache = jax.vmap(lambda cache: keep_path(cache, cache.length + 1, nodes))(cache)
        cache = cache.replace(length=cache.length + verified.emitted)
        return state.replace(cache=_flat_views(cache))

    def _by_view(self, tree: Tree) -> Tree:
        """Return the leaves [R, B, ...] of view-major leaves [R*B, ...]."""
        return jax.tree.map(lambda leaf: leaf.reshape(self.width, -1, *leaf.shape[1:]), tree)

    def shapes(self, dtype: Any) -> Params:
        shapes = abstract_params(self.model.config, dtype)
        return split_tower(shapes)[1] if self.shares_tower else shapes

    def sizes(
        self, lengths: Sequence[int], slot_images: np.ndarray, buckets: Buckets
    ) -> tuple[int, ...]:
        return (bucket(max(lengths), buckets.prompt, "prompt tokens of a view"),)

    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Images,
        slot_images: Sequence[np.ndarray],
        sizes: tuple[int, ...],
    ) -> ViewRows:
        return ViewRows(tuple(rows), images)


def _marked(views: Sequence[PromptRows]) -> list[PromptRows]:
    """Return the rows with sources of one form, which only mark the slots that show an image."""
    texts = [rows.replace(sources=None, blend=None) for rows in views]
    masks = [rows.images for rows in views]
    if all(mask is None for mask in masks):
        return texts
    none = jnp.zeros(views[0].tokens.shape, bool)
    marks = [jnp.where(none if mask is None else mask, 0, TEXT) for mask in masks]
    return [text.replace(sources=mark[..., None]) for text, mark in zip(texts, marks)]


def _flat_views(tree: Tree) -> Tree:
    """Return the view-major leaves [R*B, ...] of leaves [R, B, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), tree)


def _newest_tokens(
    tokens: Int[Array, "B C"], last: Int[Array, " B"], first: Int[Array, " B"], count: int
) -> Int[Array, "B T"]:
    """Return `count` new tokens from `first` on, where -1 is the prompt's last token."""
    places = first[:, None] + jnp.arange(count)
    new = jnp.take_along_axis(tokens, jnp.clip(places, 0, tokens.shape[1] - 1), axis=1)
    return jnp.where(places < 0, last[:, None], new)
