"""Compute the blocks of a DFlash head."""

from __future__ import annotations

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.config.text import RotaryConfig
from jaxspec.heads.head import (
    BlockAttention,
    KeyedHead,
    Prompt,
    Reading,
    cache_of,
    drawn,
    in_float32,
)
from jaxspec.heads.kinds.dflash.config import DFlashConfig
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import INIT, Dense, text_norm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Int, Params


class MarkovHead(nn.Module):
    """Return what tokens add to the scores of their followers, by a matrix of low rank."""

    config: DFlashConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = nn.Embed(c.text_config.vocab_size, c.markov, embedding_init=INIT)
        self.markov_w2 = Dense(c.text_config.scored_tokens, bias=False, widens=True)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T words"]:
        return self.markov_w2(self.markov_w1(tokens)).astype(jnp.float32)


class CausalAttention(BlockAttention):
    """Attend to segments, and to the tokens of the own block up to the query's."""

    def read(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        at: Any,
        cache: Any,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        queries, count = at.seen.shape[-2:]
        before = jnp.tile(jnp.tri(count, dtype=bool), (queries // count, 1))
        return super().read(q, k, v, at.replace(seen=at.seen & before), cache)


class DFlashHead(KeyedHead):
    """Hold a head's parameters, and compute its blocks."""

    config: DFlashConfig

    in_one_pass: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    reads_before: ClassVar[bool] = False

    def setup(self) -> None:
        text = self.config.text_config
        each = [text.of_layer(layer) for layer in range(text.num_hidden_layers)]
        self.layers = [Layer(layer, self._attention(layer)) for layer in each]
        self.norm, self.hidden_norm = text_norm(text), text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if self.config.markov:
            self.markov_head = MarkovHead(self.config)

    def _attention(self, layer: RotaryConfig) -> type[BlockAttention]:
        slides = layer.sliding_window is not None
        return CausalAttention if slides and self.config.causal else BlockAttention

    def context(self, reading: Reading, prompt: Prompt) -> KVCache:
        assert reading.states is not None
        slots = prompt.rotary
        return cache_of(self.keys(reading.states[:, : slots.shape[1]], None, slots, slots, None))

    def keys(
        self,
        states: Float[Array, "B T fused"],
        after: Float[Array, "B T D"] | None,
        slots: Int[Array, "B T"],
        rotary: Int[Array, "B T"],
        context: Any,
    ) -> list[tuple[Array, Array]]:
        combined = self.hidden_norm(self.fc(states))
        return [layer.self_attn.keys_values(combined, rotary) for layer in self.layers]

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens add to the scores of their followers."""
        return self.markov_head(tokens)

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix.

        The Markov head adds nothing at first.
        """
        c, text = self.config, self.config.text_config
        params = drawn(self, key)
        if c.markov:
            params["markov_head"] = {
                "markov_w1": {"embedding": INIT(key, (text.vocab_size, c.markov), jnp.float32)},
                "markov_w2": {"weight": jnp.zeros((text.scored_tokens, c.markov))},
            }
        if c.confidence:
            proj = {"weight": jnp.zeros((1, c.confidence)), "bias": jnp.zeros(1)}
            params["confidence_head"] = {"proj": proj}
        if c.has_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if c.own_embedding:
            shape = (text.vocab_size, text.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        if target is None:
            return params
        params |= in_float32({"norm": target["model"]["norm"]})
        if c.has_output:
            tokens = text.draft_vocabulary or tuple(range(text.vocab_size))
            params |= in_float32({"lm_head": {"weight": output_rows(target, tokens)}})
        return params
