"""Draft with AASD's KV head, which reads the target's keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, TreeMask, whole_slots, write
from jaxspec.config import KVHeadConfig
from jaxspec.decoding.inputs import Images
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.source import Buckets, Committed, Prefilled, Verified
from jaxspec.models.heads.anchored import UNREAD, Context
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.heads.kv_head import keys_of
from jaxspec.models.heads.reading import HeadRows, head_rows, reads_as_text
from jaxspec.models.inputs import PromptRows
from jaxspec.models.layers import apply
from jaxspec.prompts.rows import bucket
from jaxspec.typing import Array, Float, Int, Params

Scratch = TypeVar("Scratch")


@dataclass(frozen=True)
class TargetKeys(HeadSource[KVCache, Scratch]):
    """Keep a head's cache between blocks: the target's keys and values, then the head's own.

    The target's are of every committed token except the newest; the head's own exist within a
    block.
    """

    config: KVHeadConfig

    def prefill(self, prefilled: Prefilled, inputs: HeadRows) -> KVCache:
        packed = inputs.text.shape[1] + inputs.images.shape[1] * self.config.image_slots
        weights = prefilled.params[self.name]
        return pack(self.config, weights, prefilled.target, inputs, packed + prefilled.room)

    def _kept(self, state: KVCache, block: KVCache, verified: Verified) -> KVCache:
        """Return the block's cache with the emitted tokens' keys and values from the target."""
        cache = block.replace(length=state.length, bias=state.bias)
        return adopt_target_kv(self.config, cache, verified, self.gamma + 1)

    def sizes(
        self, lengths: Sequence[int], slot_images: np.ndarray, buckets: Buckets
    ) -> tuple[int, ...]:
        text = len(reads_as_text(self.config, slot_images))
        images = int(slot_images.max(initial=-1)) + 1
        return (
            bucket(text, buckets.prompt, "prompt tokens"),
            bucket(images, buckets.images, "images of one prompt"),
        )

    def inputs(
        self,
        rows: Sequence[PromptRows],
        images: Images,
        slot_images: Sequence[np.ndarray],
        sizes: tuple[int, ...],
    ) -> HeadRows:
        return head_rows(self.config, slot_images, *sizes)


class KVHeadSource(TargetKeys[KVCache]):
    """Draft one token a pass."""

    name = "kv_head"

    def begin(
        self, committed: Committed, state: KVCache
    ) -> tuple[Float[Array, "one B one V"], KVCache]:
        """Read only the newest token, since the target has read the others."""
        cache = state if self.config.own_keys else without_own_keys(state)
        return self.score(committed, cache, committed.newest(1, 1))

    def score(
        self,
        committed: Committed,
        scratch: KVCache,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "one B T V"], KVCache]:
        if self.config.reads_hidden:
            logits, cache = self.read_fused(committed, scratch, tokens, tree)
        else:
            logits, cache = self.model.extend(self.weights(committed.params), tokens, scratch, tree)
        return logits[None], cache

    def commit(self, state: KVCache, scratch: KVCache, verified: Verified) -> KVCache:
        return self._kept(state, scratch, verified)


def without_own_keys(cache: KVCache) -> KVCache:
    """Return the cache with a bias that hides the slots that new tokens will fill."""
    unfilled = jnp.arange(cache.slots) >= cache.length[:, None]
    bias = 0.0 if cache.bias is None else cache.bias
    return cache.replace(bias=jnp.where(unfilled, UNREAD, bias))


def pack(
    config: KVHeadConfig, params: Params, target: KVCache, rows: HeadRows, slots: int
) -> KVCache:
    """Return the head's cache after prefill: the slots of `KVHead.context`, each row without gaps.

    `shift` is the target's length minus the head's, so new tokens take the target's positions. With
    10 slots of text and an image pooled from 576 slots to 64, length is 74 and shift 512.
    """
    slots, head = whole_slots(slots), module_of(config)
    context: Context = apply(head, params, *keys_of(config, target), rows, method="context")
    there = context.since < target.length[:, None]
    length = there.sum(1)
    targets = jnp.where(there, jnp.cumsum(there, axis=1) - 1, slots)

    def packed(leaf: Array) -> Array:
        batch, _, heads, width = leaf.shape
        return write(jnp.zeros((batch, heads, slots, width), leaf.dtype), leaf, targets)

    bias = None
    if context.bias is not None:
        bias = packed(context.bias[..., None, None])[:, 0, :, 0]
    hidden = None
    if target.hidden is not None:
        shape = (*target.hidden.shape[:2], slots, target.hidden.shape[-1])
        hidden = _with_newest(jnp.zeros(shape, target.hidden.dtype), target, length)
    layers = apply(head, params, context, method="contexts")
    return KVCache(
        k=tuple(packed(each.k) for each in layers),
        v=tuple(packed(each.v) for each in layers),
        length=length,
        shift=target.length + target.shift - length,
        bias=bias,
        hidden=hidden,
        split=True,
    )


def adopt_target_kv(
    config: KVHeadConfig, cache: KVCache, verified: Verified, count: int
) -> KVCache:
    """Replace the head's keys and values of `count` newly verified tokens by the target's.

    Those that were emitted stay; the next block overwrites the slots after them. A head that reads
    no text keeps none.
    """
    target, emitted, new = verified.target, verified.emitted, jnp.arange(count)
    if not config.reads_text:
        hidden = cache.hidden
        if hidden is not None:
            hidden = _with_newest(hidden, target, cache.length)
        return cache.replace(shift=cache.shift + emitted, hidden=hidden)
    source = verified.start[:, None] + new
    targets = cache.length[:, None] + new

    def adopted(leaf: Array, target_leaf: Any) -> Array:
        verified = jnp.take_along_axis(
            target_leaf, source[:, None, :, None], axis=2, mode="clip"
        ).swapaxes(1, 2)
        return write(leaf, verified, targets)

    layers = config.key_layers or (-1,) * len(cache.k)
    return cache.replace(
        k=tuple(adopted(leaf, target.k[i]) for leaf, i in zip(cache.k, layers, strict=True)),
        v=tuple(adopted(leaf, target.v[i]) for leaf, i in zip(cache.v, layers, strict=True)),
        length=cache.length + emitted,
        hidden=cache.hidden if cache.hidden is None else adopted(cache.hidden, target.hidden),
    )


def _with_newest(
    hidden: Float[Array, "B 1 S D"], target: KVCache, length: Int[Array, " B"]
) -> Array:
    """Write the hidden state of the target's newest token, where a draft begins."""
    assert target.hidden is not None
    newest = jnp.take_along_axis(target.hidden, (target.length - 1)[:, None, None, None], axis=2)
    return write(hidden, newest, (length - 1)[:, None])
