"""EAGLE-3's head (Li et al. 2025, arXiv 2503.01840), which reads hidden states of its target.

It has one layer, keys and values of its own, and its own output matrix. Its slot p reads the
embedding of token p + 1 next to the hidden state of token p. That state is `fc` of three of the
target's, or, of a token that it drafted itself, its own output. It takes the position of token p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, LayerCache
from jaxspec.config import Eagle3Config, EagleConfig
from jaxspec.models.decoder import Attention, CausalLM, Decoder, Places
from jaxspec.models.heads.anchored import AnchoredAttention, Context, block_reader, one_by_one
from jaxspec.models.heads.borrowed import drawn, in_float32
from jaxspec.models.heads.reading import Blocks, Reading, states_before
from jaxspec.models.layers import INIT, Dense, GatedMLP, RMSNorm
from jaxspec.models.vocabulary import head_kernel
from jaxspec.typing import Array, Float, Int, Params


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


class Eagle3Head(nn.Module):
    """Run a head's training pass; embedding and output matrix are not its parameters."""

    config: Eagle3Config

    def setup(self) -> None:
        text = self.config.text_config
        self.layers = [FusedLayer(text, AnchoredAttention) for _ in range(text.num_hidden_layers)]
        self.norm = RMSNorm(text.rms_norm_eps)
        self.fc = Dense(text.hidden_size, bias=False)
        if text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)

    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return the hidden states that the head reads of the target's."""
        if self.config.text_config.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... both"]:
        """Return the layers' inputs from embeddings and the hidden states that predicted them."""
        return jnp.concatenate([embeds, before], axis=-1)

    def own_context(
        self,
        embeds: Float[Array, "B L D"],
        states: Float[Array, "B L fused"],
        rotary: Int[Array, "B L"] | Int[Array, "B 3 L"],
    ) -> Context:
        """Return the head's keys and values over whole rows.

        Args:
          embeds: Embeddings of the tokens.
          states: The target's hidden states at the tokens.
          rotary: Positions of the tokens.
        """
        # Slot p is of token p + 1; the last one wraps around to token 0, which means nothing there.
        x = self.fuse(jnp.roll(embeds, -1, axis=1), self.combine(states))
        k, v = self.layers[0].keys_values(x, rotary)
        since = jnp.broadcast_to(1 + jnp.arange(x.shape[1]), x.shape[:2])
        return Context(k, v, since)

    def __call__(
        self,
        embeds: Float[Array, "B A J D"],
        anchors: Int[Array, "B A"],
        rotary: Int[Array, "B A J"] | Int[Array, "B 3 A J"],
        row: tuple[Array, Array, Array],
        before: Float[Array, "B A fused"],
    ) -> Float[Array, "B A J D"]:
        """Return the final-normed hidden states of blocks of J tokens: its training-time test.

        Args:
          embeds: Embeddings of the blocks' tokens.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the tokens before the blocks' tokens.
          row: Arguments of `own_context`.
          before: The target's hidden states before the anchors.
        """
        read = block_reader(self.layers, [self.own_context(*row)] * len(self.layers), anchors)

        def step(token: Array, state: Array, rotary: Array) -> tuple[Array, Array]:
            x = read(self.fuse(token, state), rotary)
            normed = self.norm(x)
            return normed, x if self.config.own_states else normed

        return one_by_one(step, embeds, self.combine(before)[:, :, None], rotary)

    @nn.nowrap
    def slots(self, slot_images: Sequence[np.ndarray], width: int, images: int) -> None:
        """Return no slots: it reads hidden states instead of keys."""

    @nn.nowrap
    def reading(self, read: Callable[[tuple[int, ...] | None], tuple[Array, KVCache]]) -> Reading:
        """Return what training keeps of a target's pass, see `KVHead.reading`."""
        hidden, cache = read(self.config.target_states)
        assert cache.hidden is not None
        return Reading(hidden, states=cache.hidden[:, 0])

    @nn.nowrap
    def inputs(self, blocks: Blocks, reading: Reading) -> tuple[Any, ...]:
        """Return the arguments of `__call__` for blocks of whole rows."""
        assert reading.states is not None
        before = states_before(reading.states, blocks.anchors)
        embeds = blocks.embed(blocks.row)
        whole = jnp.broadcast_to(jnp.arange(embeds.shape[1]), embeds.shape[:2])
        row = embeds, reading.states, blocks.rotary(whole)
        rotary = blocks.rotary(jnp.maximum(blocks.at - 1, 0))
        return blocks.embeds, blocks.anchors, rotary, row, before

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix."""
        text = self.config.text_config
        states = jnp.zeros((1, 1, 3 * text.target_hidden_size))
        zero, embeds = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 1, text.hidden_size))
        row = embeds[0], states, zero
        params = drawn(self, key, embeds, zero, zero[..., None], row, states)
        columns = len(text.draft_vocabulary) or text.vocab_size
        if text.own_output:
            params["lm_head"] = {"kernel": INIT(key, (text.hidden_size, columns), jnp.float32)}
        if text.own_embedding:
            shape = (text.vocab_size, text.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        if target is None:
            return params
        kernel = head_kernel(target, text.draft_vocabulary or tuple(range(text.vocab_size)))
        return params | in_float32({"norm": target["model"]["norm"], "lm_head": {"kernel": kernel}})
