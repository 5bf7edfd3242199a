"""The decoder of Llama, Mistral and Qwen2 as pure functions of (parameters, inputs, cache).

Parameter names are Hugging Face's: `model/layers_0/self_attn/q_proj/kernel` is `model.layers.0.self_attn.q_proj.weight`
transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache import KVCache, LayerCache, TreeMask, remember, write
from jaxspec.config import RotaryConfig
from jaxspec.models.layers import (
    INIT,
    Embed,
    GatedMLP,
    RMSNorm,
    attend,
    call_layer,
    dense,
    rotary_frequencies,
    rotate,
)
from jaxspec.typing import Array, Bool, Float, Int


class Attention(nn.Module):
    config: RotaryConfig

    @nn.compact
    def __call__(
        self,
        x: Array,
        positions: Array,
        rotary: Array,
        seen: Array | None,
        cache: LayerCache | None,
        live: int | None,
    ) -> tuple[Array, LayerCache | None]:
        c = self.config
        batch, count, _ = x.shape

        def heads(name: str, n: int) -> Array:
            proj = dense(n * c.head_dim, c.biases.qkv, name=name)
            return proj(x).reshape(batch, count, n, c.head_dim)

        turns = rotary, rotary_frequencies(c), c.rope_scaling.attention_factor, c.rope_scaling.mrope_section
        q = rotate(heads("q_proj", c.num_attention_heads), *turns)
        k = rotate(heads("k_proj", c.num_key_value_heads), *turns)
        v = heads("v_proj", c.num_key_value_heads)
        out, cache = self.read(q, k, v, positions, seen, cache, live)
        return dense(c.hidden_size, c.biases.output, name="o_proj")(out.reshape(batch, count, -1)), cache

    def read(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        positions: Array,
        seen: Array | None,
        cache: LayerCache | None,
        live: int | None,
    ) -> tuple[Float[Array, "B T N H"], LayerCache | None]:
        """Writes what is new to the cache, if there is one, and attends to all that the queries may read."""
        k, v, cache = remember(cache, k, v, positions, live)
        bias = () if cache is None else (leaf[:, :live] for leaf in cache[2:])
        return attend(q, k, v, positions, seen, *bias), cache


class Layer(nn.Module):
    config: RotaryConfig
    attention: type[Attention] = Attention

    @nn.compact
    def __call__(
        self,
        x: Array,
        positions: Array,
        rotary: Array,
        seen: Array | None,
        cache: LayerCache | None,
        live: int | None,
    ) -> tuple[Array, LayerCache | None]:
        c = self.config
        out, cache = self.attention(c, name="self_attn")(
            RMSNorm(c.rms_norm_eps, name="input_layernorm")(x), positions, rotary, seen, cache, live
        )
        x = x + out
        mlp = GatedMLP(c.intermediate_size, c.biases.mlp, name="mlp")
        return x + mlp(RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)), cache


def run_layers(
    layers: Sequence[Callable[..., Any]],
    x: Array,
    places: tuple[Array | None, ...],
    cache: KVCache | None,
    live: int | None,
) -> tuple[Array, KVCache | None]:
    """Layer after layer, each with its own pair of cache leaves; `places` is what a layer knows of positions."""
    keys, values = [], []
    bias = () if cache is None or cache.bias is None else (cache.bias,)
    for i, layer in enumerate(layers):
        x, leaves = call_layer(layer, x, *places, cache and (cache.k[i], cache.v[i], *bias), live)
        if leaves is not None:
            keys.append(leaves[0])
            values.append(leaves[1])
    return x, cache and cache.replace(k=tuple(keys), v=tuple(values))


class Decoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's `LlamaModel`."""

    config: RotaryConfig

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, embedding_init=INIT)
        self.layers = [Layer(c) for _ in range(c.num_hidden_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)

    def __call__(
        self,
        embeds: Array,
        positions: Array,
        rotary: Array,
        seen: Array | None,
        cache: KVCache | None,
        live: int | None,
    ) -> tuple[Array, KVCache | None]:
        x, cache = run_layers(self.layers, embeds, (positions, rotary, seen), cache, live)
        return self.norm(x), cache


class CausalLM(nn.Module):
    """A language model with its output head: Hugging Face's `LlamaForCausalLM` and its like."""

    config: RotaryConfig

    def setup(self) -> None:
        self.model = Decoder(self.config)
        if not self.config.tie_word_embeddings:
            self.lm_head = dense(self.config.vocab_size, bias=False, widens=True)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings; ids past the vocabulary (a target's padding seen by a draft) read the last row."""
        return self.model.embed_tokens(jnp.clip(tokens, 0, self.config.vocab_size - 1))

    def hidden(
        self,
        embeds: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        cache: KVCache | None = None,
        live: int | None = None,
        rotary: Int[Array, "B T"] | Int[Array, "B 3 T"] | None = None,
        seen: Bool[Array, "#B T tree"] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Final-normed hidden states of T tokens a row, and the cache with their keys and values written.

        `positions` are the tokens' indices in their rows: the slots that they are written to, and the last that
        they read. `rotary` are the positions that their angles are made of, where those are others; for M-RoPE
        three a token, but where they are equal. `seen` makes the tokens nodes of a tree, see `attend`.
        `live` (static) says that no query's position reaches it, so that only so many slots are read. The
        cache's `length` is left to the caller. Without a cache the T tokens attend to each other only.
        """
        return self.model(embeds, positions, positions if rotary is None else rotary, seen, cache, live)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Scores of the next token, float32."""
        if self.config.tie_word_embeddings:
            return self.model.embed_tokens.attend(hidden).astype(jnp.float32)
        return self.lm_head(hidden).astype(jnp.float32)

    def extend(
        self, tokens: Int[Array, "B T"], cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Appends T tokens to every row at its length; logits of what follows each, and the longer cache.

        They follow one another, or are nodes of the `tree` that ends with them.
        """
        return self.advance(self.embed(tokens), cache, tree)

    def advance(
        self, embeds: Float[Array, "B T D"], cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens with these embeddings, as `extend` does."""
        count = embeds.shape[1]
        positions = cache.length[:, None] + jnp.arange(count)
        place, seen = positions, None
        if tree is not None:
            root = cache.length + count - tree.seen.shape[-1]
            place, seen = root[:, None] + tree.depth, tree.seen
        rotary = place + cache.shift[:, None]
        hidden, written = self.hidden(embeds, positions, cache, rotary=rotary, seen=seen)
        assert written is not None
        if cache.hidden is not None:
            written = written.replace(hidden=write(cache.hidden, hidden[:, :, None], positions))
        return self.logits(hidden), written.replace(length=cache.length + count)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of a whole right-padded batch, no cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(self.embed(tokens), positions)[0])
