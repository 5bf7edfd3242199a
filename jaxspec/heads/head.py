"""Define what a kind of head computes, once for decoding and training.

A head drafts blocks. Within a block its layers read *segments*, in one softmax: slots of the
target's cache, slots that the head made of what the target has read (its *context*), and the tokens
of the block so far (its *room*). With gamma = 3 and the newest token x at slot 7, `step` reads x,
then the drafted tokens a and b:

    step(x)  reads slots before 7, x
    step(a)  reads slots before 7, x a
    step(b)  reads slots before 7, x a b

In a tree, and in training, a step reads several tokens, and a mask says which of the room each one
reads. Training runs the blocks of all anchors of a row side by side, each with a room of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.config import RotaryConfig
from jaxspec.heads.config import HeadConfig
from jaxspec.models.attention import Segment, attend_segments
from jaxspec.models.decoder import Attention
from jaxspec.models.layers import INIT, call_layer
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Bool, Float, Int, Keys, Params, Queries, Vectors

KeysValues = tuple[Float[Array, "B _K ... S _H"], Float[Array, "B _K ... S _H"]]
"""Keys and values of a layer; with an axis A, those of each anchor's block."""
Room = tuple[KeysValues, ...]
"""Keys and values of the tokens of a block, of each layer."""
Slots = Int[Array, "B T"]
"""Slots of T tokens, or their positions."""
Fused = Float[Array, "... fused"]
"""The target's hidden states of one layer, or those of several side by side."""
Spans = Int[Any, "B I 2"]
"""First slot and number of slots of each image of a prompt; 0 slots for an absent one."""


class Reading(struct.PyTreeNode):
    """Hold what a head reads of its target's tokens: S slots of a cache, or whole rows."""

    k: tuple[Float[Array, "B _K S _H"], ...] = ()
    """Keys of the target's layers that it reads, without repeats."""
    v: tuple[Float[Array, "B _K S _H"], ...] = ()
    states: Float[Array, "B S fused"] | None = None
    """Hidden states; None for a head that reads keys only."""


class Prompt(struct.PyTreeNode):
    """Hold the rest of what a head reads of prompts, or of whole rows in training."""

    embeds: Float[Array, "B L D"] | None
    """The head's embeddings of the tokens; None for a head that reads none."""
    rotary: Int[Array, "B L"] | Int[Array, "B 3 L"]
    """Positions of the tokens."""
    spans: Spans | None = None
    """Slots of images, for a head that `reads_spans`."""
    images: Bool[Array, "B L"] | None = None
    """Slots that show an image; None without images."""
    image_embeds: Float[Array, "B L D"] | None = None
    """The target's embeddings there, for a head that reads them."""
    first: Int[Array, "B L"] | None = None
    """First slot of each slot's conversation, in training rows that hold several; None: slot 0."""


class Places(struct.PyTreeNode):
    """Place T tokens of blocks."""

    newest: Int[Array, "#B roots"]
    """Slot of the newest committed token, with which a block begins: of all, or of each token."""
    rotary: Int[Array, "B T"] | Int[Array, "B 3 T"]
    """Positions of the rotary angles."""
    read: Int[Array, ""] | int
    """Number of tokens in the room so far, behind which these go."""
    seen: Bool[Array, "#B #T room"]
    """Tokens of the room that each token reads, itself included."""
    first: Int[Array, "#B roots"] | None = None
    """First slot of the newest token's conversation, as in `Prompt`."""

    def own(
        self, seen: Bool[Array, "#B roots S"], slots: Int[Array, "#B S"]
    ) -> Bool[Array, "#B roots S"]:
        """Return which seen slots are of the blocks' own conversations."""
        return seen if self.first is None else seen & (slots[:, None] >= self.first[..., None])


class BlockAttention(Attention):
    """Attend to segments, and to the tokens of the own block."""

    last: ClassVar[float | None] = None
    """Bias of the block's tokens."""

    def read(self, q: Queries, k: Keys, v: Keys, at: Any, cache: Any) -> tuple[Queries, Any]:
        segments, room = cache

        def added(old: Array, new: Array) -> Array:
            new = new.swapaxes(1, 2).reshape(*old.shape[:-2], -1, old.shape[-1])
            return jax.lax.dynamic_update_slice_in_dim(old, new, at.read, axis=-2)

        k, v = map(added, room, (k, v))
        bias = None if self.last is None else jnp.full((1, at.seen.shape[-1]), self.last)
        return attend_segments(q, [*segments, Segment(k, v, at.seen, bias)]), (segments, (k, v))

    def attend(self, q: Queries, at: Any, cache: Any) -> Queries:
        """Attend to segments only, of a layer that makes no keys."""
        return attend_segments(q, cache[0])


