"""Draft with a head on the target: token by token, or a block in one pass.

All kinds of heads draft so. What differs is their module (`jaxspec.heads.head`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache, TreeMask, newest_hidden, states_after, write
from jaxspec.decoding.inputs import Images
from jaxspec.decoding.sources.source import Buckets, Committed, Prefilled, Source, Verified
from jaxspec.heads.blocks import embedder, joined, keys_of, mask_of, prompt_of
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.head import Head, KeyedHead, Places, Reading, Room, empty_room
from jaxspec.heads.making import abstract_head, head_shardings, module_of
from jaxspec.models.inputs import PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.models.layers import apply
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.prompts.rows import bucket, image_spans
from jaxspec.sharding import gather
from jaxspec.typing import Array, Float, Int, Params, Tokens


class Drafted(struct.PyTreeNode):
    """Hold a block that is drafted token by token."""

    context: Any
    room: Room
    """Keys and values of the tokens that were read."""
    states: Float[Array, "B room D"] | None
    """The head's hidden states at them; None for a head that reads none."""
    read: Int[Array, ""]
    """Their number."""


class Planned(struct.PyTreeNode):
    """Hold the scores of a block from one pass; its tokens are chosen one by one."""

    context: Any
    scores: Float[Array, "B J V"]
    place: Int[Array, ""]
    """Place of the next token, 0 at first; all nodes of a tree's level have the same."""


Block = Drafted | Planned


