"""Attend to a cache, in blocks for long prompts, and to all patches of an image or its tile.

Scores and their softmax are float32. No function holds the scores of all pairs of a long prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.models.layers import never_alone, wide
from jaxspec.models.splash import splash
from jaxspec.typing import Array, Bool, Float, Int, Queries

BLOCK = 512
"""Number of queries and of keys in a block; prompts of at least two blocks are read in blocks."""


def attend(
    q: Queries,
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "#B T tree"] | None = None,
    window: int | None = None,
    reach: Int[Array, "B T"] | None = None,
    first: Int[Array, "B T"] | None = None,
) -> Queries:
    """Return grouped attention in which the query at position p reads the slots 0..p.

    Many queries are read in blocks. If there are as many slots as queries, each row begins at 0.

    Args:
      mask: Slots of a token tree that each query reads. The queries are the tree's last T nodes,
        and also read all slots before the tree.
      window: Number of positions that a query reads, its own the last; None reads all. In a tree
        a node's position is its depth behind the root's.
      reach: Last slot that each query reads, outside of trees; None means its own. TPUs' kernel
        has no mask for it, so long prompts are then read in blocks there too.
      first: First slot that each query reads, outside of trees: equal for the slots of one of
        several conversations in a row. None means 0.
    """
    count, bounds = q.shape[1], Bounds(positions, reach, first)
    if count < 2 * BLOCK or mask is not None:
        return attend_whole(q, k, v, positions, mask, window, reach, first)
    if count < k.shape[2] or reach is not None:
        return _attend_blocks(window, q, k, v, bounds)
    return jax.lax.platform_dependent(
        q,
        k,
        v,
        bounds,
        tpu=lambda q, k, v, bounds: splash(q, k, v, bounds.first, causal=True, window=window),
        default=partial(_attend_blocks, window),
    )


class Bounds(NamedTuple):
    """Bound the slots that the queries of a sequence read, see `attend`."""

    positions: Int[Array, "B T"]
    reach: Int[Array, "B T"] | None = None
    first: Int[Array, "B T"] | None = None

    def visible(self, slots: Int[Array, " S"], window: int | None) -> Bool[Array, "B T S"]:
        """Mark the slots that each query reads."""
        positions, reach, first = self
        visible = slots <= (positions if reach is None else reach)[..., None]
        if first is not None:
            visible &= slots >= first[..., None]
        return visible if window is None else visible & (slots > positions[..., None] - window)


def attend_whole(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    mask: Array | None = None,
    window: int | None = None,
    reach: Array | None = None,
    first: Array | None = None,
) -> Array:
    """Return what `attend` returns, through one matrix of scores."""
    slots = jnp.arange(k.shape[2])
    if mask is not None:
        visible = _visible(slots, positions, mask, window)
    else:
        visible = Bounds(positions, reach, first).visible(slots, window)
    return attend_segments(q, [Segment(k, v, visible)])


class Segment(struct.PyTreeNode):
    """Hold slots that queries read together with those of other segments, in one softmax.

    With an axis A, the first of A equal groups of queries reads the first group's slots, and so on.
    """

    k: Float[Array, "B K *A S H"]
    v: Float[Array, "B K *A S H"]
    seen: Bool[Array, "#B #T S"]
    """Slots that each query reads."""
    bias: Float[Array, "#B S"] | None = None
    """Bias of the scores of each slot."""


def attend_segments(q: Queries, segments: Sequence[Segment]) -> Queries:
    """Return the attention of queries to all segments' slots; nothing is copied together."""
    batch, count, heads, width = q.shape
    kv_heads = segments[0].k.shape[1]
    groups, rows = heads // kv_heads, _by_head(q, kv_heads)

    def times(rows: Array, slots: Array, letters: str, **options: Any) -> Array:
        """Return the products of rows [B, K, G T, _] and slots.

        letters: The rows' last dimension, and that of the products.
        """
        if slots.ndim > 4:  # each group of queries and its own slots
            split = rows.reshape(batch, kv_heads, groups, slots.shape[2], -1, rows.shape[-1])
            product = f"BKGAT{letters[0]},BKASH->BKGAT{letters[-1]}"
            return jnp.einsum(product, split, slots, **options).reshape(*rows.shape[:3], -1)
        product = f"BKQ{letters[0]},BKSH->BKQ{letters[-1]}"
        return never_alone(lambda rows: jnp.einsum(product, rows, slots, **options), rows, 2)

    def scores(segment: Segment) -> Array:
        exact = wide(rows.dtype)
        scores = times(rows, segment.k, "H->S", preferred_element_type=exact) * width**-0.5
        if segment.bias is not None:
            scores += segment.bias[:, None, None]
        scores = scores.reshape(batch, kv_heads, groups, count, segment.k.shape[-2])
        return jnp.where(segment.seen[:, None, None], scores, -jnp.inf)

    probs = jax.nn.softmax(jnp.concatenate([*map(scores, segments)], axis=-1), axis=-1)
    probs = probs.astype(segments[0].v.dtype).reshape(batch, kv_heads, rows.shape[2], -1)
    ends = np.cumsum([segment.v.shape[-2] for segment in segments])
    parts = jnp.split(probs, ends[:-1], axis=3)
    products = [times(p, segment.v, "S->H") for p, segment in zip(parts, segments, strict=True)]
    return sum(products[1:], products[0]).reshape(batch, heads, count, width).swapaxes(1, 2)