class Head(nn.Module):
    """Hold a head's parameters, and compute its blocks. `setup` makes `layers` and `norm`."""

    config: HeadConfig

    behind: ClassVar[int] = 0
    """Slots by which its own tokens lie before the target's: slot p of an EAGLE head is of token
    p + 1."""
    moves: ClassVar[bool] = True
    """Whether each token of a block has a position of its own, not the newest token's."""
    in_one_pass: ClassVar[bool] = False
    """Whether it drafts a block in one pass, see `block`."""
    causal: ClassVar[bool] = True
    """Whether a token of such a block sees only those up to itself."""
    reads_before: ClassVar[bool] = True
    """Whether a block's tokens read the state before them, of a head that reads states."""

    def whole_block(self, count: int) -> np.ndarray:
        """Return which tokens of a one-pass block each of its tokens sees, bool [count, count]."""
        return np.tri(count, dtype=bool) if self.causal else np.ones((count, count), bool)

    # what a block reads

    def context(self, reading: Reading, prompt: Prompt) -> Any:
        """Return what the head makes of prompts, or of whole rows in training; () for nothing."""
        return ()

    @abstractmethod
    def segments(self, context: Any, reading: Reading, at: Places) -> list[list[Segment]]:
        """Return the segments that each layer reads."""

    # what a block computes

    def combine(self, states: Fused) -> Vectors:
        """Return the hidden states that the head reads of the target's."""
        return states

    def fuse(self, embeds: Vectors, before: Any, context: Any, slots: Any) -> Array:
        """Return the layers' inputs from embeddings and the hidden states that predicted them.

        Args:
          before: Hidden states [..., D]; None for a head that reads none.
          slots: The tokens' slots, counted from their conversation's first (a tree's nodes may
            have larger ones); None in a block of one pass.
        """
        return embeds

    def closed(self, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Array]:
        """Return the states that are scored, and those that the next tokens read, of the layers'
        output."""
        normed = self.norm(x)  # pyright: ignore
        return normed, normed

    def step(
        self,
        embeds: Float[Array, "B T D"],
        before: Float[Array, "B T D"] | None,
        at: Places,
        context: Any,
        reading: Reading,
        room: Room,
    ) -> tuple[Float[Array, "B T D"], Array, Room]:
        """Read T tokens; return the states to score, those that the next tokens read, and the room.

        Args:
          embeds: Embeddings of the tokens.
          before: Hidden state before each token: `combine` of the target's, or what a step
            returned.
        """
        slots = at.newest + at.read if at.first is None else at.newest + at.read - at.first
        x = self.fuse(embeds, before, context, slots)
        x, room = self.read(x, at, context, reading, room)
        return *self.closed(x), room

    def read(
        self, x: Float[Array, "B T width"], at: Places, context: Any, reading: Reading, room: Room
    ) -> tuple[Float[Array, "B T D"], Room]:
        """Run the layers over T tokens of blocks."""
        filled = []
        segments = self.segments(context, reading, at)
        for layer, segment, kv in zip(self.layers, segments, room, strict=True):  # pyright: ignore
            x, (_, kv) = call_layer(layer, x, at, (segment, kv))
            filled.append(kv)
        return x, tuple(filled)

    def block(
        self,
        embeds: Float[Array, "B A D"],
        before: Float[Array, "B A D"] | None,
        mask: Float[Array, " D"] | None,
        count: int,
    ) -> Float[Array, "B A count width"]:
        """Return the layers' inputs of blocks of `count` tokens, of which the first is known.

        Args:
          embeds: Embeddings of the first tokens.
          before: The hidden states that predicted them.
          mask: Embedding of the mask token, of a head that has one.
        """
        masks = self.stand_ins(mask, count - 1).astype(embeds.dtype)
        masks = jnp.broadcast_to(masks, (*embeds.shape[:-1], *masks.shape))
        x = jnp.concatenate([embeds[..., None, :], masks], axis=-2)
        if before is not None:
            before = jnp.broadcast_to(before[..., None, :], x.shape)
        return self.fuse(x, before, None, None)

    def stand_ins(self, mask: Float[Array, " D"] | None, count: int) -> Float[Array, "count D"]:
        """Return what a block of one pass reads in place of the tokens that are not known."""
        assert mask is not None
        return jnp.broadcast_to(mask, (count, len(mask)))

    # what is copied or drawn

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> dict[str, Any]:
        """Return random initial parameters, float32.

        A `norm` at the top and an output matrix are copies of the target's, if there is a target.
        """
        c, text = self.config, self.config.text_config
        params = drawn(self, key)
        if c.own_embedding:
            shape = (c.embedding.vocab_size, c.embedding.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        if c.has_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if target is None:
            return params
        if "norm" in params:
            params |= in_float32({"norm": target["model"]["norm"]})
        if c.has_output:
            tokens = text.draft_vocabulary or tuple(range(text.vocab_size))
            params |= in_float32({"lm_head": {"weight": output_rows(target, tokens)}})
        return params

    def everything(self, count: int = 1) -> Any:
        """Run every part once on a row of `count` tokens, so that all parameters are made."""
        c, text = self.config, self.config.text_config
        makers = {index: text.of_layer(layer) for layer, index in enumerate(c.key_places)}
        leaves = tuple(
            jnp.zeros((1, maker.num_key_value_heads, count, maker.head_dim))
            for _, maker in sorted(makers.items())
        )
        embeds = jnp.zeros((1, count, c.embedding.hidden_size))
        states = jnp.zeros((1, count, c.states_width)) if c.states_width else None
        whole = jnp.arange(count)[None]
        spans = jnp.asarray([[[0, count]]])
        reading = Reading(leaves, leaves, states)
        prompt = Prompt(embeds, whole, spans, jnp.ones((1, count), bool), embeds)
        context = self.context(reading, prompt)
        before = None if states is None or not self.reads_before else self.combine(states[:, :1])
        at = Places(whole[:, :1], whole[:, :1], 0, jnp.ones((1, 1, 1), bool))
        token, room = embeds[:, :1], empty_room(text, 1, 1, embeds.dtype)
        if not self.in_one_pass:
            return self.step(token, before, at, context, reading, room)
        x = self.block(token, before, embeds[0, 0], 1)[:, 0]
        return self.closed(self.read(x, at, context, reading, room)[0])


class KeyedHead(Head):
    """Read keys of its own, which it makes of the target's hidden states. They are its context."""

    @abstractmethod
    def keys(
        self, states: Fused, after: Vectors | None, slots: Slots, rotary: Slots, context: Any
    ) -> list[tuple[Keys, Keys]]:
        """Return each layer's keys and values of tokens that the target has read.

        Args:
          states: The target's hidden states at their slots.
          after: Embeddings of the tokens behind them; None for a head that is not `behind`.
        """

    def segments(self, context: KVCache, reading: Reading, at: Places) -> list[list[Segment]]:
        slots, block = jnp.arange(context.slots)[None], at.newest[..., None] - self.behind
        segments, text = [], self.config.text_config
        for layer, (k, v) in enumerate(zip(context.k, context.v, strict=True)):
            seen, window = at.own(slots < block, slots), text.of_layer(layer).sliding_window
            if window is not None:  # counted from the block's first token, for all its tokens
                seen &= slots > block - window
            segments.append([Segment(k, v, seen, context.bias)])
        return segments


def empty_room(text: RotaryConfig, batch: int, count: int, dtype: Any, *anchors: int) -> Room:
    """Return room for the keys and values of `count` tokens, of each layer; nothing for a layer
    that makes none.

    anchors: Number of blocks of a row that each have such a room.
    """
    layers = (text.of_layer(i) for i in range(text.num_hidden_layers))
    slots = (*anchors, count * bool(text.cached_layers))
    shapes = ((batch, layer.num_key_value_heads, *slots, layer.head_dim) for layer in layers)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)


def cache_of(
    keys: Sequence[tuple[Float[Array, "B L K H"], Float[Array, "B L K H"]]], **fields: Any
) -> KVCache:
    """Return a context of the keys and values of whole rows."""
    k, v = (tuple(leaf.swapaxes(1, 2) for leaf in leaves) for leaves in zip(*keys, strict=True))
    zero = jnp.zeros(len(k[0]), jnp.int32)
    return KVCache(k, v, length=zero, shift=zero, split=True, **fields)


@partial(jax.jit, static_argnums=0)
def drawn(head: nn.Module, key: jax.Array) -> dict[str, Any]:
    """Return random parameters of a head's module."""
    return dict(head.init(key, method="everything")["params"])


def in_float32(params: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of parameters in float32."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), params)
