"""A head's blocks over whole rows that the target reads in one pass, as in training.

Step s of a block reads the same slots here as in decoding once the tokens before are accepted.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.config import KVHeadConfig
from jaxspec.models import LanguageModel
from jaxspec.models.head_slots import HeadRows
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import KVHead, joined, keys_of, states_before
from jaxspec.models.layers import apply
from jaxspec.typing import Array, Float, Int, Params


class Reading(struct.PyTreeNode):
    """Hold the part of a target's pass over whole rows that a head reads and learns from."""

    hidden: Float[Any, "B L D"]
    """Final-normed hidden states."""
    k: Float[Any, "B K L H"] | None = None
    """Keys that a KV head reads, as `keys_of` returns them."""
    v: Float[Any, "B K L H"] | None = None
    states: Float[Any, "B L fused"] | None = None
    """The hidden states of three layers, for an EAGLE-3 head."""


def read_whole(
    target: LanguageModel,
    params: Params,
    rows: PromptRows,
    features: Float[Array, "B U P E"] | None,
    config: KVHeadConfig,
) -> Reading:
    """Return the target's reading of whole rows, for a head."""
    count, length = rows.tokens.shape
    whole = rows.replace(length=jnp.full(count, length))
    kept = config.target_states if config.fused else None
    embeds = target.embed(params, whole, features)
    hidden, cache = target.read(params, embeds, whole, length, kept)
    if cache.hidden is not None:
        return Reading(hidden, states=cache.hidden[:, 0])
    return Reading(hidden, *keys_of(config, cache))


def read_blocks(
    config: KVHeadConfig,
    head: Params,
    target: Params,
    reading: Reading,
    rows: PromptRows,
    block: Int[Array, "B A J"],
    slots: HeadRows,
) -> tuple[Float[Array, "B A J D"], Float[Array, "B A J D"]]:
    """Return a head's final hidden states in blocks of J tokens, and the tokens' embeddings.

    Args:
      block: Slots of the blocks' tokens, of which the first is the anchor.
      slots: The target's slots that a KV head reads.
    """
    drafts, anchors = LanguageModel(config.text_config), block[..., 0]
    own = joined(head if config.fused else {}, target, drafts.text.draft_vocabulary)
    written = PromptRows(pick(rows.tokens, block).reshape(len(block), -1), rows.length)
    embeds = drafts.embed(own, written, None).reshape(*block.shape, -1)

    def turned(slots: Int[Array, "B ..."]) -> Array:
        """Return the rotary positions of slots; with M-RoPE [B, 3, ...]."""
        if rows.rotary is None or not config.text_config.rope_scaling.mrope_section:
            return slots
        return jax.vmap(lambda row, slots: row[:, slots])(rows.rotary, slots)

    if not config.fused:
        before = states_before(config, reading.hidden, anchors)
        given: Any = embeds, anchors, turned(block), reading.k, reading.v, slots, before
        return apply(KVHead(config), head, *given), embeds
    assert reading.states is not None
    before = states_before(config, reading.states, anchors)
    whole = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
    row = drafts.embed(own, rows, None), reading.states, turned(whole)
    given = embeds, anchors, turned(jnp.maximum(block - 1, 0)), row, before
    return apply(KVHead(config), head, *given, method="unroll"), embeds


def pick(values: Array, at: Int[Array, "B A J"]) -> Array:
    """Return values[b, at[b, a, j]]."""
    return values[jnp.arange(values.shape[0])[:, None, None], at]