def _by_head(q: Queries, kv_heads: int) -> Float[Array, "B K rows H"]:
    """Return one matrix of queries per key-value head.

    The axes are in the cache's order. For any other order XLA would transpose all slots.
    """
    batch, count, _, width = q.shape
    rows = q.reshape(batch, count, kv_heads, -1, width).transpose(0, 2, 3, 1, 4)
    return rows.reshape(batch, kv_heads, -1, width)


def _visible(
    slots: Int[Array, " S"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "#B T tree"],
    window: int | None,
) -> Bool[Array, "B T S"]:
    """Mark the slots that each node of a tree reads; the tree ends with the last of `positions`."""
    size = mask.shape[-1]
    root = positions[:, -1:] + 1 - size
    node = (slots - root)[:, None]
    before = jnp.asarray(True)
    if window is not None:
        # Node 3 of the root's child 1 has the mask 1101: it lies 0, 1 and 2 places behind nodes 3,
        # 1 and 0, and as deep as it has other nodes in its mask.
        mask_behind = jnp.flip(jnp.cumsum(jnp.flip(mask, -1), axis=-1), -1)
        mask = mask & (mask_behind <= window)
        depth = mask_behind[..., :1] - 1
        before = node > depth - window
    inside = jnp.take_along_axis(mask, jnp.clip(node, 0, size - 1), axis=-1)
    return jnp.where(node < 0, before, inside & (node < size))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(window: int | None, q: Array, k: Array, v: Array, bounds: Bounds) -> Array:
    """Attend block by block: each block of queries to the blocks of keys that it reads.

    The loop carries sums and largest scores (Dao et al. 2022, "FlashAttention", algorithm 1).
    """
    return _map_blocks(partial(_read_blocks, window, k, v), BLOCK, q, bounds)


