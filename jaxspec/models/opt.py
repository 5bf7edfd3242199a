"""Compute OPT's decoder: learned positions, norms before or after the sublayers, a plain MLP.

The functions that decoding calls are those of `CausalLM`. Parameter names are Hugging Face's.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache import KVCache, LayerCache
from jaxspec.config import OptConfig
from jaxspec.models import decoder
from jaxspec.models.decoder import CausalLM, Places, run_layers
from jaxspec.models.layers import INIT, Dense, Embed, LayerNorm
from jaxspec.typing import Array, Float

OFFSET = 2
"""Rows of the position table before position 0's: fairseq counted from the padding id on."""


def norm(config: OptConfig, name: str | None = None) -> LayerNorm:
    return LayerNorm(1e-5, config.layer_norm_elementwise_affine, name=name)


class Attention(decoder.Attention):
    config: OptConfig

    def setup(self) -> None:
        c = self.config
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            Dense(c.hidden_size, c.enable_bias) for _ in range(4)
        )

    def __call__(
        self, x: Array, at: Places, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        shape = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (project(x).reshape(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        out, cache = self.read(q, k, v, at, cache)
        return self.out_proj(out.reshape(x.shape)), cache


class Layer(nn.Module):
    """Run two residual sublayers, each normed before (`do_layer_norm_before`) or after."""

    config: OptConfig

    @nn.compact
    def __call__(
        self, x: Array, at: Places, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        c = self.config
        attention_norm, mlp_norm = norm(c, "self_attn_layer_norm"), norm(c, "final_layer_norm")
        before = c.do_layer_norm_before
        out, cache = Attention(c, name="self_attn")(attention_norm(x) if before else x, at, cache)
        x = x + out if before else attention_norm(x + out)
        h = Dense(c.intermediate_size, c.enable_bias, name="fc1")(mlp_norm(x) if before else x)
        h = nn.relu(h) if c.activation_function == "relu" else nn.gelu(h, approximate=False)
        out = Dense(c.hidden_size, c.enable_bias, name="fc2")(h)
        return x + out if before else mlp_norm(x + out), cache


class Decoder(nn.Module):
    """Compute Hugging Face's `OPTDecoder`."""

    config: OptConfig

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.word_embed_proj_dim, embedding_init=INIT)
        self.embed_positions = Embed(
            c.max_position_embeddings + OFFSET, c.hidden_size, embedding_init=INIT
        )
        if c.word_embed_proj_dim != c.hidden_size:
            self.project_in = Dense(c.hidden_size, bias=False)
            self.project_out = Dense(c.word_embed_proj_dim, bias=False)
        self.layers = [Layer(c) for _ in range(c.num_hidden_layers)]
        if c.final_layer_norm:
            self.final_layer_norm = norm(c)

    def __call__(
        self, embeds: Float[Array, "B T embed"], at: Places, cache: KVCache | None
    ) -> tuple[Float[Array, "B T embed"], KVCache | None]:
        """Return the normed hidden states. `at.rotary` gives the learned positions.

        Drafts may go past the table: its last row is read there, so that scores stay finite.
        """
        c = self.config
        projects = c.word_embed_proj_dim != c.hidden_size
        rows = jnp.clip(at.rotary, 0, c.max_position_embeddings - 1) + OFFSET
        x = (self.project_in(embeds) if projects else embeds) + self.embed_positions(rows)
        x, cache = run_layers(self.layers, x, at, cache)
        x = self.final_layer_norm(x) if c.final_layer_norm else x
        return self.project_out(x) if projects else x, cache


class Model(nn.Module):
    """Compute Hugging Face's `OPTModel`, a level of names around the decoder."""

    config: OptConfig

    def setup(self) -> None:
        self.decoder = Decoder(self.config)

    @property
    def embed_tokens(self) -> nn.Embed:
        return self.decoder.embed_tokens

    def __call__(
        self, embeds: Array, at: Places, cache: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        return self.decoder(embeds, at, cache)


class OPT(CausalLM):
    """Compute Hugging Face's `OPTForCausalLM`."""

    config: OptConfig

    def setup(self) -> None:
        self.model = Model(self.config)
        if not self.config.tie_word_embeddings:
            self.lm_head = Dense(self.config.vocab_size, bias=False, widens=True)
