"""Draft with a head that has keys of its own, from hidden states: the target's, then its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, unread, whole_slots
from jaxspec.config import StateHeadConfig
from jaxspec.decoding.sources.head import HeadSource
from jaxspec.decoding.sources.source import Committed, Prefilled, Verified
from jaxspec.models.heads.kinds import module_of
from jaxspec.models.heads.states import ShownImages
from jaxspec.models.inputs import PromptRows
from jaxspec.models.layers import apply
from jaxspec.typing import Array, Float, Int, Params


@dataclass(frozen=True)
class StateHeadSource(HeadSource[KVCache, KVCache]):
    """Draft one token a pass. Between blocks its cache comes from the target's hidden states."""

    config: StateHeadConfig

    def prefill(self, prefilled: Prefilled, inputs: Any) -> KVCache:
        params, rows = prefilled.params, prefilled.batch.prompt
        slots = jnp.broadcast_to(jnp.arange(rows.tokens.shape[1]), rows.tokens.shape)
        rotary = rows.rotary if self.config.text_config.rope_scaling.mrope_section else None
        return pack_own(
            self.config,
            params[self.name],
            prefilled.target,
            self.model.embed(self.weights(params), rows, None),
            slots if rotary is None else rotary,
            self._images(prefilled),
            rows.tokens.shape[1] + prefilled.room,
        )

    def _images(self, prefilled: Prefilled) -> ShownImages | None:
        """Return what the prompts show at image slots, as far as the head's rule reads it."""
        rows, features = prefilled.batch.prompt, prefilled.features
        mask = rows.images
        if mask is None or features is None or self.config.images == "placeholder":
            return None
        embeds = None
        if self.config.shows_images:
            embeds = self.target.embed(prefilled.params["target"], rows, features)
            embeds = embeds[..., : self.config.text_config.hidden_size]  # without DeepStack's
        return ShownImages(mask, embeds, features.shape[1])

    def begin(
        self, committed: Committed, state: KVCache
    ) -> tuple[Float[Array, "one B one V"], KVCache]:
        """Read the tokens that it has not read with the target's states.

        These are the tokens of the last block, of each row as many as it emitted. All J + 1 are
        read, and the next tokens overwrite those that a row has fewer.
        """
        target = committed.target
        assert target.hidden is not None
        width = self.gamma + 1
        count = target.length - state.length
        states, _ = unread(target.hidden, state.length, width)
        model, weights = self.model, self.weights(committed.params)
        tokens = PromptRows(committed.newest(count, width), state.length)
        before = self.run(committed.params, "combine", states)
        embeds = model.embed(weights, tokens, None)
        fused = self.fused(committed.params, state, embeds, before)
        last = jnp.maximum(count - 1, 0)[:, None]
        logits, cache = model.advance(weights, fused, state, scored=last)
        return logits[None], cache.replace(length=state.length + count)

    def score(
        self,
        committed: Committed,
        scratch: KVCache,
        tokens: Int[Array, "B T"],
        tree: TreeMask | None = None,
    ) -> tuple[Float[Array, "one B T V"], KVCache]:
        """Read drafted tokens, each next to the head's own state before it."""
        logits, cache = self.read_fused(committed, scratch, tokens, tree)
        return logits[None], cache

    def commit(self, state: KVCache, scratch: KVCache, verified: Verified) -> KVCache:
        """Keep the tokens that the target had read before the block."""
        return scratch.replace(length=verified.start)


def pack_own(
    config: StateHeadConfig,
    params: Params,
    target: KVCache,
    embeds: Float[Array, "B L D"],
    rotary: Int[Array, "B L"] | Int[Array, "B 3 L"],
    images: ShownImages | None,
    slots: int,
) -> KVCache:
    """Return the head's cache after prefill: one slot less than the target's.

    embeds, rotary, images: See `StateHead.own_context`.
    """
    assert target.hidden is not None
    slots = whole_slots(slots)
    states = target.hidden[:, 0, : embeds.shape[1]]
    row = embeds, states, rotary, images
    context = apply(module_of(config), params, *row, method="own_context")
    batch, width, heads, size = context.k.shape

    def padded(leaf: Array) -> Array:
        room = jnp.zeros((batch, heads, slots, size), leaf.dtype)
        return room.at[:, :, :width].set(leaf.swapaxes(1, 2))

    bias = None
    if context.bias is not None:
        bias = jnp.zeros((batch, slots), context.bias.dtype).at[:, :width].set(context.bias)
    hidden = jnp.zeros((batch, 1, slots, config.text_config.hidden_size), embeds.dtype)
    return KVCache(
        k=(padded(context.k),),
        v=(padded(context.v),),
        length=target.length - 1,
        shift=target.shift if rotary.ndim == 3 else jnp.zeros_like(target.shift),
        bias=bias,
        hidden=hidden,
        kept=config.own_states,
        split=True,
    )
