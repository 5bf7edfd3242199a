"""Compute EAGLE-1's head (Li et al. 2024, arXiv 2401.15077), from the target's last state.

It has one layer without a norm before its attention. `fc` joins a token's embedding with the
final-normed state that predicted the token. The layer's output replaces the next state:
the target's output matrix scores it, and the next token reads it.

MSD (Lin et al. 2025, arXiv 2505.14260) is such a head. At the slots of images its layer reads the
image's embedding itself. For Qwen2-VL and Qwen2.5-VL its layer has that norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import LayerCache
from jaxspec.config import Eagle1Config, Eagle1Text
from jaxspec.models.decoder import Attention, CausalLM, Decoder, Places
from jaxspec.models.heads.reading import Reading
from jaxspec.models.heads.states import StateHead
from jaxspec.models.layers import INIT, Dense, Embed, GatedMLP, RMSNorm
from jaxspec.typing import Array, Float, Int, Params


class BareLayer(nn.Module):
    """Run Llama's layer without its input norm, unless the configuration has one."""

    config: Eagle1Text
    attention: type[Attention] = Attention

    def setup(self) -> None:
        c = self.config
        if c.input_norm:
            self.input_layernorm = RMSNorm(c.rms_norm_eps)
        self.self_attn = self.attention(c)
        self.post_attention_layernorm = RMSNorm(c.rms_norm_eps)
        self.mlp = GatedMLP(c.intermediate_size, c.biases.mlp)

    def __call__(
        self, x: Float[Array, "B T D"], at: Places, cache: LayerCache | None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        out, cache = self.self_attn(self._normed(x), at, cache)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), cache

    def keys_values(self, x: Float[Array, "B T D"], rotary: Array) -> tuple[Array, Array]:
        """Return the layer's keys, rotated, and values of T tokens."""
        return self.self_attn.keys_values(self._normed(x), rotary)

    def _normed(self, x: Array) -> Array:
        return self.input_layernorm(x) if self.config.input_norm else x


class BareDecoder(Decoder):
    """Run `BareLayer`s without a final norm."""

    config: Eagle1Text

    layer: ClassVar[Callable[..., Any]] = BareLayer

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.rows or c.vocab_size, c.hidden_size, embedding_init=INIT)
        self.layers = [self.layer(c) for _ in range(c.num_hidden_layers)]
        self.norm = _unchanged


def _unchanged(x: Array) -> Array:
    return x


class BareLM(CausalLM):
    """Run a head over its own cache, as a model."""

    config: Eagle1Text

    decoder: ClassVar[type[Decoder]] = BareDecoder

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return token embeddings; the last row is for tokens past the embedding."""
        rows = self.config.rows or self.config.vocab_size
        return self.model.embed_tokens(jnp.clip(tokens, 0, rows - 1))


class Eagle1Head(StateHead):
    """Hold an EAGLE-1 head's `fc` and layer."""

    config: Eagle1Config

    layer: ClassVar[Callable[..., Any]] = BareLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.fc = Dense(text.hidden_size, text.fc_bias)

    def combine(self, states: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return states

    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        return self.fc(jnp.concatenate([embeds, before], axis=-1))

    def closed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Array]:
        return x, x

    @nn.nowrap
    def states(self, reading: Reading) -> Float[Array, "B L D"]:
        return reading.hidden

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return random initial parameters, float32."""
        return self.random(key, self.config.text_config.hidden_size)
