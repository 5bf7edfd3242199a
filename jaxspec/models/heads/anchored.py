"""Attend from blocks of drafted tokens, at many anchors of a row at once (Target-Draft attention).

The block of anchor a sees the slots of tokens before a, and its own tokens up to each query. A
draft that starts at a sees the same: a is the newest token, and the target has not read it yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.models.decoder import Attention, Places
from jaxspec.models.layers import wide
from jaxspec.typing import Array, Float, Int

NEVER = np.iinfo(np.int32).max
"""Index of a slot that no query reads."""
UNREAD = -1e30
"""Bias of slots that count only where a query can read no others."""


class Context(struct.PyTreeNode):
    """Hold the keys and values that blocks read: S slots; a KV head's are I images, then text."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    since: Int[Array, "B S"]
    """Index in the target's row of a slot's last token, which later tokens may read; or NEVER."""
    bias: Float[Array, "B S"] | None = None
    """Bias on the scores of a slot."""

    def split(self, parts: int) -> list[Context]:
        """Return contexts of the heads in `parts` equal groups, in order."""
        keys, values = (jnp.split(leaf, parts, axis=2) for leaf in (self.k, self.v))
        return [self.replace(k=k, v=v) for k, v in zip(keys, values, strict=True)]


class Block(NamedTuple):
    """Hold a layer's inputs besides its tokens."""

    context: Context
    k: Float[Array, "B A J K H"] | None = None
    """The layer's keys of the blocks' earlier tokens; None at the first token."""
    v: Float[Array, "B A J K H"] | None = None


class AnchoredAttention(Attention):
    """Attend from A blocks' next J tokens to the slots before each anchor, and to the own block."""

    causal: ClassVar[bool] = True
    """Whether a token sees only the tokens of its block up to itself."""
    own_keys: ClassVar[bool] = True
    """Whether it sees its block at all."""

    def read(
        self,
        q: Float[Array, "B A*J N H"],
        k: Float[Array, "B A*J K H"],
        v: Float[Array, "B A*J K H"],
        at: Places,
        cache: Any,
    ) -> tuple[Float[Array, "B A*J N H"], Any]:
        block: Block = cache
        context, mask = block.context, at.seen
        assert mask is not None
        batch, _, heads, width = q.shape
        anchors, kv_heads = mask.shape[1], k.shape[2]
        q = q.reshape(batch, anchors, -1, kv_heads, heads // kv_heads, width)
        k, v = (x.reshape(batch, anchors, -1, kv_heads, width) for x in (k, v))
        if block.k is not None and block.v is not None:
            k, v = jnp.concatenate([block.k, k], axis=2), jnp.concatenate([block.v, v], axis=2)
        exact = wide(q.dtype)
        before = (
            jnp.einsum("BAJKGH,BSKH->BAKGJS", q, context.k, preferred_element_type=exact)
            * width**-0.5
        )
        if context.bias is not None:
            before += context.bias[:, None, None, None, None]
        before = jnp.where(mask[:, :, None, None, None], before, -jnp.inf)
        inside = (
            jnp.einsum("BAJKGH,BATKH->BAKGJT", q, k, preferred_element_type=exact) * width**-0.5
        )
        if not self.own_keys:
            inside += UNREAD
        new, total = inside.shape[-2:]  # the new tokens are the last; 2 of 3: 110, 111
        if self.causal:
            inside = jnp.where(jnp.tri(new, total, total - new, bool), inside, -jnp.inf)
        probs = jax.nn.softmax(jnp.concatenate([before, inside], axis=-1), axis=-1).astype(v.dtype)
        out = jnp.einsum("BAKGJS,BSKH->BAJKGH", probs[..., : mask.shape[-1]], context.v)
        out += jnp.einsum("BAKGJT,BATKH->BAJKGH", probs[..., mask.shape[-1] :], v)
        return out.reshape(batch, -1, heads, width), Block(context, k, v)


class TargetAttention(AnchoredAttention):
    """Attend to the slots before each anchor; a query without any reads its block."""

    own_keys: ClassVar[bool] = False


class FreeAttention(AnchoredAttention):
    """Attend as `AnchoredAttention`, each token to its whole block."""

    causal: ClassVar[bool] = False


def block_reader(
    layers: Sequence[Callable[..., Any]], contexts: Sequence[Context], anchors: Int[Array, "B A"]
) -> Callable[[Float[Array, "B A T D"], Array], Float[Array, "B A T D"]]:
    """Return a function that runs the next T tokens of blocks through layers.

    Its arguments are the layers' inputs and the rotary positions; each call reads the tokens of
    the calls before.

    contexts: Context of each layer.
    """
    mask = contexts[0].since[:, None] < anchors[..., None]
    blocks: list[Any] = [Block(context) for context in contexts]

    def read(x: Array, rotary: Array) -> Array:
        flat, shape = rotary.reshape(*rotary.shape[:-2], -1), x.shape[:3]
        x = x.reshape(shape[0], flat.shape[-1], -1)
        for i, layer in enumerate(layers):
            x, blocks[i] = layer(x, Places(flat, flat, mask), blocks[i])
        return x.reshape(*shape, -1)

    return read


def one_by_one(
    step: Callable[[Array, Array, Array], tuple[Array, Array]],
    embeds: Float[Array, "B A J D"],
    state: Float[Array, "B A one D"],
    rotary: Array,
) -> Float[Array, "B A J D"]:
    """Return the hidden states of blocks whose tokens each read the state before them.

    Args:
      step: (embedding, state before, rotary positions) of a token -> (hidden state, the state that
        the next token reads).
      state: The states before the blocks.
    """
    out = []
    for i in range(embeds.shape[2]):
        token = slice(i, i + 1)
        hidden, state = step(embeds[:, :, token], state, rotary[..., token])
        out.append(hidden)
    return jnp.concatenate(out, axis=2)
