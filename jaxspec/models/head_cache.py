"""A head's cache in decoding: filled by prefill, and corrected by each verified block."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxspec.cache import KVCache, write
from jaxspec.config import KVHeadConfig
from jaxspec.models.anchored import Context
from jaxspec.models.head_slots import HeadRows
from jaxspec.models.kv_head import KVHead, keys_of
from jaxspec.models.layers import apply
from jaxspec.typing import Array, Float, Int, Params


def pack(
    config: KVHeadConfig, params: Params, target: KVCache, rows: HeadRows, slots: int
) -> KVCache:
    """Return the head's cache after prefill: the slots of `KVHead.context`, each row without gaps.

    `shift` is the number of slots that a row has fewer than the target's row, so that new tokens
    take the target's positions. With 10 slots of text and an image pooled from 576 slots to 64,
    length is 74 and shift 512.
    """
    context: Context = apply(
        KVHead(config), params, *keys_of(config, target), rows, method="context"
    )
    there = context.since < target.length[:, None]
    length = there.sum(1)
    places = jnp.where(there, jnp.cumsum(there, axis=1) - 1, slots)

    def packed(leaf: Array) -> Array:
        batch, _, heads, width = leaf.shape
        return write(jnp.zeros((batch, heads, slots, width), leaf.dtype), leaf, places)

    bias = None
    if context.bias is not None:
        bias = packed(context.bias[..., None, None])[:, 0, :, 0]
    hidden = None
    if target.hidden is not None:
        shape = (*target.hidden.shape[:2], slots, target.hidden.shape[-1])
        hidden = _with_newest(jnp.zeros(shape, target.hidden.dtype), target, length)
    layers = apply(KVHead(config), params, context, method="contexts")
    return KVCache(
        k=tuple(packed(each.k) for each in layers),
        v=tuple(packed(each.v) for each in layers),
        length=length,
        shift=target.length + target.shift - length,
        bias=bias,
        hidden=hidden,
    )


def pack_own(
    config: KVHeadConfig,
    params: Params,
    target: KVCache,
    embeds: Float[Array, "B L D"],
    rotary: Int[Array, "B L"] | Int[Array, "B 3 L"],
    slots: int,
) -> KVCache:
    """Return an EAGLE-3 head's cache after prefill: one slot less than the target's.

    embeds, rotary: See `KVHead.own_context`.
    """
    assert target.hidden is not None
    states = target.hidden[:, 0, : embeds.shape[1]]
    context = apply(KVHead(config), params, embeds, states, rotary, method="own_context")
    batch, width, heads, size = context.k.shape

    def padded(leaf: Array) -> Array:
        room = jnp.zeros((batch, heads, slots, size), leaf.dtype)
        return room.at[:, :, :width].set(leaf.swapaxes(1, 2))

    hidden = jnp.zeros((batch, 1, slots, config.text_config.hidden_size), embeds.dtype)
    return KVCache(
        k=(padded(context.k),),
        v=(padded(context.v),),
        length=target.length - 1,
        shift=target.shift if rotary.ndim == 3 else jnp.zeros_like(target.shift),
        hidden=hidden,
        kept=config.own_states,
    )


def adopt_target_kv(
    config: KVHeadConfig, cache: KVCache, target: KVCache, emitted: Int[Array, " B"], count: int
) -> KVCache:
    """Replace the head's keys and values of `count` newly verified tokens by the target's.

    `emitted` of them stay; the next block overwrites the slots after them. A head that reads no
    text keeps none. An EAGLE-3 head keeps the slots of the tokens that the target had read before,
    which the block read again with the target's hidden states.
    """
    if config.fused:
        return cache.replace(length=target.length - emitted)
    new = jnp.arange(count)
    if not config.reads_text:
        hidden = (
            cache.hidden
            if cache.hidden is None
            else _with_newest(cache.hidden, target, cache.length)
        )
        return cache.replace(shift=cache.shift + emitted, hidden=hidden)
    source = (target.length - emitted)[:, None] + new
    places = cache.length[:, None] + new

    def taken(leaf: Array, theirs: Any) -> Array:
        verified = jnp.take_along_axis(
            theirs, source[:, None, :, None], axis=2, mode="clip"
        ).swapaxes(1, 2)
        return write(leaf, verified, places)

    layers = config.key_layers or (-1,) * len(cache.k)
    return cache.replace(
        k=tuple(taken(leaf, target.k[i]) for leaf, i in zip(cache.k, layers, strict=True)),
        v=tuple(taken(leaf, target.v[i]) for leaf, i in zip(cache.v, layers, strict=True)),
        length=cache.length + emitted,
        hidden=cache.hidden if cache.hidden is None else taken(cache.hidden, target.hidden),
    )


def _with_newest(
    hidden: Float[Array, "B 1 S D"], target: KVCache, length: Int[Array, " B"]
) -> Array:
    """Write the hidden state of the target's newest token, where a draft begins."""
    assert target.hidden is not None
    newest = jnp.take_along_axis(target.hidden, (target.length - 1)[:, None, None, None], axis=2)
    return write(hidden, newest, (length - 1)[:, None])