def _read_blocks(window: int | None, k: Array, v: Array, q: Array, bounds: Bounds) -> Array:
    """Return the attention of a block of queries to all keys."""
    batch, count, heads, width = q.shape
    rows, slots = _by_head(q, k.shape[1]), k.shape[2]

    def read(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """Add a block of keys to the sums, and rescale them if it has a larger score."""
        most, total, out = carry
        # The last block is read from an earlier slot, and the slots before its own are masked.
        start = jnp.minimum(block * BLOCK, slots - BLOCK)
        keys, values = (jax.lax.dynamic_slice_in_dim(leaf, start, BLOCK, axis=2) for leaf in (k, v))
        slot = start + jnp.arange(BLOCK)
        visible = (block * BLOCK <= slot) & bounds.visible(slot, window)
        scores = jnp.einsum("BKQH,BKSH->BKQS", rows, keys, preferred_element_type=jnp.float32)
        scores = (scores * width**-0.5).reshape(batch, k.shape[1], -1, count, BLOCK)
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        scores = scores.reshape(*rows.shape[:-1], BLOCK)
        larger = jnp.maximum(most, scores.max(axis=-1))
        shrunk, probs = jnp.exp(most - larger), jnp.exp(scores - larger[..., None])
        read = jnp.einsum(
            "BKQS,BKSH->BKQH", probs.astype(v.dtype), values, preferred_element_type=jnp.float32
        )
        return larger, shrunk * total + probs.sum(axis=-1), shrunk[..., None] * out + read

    nothing = jnp.zeros(rows.shape[:-1], jnp.float32)
    # A window may hide a whole block from a query, so its largest score is finite at first.
    lowest = jnp.finfo(jnp.float32).min
    start = nothing + lowest, nothing, jnp.zeros(rows.shape, jnp.float32)
    positions, reach, first = bounds
    last = positions if reach is None else reach
    blocks = jnp.minimum(last.max(), slots - 1) // BLOCK + 1
    least = 0 if window is None else jnp.maximum(positions + 1 - window, 0)
    least = least if first is None else jnp.maximum(first, least)
    _, total, out = jax.lax.fori_loop(jnp.min(least) // BLOCK, blocks, read, start)
    out = (out / total[..., None]).astype(v.dtype)
    return out.reshape(batch, heads, count, width).swapaxes(1, 2)


def _map_blocks(attention: Callable[..., Array], size: int, q: Array, queries: Any) -> Array:
    """Return attention(q, queries), computed for one block of `size` queries after another.

    queries: Array [B, T] with an entry for each query, or several in a tree.
    """
    count = q.shape[1]

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, -count % size), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(len(x), -1, size, *x.shape[2:]), 1, 0)

    blocks = jax.tree.map(split, (q, queries))
    out = jax.lax.map(lambda block: attention(*block), blocks)
    return jnp.moveaxis(out, 0, 1).reshape(len(q), -1, *q.shape[2:])[:, :count]


def _keep_inputs(
    window: int | None, q: Array, k: Array, v: Array, bounds: Bounds
) -> tuple[Array, tuple[Any, ...]]:
    return _attend_blocks(window, q, k, v, bounds), (q, k, v, bounds)


def _pull_back(
    window: int | None, residuals: tuple[Any, ...], gradient: Array
) -> tuple[Array | None, ...]:
    """Return the gradients, recomputed through each block's whole scores.

    A dynamic-length loop has no reverse-mode gradient.
    """
    q, k, v, bounds = residuals

    def again(q: Array, k: Array, v: Array) -> Array:
        def read(q: Array, bounds: Bounds) -> Array:
            return attend_whole(q, k, v, bounds.positions, None, window, *bounds[1:])

        return _map_blocks(read, BLOCK, q, bounds)

    return *jax.vjp(again, q, k, v)[1](gradient), None


_attend_blocks.defvjp(_keep_inputs, _pull_back)


def attend_freely(
    q: Float[Array, "... Q N H"],
    k: Float[Array, "... P N H"],
    v: Float[Array, "... P N H"],
    mask: Bool[Array, "... Q P"] | None = None,
) -> Float[Array, "... Q N H"]:
    """Return attention to all keys, as in towers, or to those that `mask` marks."""
    scores = jnp.einsum("...QNH,...PNH->...NQP", q, k, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask[..., None, :, :], scores, -jnp.inf)
    probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("...NQP,...PNH->...QNH", probs, v)


def attend_within(
    q: Queries,
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    owner: Int[Array, "B T"],
) -> Queries:
    """Return attention in which a token reads all tokens of its owner, such as a patch's image.

    Many are read in blocks of `owner_block` queries.
    """

    def blocked(q: Array, k: Array, v: Array, owner: Array) -> Array:
        def read(q: Array, readers: Array) -> Array:
            return attend_freely(q, k, v, readers[:, :, None] == owner[:, None])

        # Queries that fill the last block have owner 0, which the last token has, too.
        owner = owner - owner[:, -1:]
        return _map_blocks(read, owner_block(q.shape[1]), q, owner)

    def fused(q: Array, k: Array, v: Array, owner: Array) -> Array:
        return splash(q, k.swapaxes(1, 2), v.swapaxes(1, 2), owner)

    if q.shape[1] < 2 * BLOCK:
        return attend_freely(q, k, v, owner[:, :, None] == owner[:, None])
    return jax.lax.platform_dependent(q, k, v, owner, tpu=fused, default=blocked)


def owner_block(count: int) -> int:
    """Return the number of queries per block of `attend_within`, for `count` tokens.

    It is smaller than `BLOCK` for over 8,192 tokens.
    """
    return count if count < 2 * BLOCK else max(1, min(BLOCK, 2**22 // count))
