"""Define what heads share that have keys of their own and read their target's hidden states.

Slot p reads the embedding of token p + 1 next to the hidden state of token p. That state is the
target's, or, of a token that the head drafted itself, its own. It takes the position of token p.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.config import StateHeadConfig
from jaxspec.models.heads.anchored import AnchoredAttention, Context, block_reader, one_by_one
from jaxspec.models.heads.borrowed import drawn
from jaxspec.models.heads.reading import Blocks, Reading, states_before
from jaxspec.models.layers import INIT
from jaxspec.typing import Array, Bool, Float, Int, Params


class ShownImages(struct.PyTreeNode):
    """Hold what a row shows at its image slots."""

    mask: Bool[Array, "B L"]
    """Slots that show an image."""
    embeds: Float[Array, "B L D"] | None
    """The target's embeddings there; None for a head that does not read them."""
    most: int = struct.field(pytree_node=False, default=0)
    """Most images of a row, for a head that compresses them."""


class StateHead(nn.Module):
    """Hold a head's parameters but those of its embedding and output matrix, and run its training
    pass."""

    config: StateHeadConfig

    layer: ClassVar[Callable[..., Any]]
    """Its decoder layer."""

    def setup(self) -> None:
        text = self.config.text_config
        self.layers = [self.layer(text, AnchoredAttention) for _ in range(text.num_hidden_layers)]

    @abstractmethod
    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return the hidden states that the head reads of the target's."""

    @abstractmethod
    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... width"]:
        """Return the layers' inputs from embeddings and the hidden states that predicted them."""

    @abstractmethod
    def closed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Array]:
        """Return the states that are scored, and those that the next tokens read, of the layers'
        output."""

    def own_context(
        self,
        embeds: Float[Array, "B L D"],
        states: Float[Array, "B L fused"],
        rotary: Int[Array, "B L"] | Int[Array, "B 3 L"],
        images: ShownImages | None = None,
    ) -> Context:
        """Return the head's keys and values over whole rows.

        Args:
          embeds: Embeddings of the tokens, placeholders of images included.
          states: The target's hidden states at the tokens.
          rotary: Positions of the tokens.
          images: What the rows show at image slots; None for text, and for the rule `placeholder`.
        """
        x, bias = self.layer_inputs(embeds, states, images)
        k, v = self.layers[0].keys_values(x, rotary)
        since = jnp.broadcast_to(1 + jnp.arange(x.shape[1]), x.shape[:2])
        return Context(k, v, since, bias)

    def layer_inputs(
        self,
        embeds: Float[Array, "B L D"],
        states: Float[Array, "B L fused"],
        images: ShownImages | None,
    ) -> tuple[Float[Array, "B L width"], Float[Array, "B L"] | None]:
        """Return what the layer reads of whole rows, and the bias of its slots; see `own_context`.

        Slot p is of token p + 1. The last one wraps around to token 0, which means nothing there.
        """
        rule = self.config.images
        if images is not None and rule == "zero":
            states = jnp.where(images.mask[..., None], 0, states)
        elif images is not None and images.embeds is not None:
            embeds = jnp.where(images.mask[..., None], images.embeds, embeds)
        tokens = jnp.roll(embeds, -1, axis=1)
        x = self.fuse(tokens, self.combine(states))
        if images is not None and rule == "unfused":
            x = jnp.where(jnp.roll(images.mask, -1, axis=1)[..., None], tokens, x)
        return x, None

    def __call__(
        self,
        embeds: Float[Array, "B A J D"],
        anchors: Int[Array, "B A"],
        rotary: Int[Array, "B A J"] | Int[Array, "B 3 A J"],
        row: tuple[Any, ...],
        before: Float[Array, "B A fused"],
    ) -> Float[Array, "B A J D"]:
        """Return the states to score of blocks of J tokens: EAGLE-3's training-time test.

        Args:
          embeds: Embeddings of the blocks' tokens.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the tokens before the blocks' tokens.
          row: Arguments of `own_context`.
          before: The target's hidden states before the anchors.
        """
        read = block_reader(self.layers, [self.own_context(*row)] * len(self.layers), anchors)

        def step(token: Array, state: Array, rotary: Array) -> tuple[Array, Array]:
            return self.closed(read(self.fuse(token, state), rotary))

        return one_by_one(step, embeds, self.combine(before)[:, :, None], rotary)

    @nn.nowrap
    def slots(self, slot_images: Sequence[np.ndarray], width: int, images: int) -> None:
        """Return no slots: it reads hidden states in the place of keys."""

    @nn.nowrap
    @abstractmethod
    def states(self, reading: Reading) -> Float[Array, "B L fused"]:
        """Return the target's hidden states that it reads."""

    @nn.nowrap
    def reading(self, read: Callable[[tuple[int, ...] | None], tuple[Array, KVCache]]) -> Reading:
        """Return what training keeps of a target's pass, see `KVHead.reading`."""
        layers = self.config.target_states
        hidden, cache = read(layers)
        assert cache.hidden is not None
        return Reading(hidden, states=cache.hidden[:, 0] if layers else None)

    @nn.nowrap
    def inputs(self, blocks: Blocks, reading: Reading) -> tuple[Any, ...]:
        """Return the arguments of `__call__` for blocks of whole rows."""
        states, embeds = self.states(reading), blocks.embed(blocks.row)
        images = None
        if blocks.images is not None and self.config.images != "placeholder":
            images = ShownImages(blocks.images, reading.embeds)
        whole = jnp.broadcast_to(jnp.arange(embeds.shape[1]), embeds.shape[:2])
        row = embeds, states, blocks.rotary(whole), images
        rotary = blocks.rotary(jnp.maximum(blocks.at - 1, 0))
        before = states_before(states, blocks.anchors)
        return blocks.embeds, blocks.anchors, rotary, row, before

    @nn.nowrap
    def random(self, key: jax.Array, width: int, images: ShownImages | None = None) -> Params:
        """Return random parameters, with an embedding if the head has its own.

        Args:
          width: Numbers of the target's states that it reads of a token.
          images: What a row of one token shows.
        """
        text = self.config.text_config
        states = jnp.zeros((1, 1, width))
        zero, embeds = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 1, text.hidden_size))
        row = embeds[0], states, zero, images
        params = drawn(self, key, embeds, zero, zero[..., None], row, states)
        if rows := self.config.embedding_rows:
            shape = (rows, text.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        return params
