"""The key-value cache: rows of one batch, each with its own length.

Rows are padded on the right, so the slot of a token is its index in the row, and a query in slot p
may read exactly the slots 0..p. Slots at or past a row's length hold rubbish that no query can see
before it is overwritten: rolling a row back is setting its length, nothing is ever cleared.

A token tree is in the newest slots, one node a slot, parents before children, its root first. A
node's position is its depth below the root, and of the tree it may read its ancestors and itself
alone. Once a path is chosen, its nodes are moved together and the row is a plain sequence again.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct

from jaxspec.config import TextConfig
from jaxspec.typing import Array, Bool, Float, Int


class KVCache(struct.PyTreeNode):
    """One pair of leaves a layer: XLA updates them in place, where one stacked leaf is copied every
    step.

    Heads come before slots: attention multiplies one matrix [S, H] a head, and with the slots in
    front XLA would copy the whole cache into that order in every pass.
    """

    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    length: Int[Array, " B"]
    """Tokens of each row that are valid."""
    shift: Int[Array, " B"]
    """Rotary position of a new token less its slot: 0, but where images take other positions than
    slots (M-RoPE), or fewer slots than positions (KV heads)."""
    bias: Float[Array, "B S"] | None = None
    """Added to each slot's attention scores; None adds nothing."""
    hidden: Float[Array, "B 1 S D"] | None = None
    """Hidden states of the tokens, laid out as one head's keys are; kept where a draft head reads
    them."""
    kept: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Which hidden states: those after so many layers, one behind the other; () the final-normed
    ones."""

    @property
    def slots(self) -> int:
        return self.k[0].shape[2]


LayerCache = tuple[Array, ...]
"""Keys, values and, where the cache has one, the bias of its slots."""


class TreeMask(struct.PyTreeNode):
    """How T new tokens stand in a token tree that fills the newest slots, of which theirs are the
    last.

    If the tree is a root with the children 1 and 2, which are new, depth is [1, 1], and seen [[1,
    1, 0], [1, 0, 1]].
    """

    depth: Int[Array, "#B T"]
    """Steps below the tree's root."""
    seen: Bool[Array, "#B T tree"]
    """Which nodes each may read: its ancestors and itself."""


def init_cache(
    config: TextConfig,
    batch: int,
    slots: int,
    dtype: jnp.dtype,
    kept: tuple[int, ...] | None = None,
) -> KVCache:
    """Return an empty cache of `slots` tokens for `batch` rows.

    kept: Hidden states to keep, see `KVCache`; None keeps none.
    """
    shape = (batch, config.num_key_value_heads, slots, config.head_dim)
    layers = range(config.num_hidden_layers)
    hidden = None
    if kept is not None:
        width = config.hidden_size * max(len(kept), 1)
        hidden = jnp.zeros((batch, 1, slots, width), dtype)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in layers),
        v=tuple(jnp.zeros(shape, dtype) for _ in layers),
        length=jnp.zeros(batch, jnp.int32),
        shift=jnp.zeros(batch, jnp.int32),
        hidden=hidden,
        kept=kept or (),
    )


def write(
    leaf: Float[Array, "B K S H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Put T new entries a row at their positions; entries past the last slot are dropped.

    A scatter, because `dynamic_update_slice` would clamp at the end and overwrite valid slots.
    Never of one entry: XLA turns that into a choice between the whole leaf with and without it, and
    copies the cache in every pass.
    """
    if positions.size == 1:
        nowhere = jnp.full_like(positions, leaf.shape[2])
        positions, new = jnp.concatenate([positions, nowhere], axis=1), jnp.repeat(new, 2, axis=1)
    rows = jnp.arange(leaf.shape[0])[:, None]
    return leaf.at[rows, :, positions].set(new.astype(leaf.dtype), mode="drop", unique_indices=True)


def written(
    leaf: Float[Array, "B K S H"],
    new: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    live: int | None,
) -> Float[Array, "B K S H"]:
    """Return the leaf with T new entries a row; `live` entries are whole rows, from slot 0 on."""
    if live == new.shape[1]:
        return leaf.at[:, :, :live].set(new.swapaxes(1, 2).astype(leaf.dtype))
    return write(leaf, new, positions)


def remember(
    cache: LayerCache | None,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    live: int | None,
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"], LayerCache | None]:
    """Return the keys and values that T new tokens attend to, theirs included, and a layer's cache
    with theirs written.

    Of the cache the first `live` slots are read, or all. Without a cache there are no others than
    the new ones.
    """
    if cache is None:
        return k.swapaxes(1, 2), v.swapaxes(1, 2), None
    keys, values = (written(leaf, new, positions, live) for leaf, new in zip(cache, (k, v)))
    cache = keys, values, *cache[2:]
    return cache[0][:, :, :live], cache[1][:, :, :live], cache


def keep_path(cache: KVCache, root: Int[Array, " B"], path: Int[Array, "B J"]) -> KVCache:
    """Move the nodes `path` of a tree whose root is at slot `root` to the J slots behind it.

    With the root at slot 7, of the path [2, 5, 0] (two nodes stand) slots 9, 12 and 7 are copied to
    8, 9 and 10. Only the J slots of each row are read and written. What is rejected, or stood
    there, is rubbish afterwards.
    """
    source = (root[:, None] + path)[:, None, :, None]
    slots = root[:, None] + 1 + jnp.arange(path.shape[1])

    def moved(leaf: Array) -> Array:
        return write(
            leaf, jnp.take_along_axis(leaf, source, axis=2, mode="clip").swapaxes(1, 2), slots
        )

    hidden = cache.hidden if cache.hidden is None else moved(cache.hidden)
    return cache.replace(k=tuple(map(moved, cache.k)), v=tuple(map(moved, cache.v)), hidden=hidden)


def hidden_before(cache: KVCache, count: int, tree: TreeMask | None) -> Float[Array, "B T D"]:
    """Return the hidden states before the next `count` tokens of each row; before nodes of a tree,
    their parents'."""
    slots = cache.length[:, None] + jnp.arange(count) - 1
    if tree is not None:
        nodes = jnp.arange(tree.seen.shape[-1])
        above = tree.seen & (nodes < nodes[-count:, None])
        slots = (cache.length + count - len(nodes))[:, None] + jnp.where(above, nodes, 0).max(-1)
    assert cache.hidden is not None
    # A row that has read nothing keeps what is before its first token in its last slot, -1.
    return jnp.take_along_axis(cache.hidden, slots[:, None, :, None], axis=2)[:, 0]
