"""Compute EAGLE-3's head (Li et al. 2025, arXiv 2503.01840), from hidden states of its target.

It has one layer, keys and values of its own, and its own output matrix. The state that it reads of
the target is `fc` of some hidden states; for a token that it drafted itself it is its own output.
The target's states are those after DeepStack's addition, as in vLLM, for which these heads are
published; those of transformers 5 and of SGLang are before it. They differ only at image slots.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import LayerCache
from jaxspec.config import Eagle3Config, EagleConfig
from jaxspec.models.decoder import Attention, CausalLM, Decoder, Places
from jaxspec.models.heads.borrowed import in_float32
from jaxspec.models.heads.reading import Reading
from jaxspec.models.heads.states import StateHead
from jaxspec.models.layers import INIT, Dense, GatedMLP, RMSNorm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Params


class FusedLayer(nn.Module):
    """Run EAGLE-3's layer, whose attention reads an embedding and a hidden state side by side."""

    config: EagleConfig
    attention: type[Attention] = Attention

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.rms_norm_eps)
        self.self_attn = self.attention(c)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = GatedMLP(c.intermediate_size, c.biases.mlp)

    def __call__(
        self, x: Float[Array, "B T both"], at: Places, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        normed, hidden = self._normed(x)
        out, cache = self.self_attn(normed, at, cache)
        x = hidden + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache

    def keys_values(self, x: Float[Array, "B T both"], rotary: Array) -> tuple[Array, Array]:
        """Return the layer's keys, rotated, and values of T tokens."""
        return self.self_attn.keys_values(self._normed(x)[0], rotary)

    def _normed(self, x: Array) -> tuple[Array, Array]:
        """Return the attention's input, and the stream that its output is added to."""
        embeds, hidden = jnp.split(x, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        stream = normed if self.config.norm_before_residual else hidden
        return jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1), stream


class FusedDecoder(Decoder):
    """Run a decoder of `FusedLayer`s, which split their inputs themselves."""

    layer: ClassVar[Callable[..., Any]] = FusedLayer

    def parts(self, embeds: Array) -> list[Array]:
        return [embeds]


class FusedLM(CausalLM):
    """Run a head over its own cache, as a model."""

    decoder: ClassVar[type[Decoder]] = FusedDecoder


class Eagle3Head(StateHead):
    """Hold an EAGLE-3 head's `fc`, norms and layer."""

    config: Eagle3Config

    layer: ClassVar[Callable[..., Any]] = FusedLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.norm = RMSNorm(text.rms_norm_eps)
        self.fc = Dense(text.hidden_size, bias=False)
        if text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)
        if text.fc_norm:
            self.fc_norm = [RMSNorm(text.rms_norm_eps) for _ in range(text.states)]

    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return `fc` of the states, normed together (`norm_before_fc`), one by one
        (`fc_norm`), or as they are."""
        text = self.config.text_config
        if text.norm_before_fc:
            states = self.input_norm(states)
        if text.fc_norm:
            parts = jnp.split(states, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        return self.fc(states)

    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... both"]:
        return jnp.concatenate([embeds, before], axis=-1)

    def closed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Array]:
        normed = self.norm(x)
        return normed, x if self.config.own_states else normed

    @nn.nowrap
    def states(self, reading: Reading) -> Float[Array, "B L fused"]:
        assert reading.states is not None
        return reading.states

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix."""
        text = self.config.text_config
        params = dict(self.random(key, text.states * text.target_hidden_size))
        if text.own_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if target is None:
            return params
        copied: dict[str, Any] = {"norm": target["model"]["norm"]}
        if text.own_output:
            vocabulary = text.draft_vocabulary or tuple(range(text.vocab_size))
            copied["lm_head"] = {"weight": output_rows(target, vocabulary)}
        return {**params, **in_float32(copied)}
