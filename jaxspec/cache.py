"""Hold the keys and values of a batch whose rows have their own lengths.

Rows are padded on the right. So the slot of a token is its index in the row, and a query in slot p
reads exactly the slots 0..p. Slots at or past a row's length hold old values, and each is
overwritten before a query can read it. To roll a row back, set its length; nothing is cleared.

A token tree fills the newest slots, one node per slot, the root first and parents before children.
A node's position is its depth below the root. In the tree it reads its ancestors and itself. Once a
path is chosen, its nodes are moved together, and the row is a plain sequence again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.config import TextConfig
from jaxspec.typing import Array, Bool, Float, Int


class KVCache(struct.PyTreeNode):
    """Hold one pair of leaves per layer that makes keys and values.

    XLA updates these leaves in place; it would copy one stacked leaf in every step. Heads come
    before slots, because attention multiplies one matrix [S, H] per head. With the slots in front,
    XLA would copy the whole cache into that order in every pass. Within a block of several views
    all leaves have an axis of views in front.
    """

    k: tuple[Float[Array, "*R B _K S _H"], ...]
    v: tuple[Float[Array, "*R B _K S _H"], ...]
    length: Int[Array, "*R B"]
    """Number of valid tokens of each row."""
    shift: Int[Array, "*R B"]
    """Rotary position of a new token minus its slot. It is 0, unless images have other positions
    than slots (M-RoPE)."""
    bias: Float[Array, "B S"] | None = None
    """Bias of each slot's attention scores, in the context of a draft head; None adds nothing."""
    hidden: Float[Array, "B 1 S D"] | None = None
    """Hidden states of the tokens, in the layout of one head's keys; None if no draft head reads
    them."""
    kept: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Numbers of layers after which hidden states are kept, concatenated; () keeps the final-normed
    ones."""
    split: bool = struct.field(pytree_node=False, default=False)
    """Whether keys and values lie over a mesh as the target's do, by heads and rows; a draft
    model's lie whole on each device."""

    @property
    def slots(self) -> int:
        """Return the number of slots; 0 for a recorded target, which has no layers."""
        return self.k[0].shape[2] if self.k else 0

    def resized(self, slots: int) -> KVCache:
        """Return the cache with `slots` slots or a few more, which must hold its tokens."""
        slots = whole_slots(slots)
        k, v = (tuple(resized(leaf, 2, slots) for leaf in leaves) for leaves in (self.k, self.v))
        bias = self.bias if self.bias is None else resized(self.bias, 1, slots)
        # An empty row uses its last slot, see `newest_hidden`.
        hidden = self.hidden if self.hidden is None else resized(self.hidden, 2, slots, tail=1)
        return self.replace(k=k, v=v, bias=bias, hidden=hidden)

    def fitted(self, other: KVCache) -> KVCache:
        """Return the cache with as many slots as another."""
        return self.resized(other.slots)


def whole_slots(slots: int) -> int:
    """Round a cache's slots up to a multiple of 8, on TPUs to one more than such a multiple.

    A GPU's products read keys in groups of 8. For any other number XLA first writes a padded copy
    of all keys, in every pass. For a TPU and a multiple of 8, XLA puts the slots in front of the
    heads inside the loop, and copies the whole cache before the loop and behind it. The device is
    JAX's default one.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return slots + (int(platform == "tpu") - slots) % 8


def resized(leaf: Array, axis: int, slots: int, tail: int = 0) -> Array:
    """Return the array with `slots` entries on an axis.

    Zeros are put, or entries dropped, before its last `tail` entries.
    """
    front, back = jnp.split(leaf, [leaf.shape[axis] - tail], axis)
    padding = [(0, 0, 0)] * leaf.ndim
    padding[axis] = (0, slots - leaf.shape[axis], 0)  # less than 0 drops
    return jnp.concatenate([jax.lax.pad(front, jnp.zeros((), leaf.dtype), padding), back], axis)


LayerCache = tuple[Array, Array]
"""Keys and values."""


class TreeMask(struct.PyTreeNode):
    """Place T new tokens in a token tree, which fills the newest slots and ends with them.

    For a root with two new children, depth is [1, 1] and seen is [[1, 1, 0], [1, 0, 1]].
    """

    depth: Int[Array, "#B T"]
    """Steps below the tree's root."""
    seen: Bool[Array, "#B T tree"]
    """Nodes that each token reads: its ancestors and itself."""

    def parents(self, count: int) -> Int[Array, "#B count"]:
        """Return the parent of each of the last `count` nodes; the root's is the root."""
        nodes = jnp.arange(self.seen.shape[-1])
        above = self.seen & (nodes < nodes[-count:, None])
        return jnp.where(above, nodes, 0).max(-1)


