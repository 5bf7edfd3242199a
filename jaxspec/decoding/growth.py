"""Caches that grow: room for few new tokens at first, and for four times as many each time that an answer needs it.

A pass reads all slots of a cache, filled or not, and memory is taken for all. So where requests may have long answers
and most stop early, the room that they do not use costs time and memory. Each room is a decode program of its own,
compiled when the first answer gets there. Tokens do not change: a row reads the slots that it has filled.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodeState, place
from jaxspec.typing import Array

FIRST, FACTOR = 128, 4


def rooms(new: int, block: int) -> list[int]:
    """Room for new tokens, from the first to `new`; each but the last is larger than a block's tokens."""
    sizes = [FIRST]
    while sizes[-1] < new:
        sizes.append(FACTOR * sizes[-1])
    return [size for size in sizes[:-1] if size > block] + [new]


@partial(jax.jit, static_argnames=("slots",))
def grow(slots: int, state: DecodeState) -> DecodeState:
    """The state with so many more slots for new tokens in every row."""

    def longer(leaf: Array, axis: int, kept: int = 0) -> Array:
        """With slots before the last `kept` of that axis."""
        front, back = jnp.split(leaf, [leaf.shape[axis] - kept], axis)
        space = jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis + 1 :]), leaf.dtype)
        return jnp.concatenate([front, space, back], axis)

    def larger(part: KVCache | Array) -> KVCache | Array:
        if not isinstance(part, KVCache):
            return part
        k, v = (tuple(longer(leaf, 2) for leaf in leaves) for leaves in (part.k, part.v))
        bias = part.bias if part.bias is None else longer(part.bias, 1)
        # Of a row that has read nothing the last slot is in use, see `hidden_before`.
        hidden = part.hidden if part.hidden is None else longer(part.hidden, 2, kept=1)
        return part.replace(k=k, v=v, bias=bias, hidden=hidden)

    caches = state.target, state.drafter
    target, drafter = jax.tree.map(larger, caches, is_leaf=lambda part: isinstance(part, KVCache))
    trace = jax.tree.map(lambda leaf: longer(leaf, 1), state.trace)
    return place(state.replace(target=target, drafter=drafter, trace=trace, tokens=longer(state.tokens, 1)))