@dataclass(frozen=True)
class HeadSource(Source[Any, Any]):
    """Draft with a head, which reads the target's cache and borrows what it lacks."""

    config: HeadConfig
    gamma: int
    target: LanguageModel

    @property
    def name(self) -> str:  # pyright: ignore
        return self.config.name

    @property
    def module(self) -> Head:
        return module_of(self.config)

    @property
    def model(self) -> LanguageModel:
        """Return its own layers as a model."""
        return LanguageModel(self.config.text_config)

    @property
    def vocabulary(self) -> int:
        return self.model.text.scored_tokens

    @property
    def target_states(self) -> tuple[int, ...] | None:
        return self.config.target_states

    @property
    def target_share(self) -> float:
        return len(self.config.target_keys) / self.target.text.cached_layers

    @property
    def longest(self) -> int | None:
        return self.config.gamma if self.module.in_one_pass else None

    @property
    def lengths(self) -> tuple[int, ...]:
        most = self.longest
        return super().lengths if most is None else tuple(sorted({min(7, most), most}))

    def planned(self, gamma: int, alone: bool) -> HeadSource:
        return replace(self, gamma=gamma)

    def passes(self, gamma: int) -> int:
        return 1 if self.module.in_one_pass else gamma

    def prefill(self, prefilled: Prefilled, inputs: Any) -> Any:
        """Return the head's context of the prompt, with room for the answer if it holds keys."""
        params, rows, target = prefilled.params, prefilled.batch.prompt, prefilled.target
        images, width = None, self.config.text_config.hidden_size
        if prefilled.features is None:
            rows = rows.replace(sources=None)
        elif self.config.shows_images and rows.images is not None:
            embeds = self.target.embed(params["target"], rows, prefilled.features)
            images = embeds[..., :width]  # without DeepStack's
        prompt = prompt_of(self.config, partial(self._embed, params), rows, inputs, images)
        context = self._apply(params, "context", self._reading(target), prompt)
        if not isinstance(self.module, KeyedHead):
            return context
        return context.resized(context.slots + prefilled.room).replace(
            length=target.length - self.module.behind
        )

    def catch_up(self, committed: Committed, state: Any) -> Any:
        if not isinstance(self.module, KeyedHead):
            return state
        most = committed.target.length - self.module.behind - (self.gamma + 1)
        return jax.lax.while_loop(
            lambda context: jnp.any(context.length < most),
            partial(self._caught_up, committed),
            state,
        )

    def begin(self, committed: Committed, state: Any) -> tuple[Float[Array, "one B one V"], Block]:
        """Read only the newest token, since the target has read the others."""
        context, target = self._caught_up(committed, state), committed.target
        newest, before = committed.newest(1, 1), None
        if self.config.states_width and self.module.reads_before:
            before = self._apply(committed.params, "combine", newest_hidden(target))
        if self.module.in_one_pass:
            return self._planned(committed, context, newest, before)
        text, count = self.config.text_config, len(newest)
        room = empty_room(text, count, committed.reads, target.k[0].dtype)
        block = Drafted(context, room, None, jnp.zeros((), jnp.int32))
        return self._read(committed, block, newest, before, None)

    def score(
        self, committed: Committed, scratch: Block, tokens: Tokens, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "one B T V"], Block]:
        """Read drafted tokens, each next to the head's own state before it.

        A block from one pass was read already: return what follows each token at the plan's place.
        """
        if isinstance(scratch, Planned):
            scores = jax.lax.dynamic_slice_in_dim(scratch.scores, scratch.place, 1, axis=1)
            scores = jnp.broadcast_to(scores, (*tokens.shape, scores.shape[-1]))
            if self.config.markov:  # the terms of a Markov head for these tokens
                embeds = self._embed(committed.params, tokens)
                added = self._apply(committed.params, "correction", tokens, embeds)
                scores += fill_vocabulary(self.model.text, added)
            return scores[None], scratch.replace(place=scratch.place + 1)
        before = None
        if scratch.states is not None:
            above = scratch.read[None, None] - 1
            if tree is not None:
                above = tree.parents(tokens.shape[1])
            before = jnp.take_along_axis(scratch.states, above[..., None], axis=1)
        return self._read(committed, scratch, tokens, before, tree)

    def commit(self, state: Any, scratch: Block, verified: Verified) -> Any:
        """Keep the context, which the next block extends by what was verified."""
        return scratch.context

    def _caught_up(self, committed: Committed, context: Any) -> Any:
        """Return the context with the keys of all tokens that the target has read.

        These are the tokens of the last block, of each row as many as it emitted. All J + 1 are
        made, and the next ones overwrite those that a row has fewer. Of a row that has more, the
        first J + 1 are made.
        """
        module, target = self.module, committed.target
        if not isinstance(module, KeyedHead):
            return context
        assert target.hidden is not None
        width = self.gamma + 1
        missing = target.length - module.behind - context.length
        states, slots = states_after(target.hidden, context.length, width)
        after = None
        if module.behind:  # slot p is of token p + 1
            tokens = committed.newest(missing + 1, width)
            after = self._embed(committed.params, tokens)
        pairs = self._apply(
            committed.params, "keys", states, after, slots, self._rotary(target, slots), context
        )
        keys, values = (
            tuple(write(leaf, new, slots) for leaf, new in zip(leaves, news, strict=True))
            for leaves, news in zip((context.k, context.v), zip(*pairs, strict=True), strict=True)
        )
        length = context.length + jnp.minimum(missing, width)
        return context.replace(k=keys, v=values, length=length)

    def _read(
        self,
        committed: Committed,
        block: Drafted,
        tokens: Tokens,
        before: Float[Array, "B T D"] | None,
        tree: TreeMask | None,
    ) -> tuple[Float[Array, "one B T V"], Drafted]:
        """Read T tokens of a block; return the scores after each, and the block with them."""
        params, target, module = committed.params, committed.target, self.module
        slots = jnp.arange(committed.reads)
        if tree is None:
            depth, mask = block.read[None, None], (slots <= block.read)[None, None]
        else:
            depth, room = tree.depth, ((0, 0), (0, 0), (0, committed.reads - tree.seen.shape[-1]))
            mask = jnp.pad(tree.seen, room)
        newest = target.length[:, None]
        first = newest - module.behind + (depth if module.moves else 0)
        first = jnp.broadcast_to(first, tokens.shape)
        at = Places(newest, self._rotary(target, first), block.read, mask)
        hidden, states, room = self._apply(
            params,
            "step",
            self._embed(params, tokens),
            before,
            at,
            block.context,
            self._reading(target),
            block.room,
        )
        all_states = block.states
        if before is not None:
            if all_states is None:
                shape = (len(states), committed.reads, states.shape[-1])
                all_states = jnp.zeros(shape, states.dtype)
            all_states = jax.lax.dynamic_update_slice_in_dim(all_states, states, block.read, axis=1)
        block = block.replace(room=room, states=all_states, read=block.read + tokens.shape[1])
        return self._scores(params, hidden)[None], block

    def _planned(
        self,
        committed: Committed,
        context: Any,
        newest: Int[Array, "B 1"],
        before: Float[Array, "B 1 D"] | None,
    ) -> tuple[Float[Array, "one B one V"], Block]:
        """Return the scores of the token after the newest one, and the plan of a block."""
        params, target, module = committed.params, committed.target, self.module
        width = self.config.slots_of(self.gamma)
        mask = mask_of(self.config, partial(self._embed, params))
        x = self._apply(params, "block", self._embed(params, newest), before, mask, width)[:, 0]
        slots = target.length[:, None] + jnp.arange(width)
        at = Places(
            target.length[:, None],
            self._rotary(target, slots),
            0,
            jnp.asarray(module.whole_block(width))[None],
        )
        room = empty_room(self.config.text_config, len(x), width, x.dtype)
        x, _ = self._apply(params, "read", x, at, context, self._reading(target), room)
        hidden, _ = self._apply(params, "closed", x[:, -self.gamma :])
        scores = self._scores(params, hidden)
        return self.score(committed, Planned(context, scores, jnp.zeros((), jnp.int32)), newest)

    def _scores(self, params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the scores of hidden states; on a mesh each device holds whole rows."""
        if self.config.scores_itself:
            return gather(self._apply(params, "scores", hidden), "batch")
        return gather(self.model.logits(self.weights(params), hidden), "batch")

    def _reading(self, target: KVCache) -> Reading:
        states = None if target.hidden is None else target.hidden[:, 0]
        return Reading(*keys_of(self.config, target), states)

    def _rotary(self, target: KVCache, slots: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Return the positions of the target's slots, which images shift with M-RoPE."""
        return slots + target.shift[:, None] if self.config.follows_mrope else slots

    def _embed(self, params: Params, tokens: Tokens) -> Float[Array, "B T D"]:
        return embedder(self.config, params[self.name], params["target"])(tokens)

    def _apply(self, params: Params, method: str, *inputs: Any) -> Any:
        """Return what a method of the head's module does with its own parameters."""
        return apply(self.module, params[self.name], *inputs, method=method)

    # the host's side

    def sizes(
        self, lengths: Sequence[int], slot_images: np.ndarray, buckets: Buckets
    ) -> tuple[int, ...]:
        if not self.config.reads_spans:
            return ()
        images = int(slot_images.max(initial=-1)) + 1
        return (bucket(images, buckets.images, "images of one prompt"),)

    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Images,
        slot_images: Sequence[np.ndarray],
        sizes: tuple[int, ...],
    ) -> np.ndarray | None:
        return image_spans(slot_images, *sizes) if self.config.reads_spans else None

    def shapes(self, dtype: Any) -> Params:
        """Return the head's shapes, with the target's rows of a draft vocabulary."""
        shapes, text = dict(abstract_head(self.config)), self.config.text_config
        if text.draft_vocabulary and "lm_head" not in shapes:
            rows = (len(text.draft_vocabulary), text.hidden_size)
            shapes["lm_head"] = {"weight": jax.ShapeDtypeStruct(rows, dtype)}

        def cast(leaf: Any) -> Any:
            is_whole = jnp.issubdtype(leaf.dtype, jnp.integer)
            return leaf if is_whole else jax.ShapeDtypeStruct(leaf.shape, dtype)

        return jax.tree.map(cast, shapes)

    def places(self, params: Params, mesh: Any) -> Any:
        """Return the placement of its parameters on a mesh: split as the target's."""
        return head_shardings(self.config, params, mesh)

    def weights(self, params: Params) -> Params:
        """Return the head's decoder with the parts that it borrows, as its `model` reads them."""
        head = params[self.name].get("model", params[self.name])
        return joined(head, params["target"], self.model.text.draft_vocabulary)