def init_cache(
    config: TextConfig,
    batch: int,
    slots: int,
    dtype: jnp.dtype,
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    """Return an empty cache of `slots` tokens for `batch` rows.

    layers: Hidden states to keep, as `KVCache.kept`; None keeps none.
    """
    shapes = []
    for layer in map(config.of_layer, range(config.cached_layers)):
        shapes.append((batch, layer.num_key_value_heads, slots, layer.head_dim))
    hidden = None
    if layers is not None:
        width = config.hidden_size * max(len(layers), 1)
        hidden = jnp.zeros((batch, 1, slots, width), dtype)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        v=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        length=jnp.zeros(batch, jnp.int32),
        shift=jnp.zeros(batch, jnp.int32),
        hidden=hidden,
        kept=layers or (),
    )


def write(
    leaf: Float[Array, "B K S H"], new: Float[Array, "B T K H"], positions: Int[Array, "B T"]
) -> Float[Array, "B K S H"]:
    """Write T new entries per row at their positions; entries past the last slot are dropped.

    This is a scatter, because `dynamic_update_slice` would clamp at the end and overwrite valid
    slots. It never writes a single entry: XLA would select between the whole leaf with and without
    it, and so copy the cache in every pass.
    """
    if positions.size == 1:
        nowhere = jnp.full_like(positions, leaf.shape[2])
        positions, new = jnp.concatenate([positions, nowhere], axis=1), jnp.repeat(new, 2, axis=1)
    rows = jnp.arange(leaf.shape[0])[:, None]
    return leaf.at[rows, :, positions].set(new.astype(leaf.dtype), mode="drop", unique_indices=True)


def write_or_fill(
    leaf: Float[Array, "B K S H"],
    new: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    live: int | None,
) -> Float[Array, "B K S H"]:
    """Return the leaf with T new entries per row; if T is `live`, they fill the slots from 0 on."""
    if live == new.shape[1]:
        return leaf.at[:, :, :live].set(new.swapaxes(1, 2).astype(leaf.dtype))
    return write(leaf, new, positions)


def states_after(
    hidden: Float[Array, "B 1 S D"], read: Int[Array, " B"], width: int
) -> tuple[Float[Array, "B T D"], Int[Array, "B T"]]:
    """Return the hidden states of the `width` tokens behind the first `read` ones, and their slots.

    A row may have fewer of them; what is behind its last token is undefined.
    """
    slots = read[:, None] + jnp.arange(width)
    return jnp.take_along_axis(hidden[:, 0], slots[..., None], axis=1, mode="clip"), slots


def write_keys_values(
    cache: LayerCache | None,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    positions: Int[Array, "B T"],
    live: int | None,
) -> LayerCache:
    """Write T new keys and values; return the layer's cache.

    Without a cache it holds the new tokens only.

    live: See `write_or_fill`.
    """
    if cache is None:
        return k.swapaxes(1, 2), v.swapaxes(1, 2)
    keys, values = (write_or_fill(leaf, new, positions, live) for leaf, new in zip(cache, (k, v)))
    return keys, values


def keep_path(cache: KVCache, root: Int[Array, " B"], path: Int[Array, "B J"]) -> KVCache:
    """Move the nodes `path` of a tree to the J slots behind its root, which is at slot `root`.

    With the root at slot 7, the path [2, 5, 0] (two accepted nodes) copies slots 9, 12 and 7 to 8,
    9 and 10. Only J slots of each row are read and written. No query reads slot 10, or another
    node, before it is overwritten.
    """
    source = (root[:, None] + path)[:, None, :, None]
    slots = root[:, None] + 1 + jnp.arange(path.shape[1])

    def moved(leaf: Array) -> Array:
        return write(
            leaf, jnp.take_along_axis(leaf, source, axis=2, mode="clip").swapaxes(1, 2), slots
        )

    hidden = cache.hidden if cache.hidden is None else moved(cache.hidden)
    return cache.replace(k=tuple(map(moved, cache.k)), v=tuple(map(moved, cache.v)), hidden=hidden)


def newest_hidden(cache: KVCache) -> Float[Array, "B one D"]:
    """Return the hidden state of each row's newest token."""
    assert cache.hidden is not None
    # An empty row keeps the state before its first token in its last slot, -1.
    return jnp.take_along_axis(cache.hidden[:, 0], cache.length[:, None, None] - 1, axis=1)
