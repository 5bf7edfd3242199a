"""The decoder of Llama, Mistral and Qwen2 as pure functions of (parameters, inputs, cache).

`Lvlm` adds the images. Parameter names are Hugging Face's: `model/layers_0/self_attn/q_proj/kernel`
is `model.layers.0.self_attn.q_proj.weight` transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.cache import KVCache, LayerCache, TreeMask, remember, write
from jaxspec.config import RotaryConfig
from jaxspec.models.attention import attend
from jaxspec.models.inputs import in_order, merge
from jaxspec.models.layers import (
    INIT,
    Dense,
    Embed,
    GatedMLP,
    RMSNorm,
    call_layer,
    loop_layers,
    rotary_frequencies,
    rotate,
)
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.typing import Array, Bool, Float, Int


class Places(NamedTuple):
    """Slots and positions of T new tokens in each row, and the slots that they read."""

    slots: Int[Array, "B T"]
    """Cache slots of the tokens; each token reads the slots up to its own."""
    rotary: Int[Array, "B T"] | Int[Array, "B 3 T"]
    """Positions of the rotary angles; three per token for M-RoPE, unless they are equal."""
    seen: Bool[Array, "#B T tree"] | None = None
    """Mask that makes the tokens nodes of a tree, see `attend`."""
    live: int | None = None
    """Number of slots to read, above every token's slot; static. Whole rows read as many slots as
    they have tokens."""


class Attention(nn.Module):
    config: RotaryConfig

    @nn.compact
    def __call__(
        self, x: Array, at: Places, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        c = self.config

        def heads(name: str, count: int) -> Array:
            return Dense(count * c.head_dim, c.biases.qkv, name=name)(x).reshape(
                *x.shape[:2], count, c.head_dim
            )

        angles = (
            at.rotary,
            rotary_frequencies(c),
            c.rope_scaling.attention_factor,
            c.rope_scaling.mrope_section,
        )
        q = rotate(heads("q_proj", c.num_attention_heads), *angles)
        k = rotate(heads("k_proj", c.num_key_value_heads), *angles)
        out, cache = self.read(q, k, heads("v_proj", c.num_key_value_heads), at, cache)
        return Dense(c.hidden_size, c.biases.output, name="o_proj")(
            out.reshape(*x.shape[:2], -1)
        ), cache

    def read(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        at: Places,
        cache: LayerCache | None,
    ) -> tuple[Float[Array, "B T N H"], LayerCache | None]:
        """Write new keys and values to the cache, if there is one, and attend to visible slots."""
        k, v, cache = remember(cache, k, v, at.slots, at.live)
        bias = () if cache is None else (leaf[:, : at.live] for leaf in cache[2:])
        return attend(q, k, v, at.slots, at.seen, *bias), cache


class Layer(nn.Module):
    config: RotaryConfig
    attention: type[Attention] = Attention

    @nn.compact
    def __call__(
        self, x: Array, at: Places, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        c = self.config
        normed = RMSNorm(c.rms_norm_eps, name="input_layernorm")(x)
        out, cache = self.attention(c, name="self_attn")(normed, at, cache)
        x = x + out
        mlp = GatedMLP(c.intermediate_size, c.biases.mlp, name="mlp")
        return x + mlp(RMSNorm(c.rms_norm_eps, name="post_attention_layernorm")(x)), cache


def run_layers(
    layers: Sequence[Callable[..., Any]], x: Array, at: Places, cache: KVCache | None
) -> tuple[Array, KVCache | None]:
    """Run layer after layer, each with its own pair of cache leaves."""
    if cache is None and (looped := loop_layers(layers, x, at, None)) is not None:
        return looped[0], None
    keys, values = [], []
    bias = () if cache is None or cache.bias is None else (cache.bias,)
    for i, layer in enumerate(layers):
        x, leaves = call_layer(layer, x, at, cache and (cache.k[i], cache.v[i], *bias))
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
        self, embeds: Array, at: Places, cache: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        x, cache = run_layers(self.layers, embeds, at, cache)
        return self.norm(x), cache


class CausalLM(nn.Module):
    """A language model with its output head: Hugging Face's `LlamaForCausalLM` and its like."""

    config: RotaryConfig

    def setup(self) -> None:
        self.model = Decoder(self.config)
        c = self.config
        if c.draft_vocabulary or not c.tie_word_embeddings:
            self.lm_head = Dense(len(c.draft_vocabulary) or c.vocab_size, bias=False, widens=True)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Return token embeddings.

        Ids past the vocabulary, such as a target's padding in a draft, read the last row.
        """
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
        """Return the final-normed hidden states of T tokens a row, and the written cache.

        The caller sets the cache's `length`. Without a cache the tokens attend to each other only.

        Args:
          embeds: Embeddings of the tokens.
          positions: `slots` of `Places`, and its `rotary` unless that is given.
          cache: Cache to write to.
          live, rotary, seen: See `Places`.
        """
        return self.model(
            embeds, Places(positions, positions if rotary is None else rotary, seen, live), cache
        )

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the scores of the next token, float32."""
        return fill_vocabulary(self.config, self.scores(hidden))

    def scores(self, hidden: Float[Array, "... D"]) -> Float[Array, "... words"]:
        """Return the scores of the draft vocabulary, or of all tokens without one."""
        if self.config.tie_word_embeddings and not self.config.draft_vocabulary:
            return self.model.embed_tokens.attend(hidden).astype(jnp.float32)
        return self.lm_head(hidden).astype(jnp.float32)

    def extend(
        self, tokens: Int[Array, "B T"], cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens to each row at its length; return next-token logits and the cache.

        The tokens follow one another, or are the last nodes of `tree`.
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
        """Return the logits of a whole right-padded batch, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(self.embed(tokens), positions)[0])


class Lvlm(nn.Module):
    """The common part of LVLMs.

    `encode` turns images into tower features, `project` turns these into the table of rows that
    prompt slots show, and `language_model` reads the prompt.
    """

    config: Any

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        *images: Array,
        sources: Int[Array, "B L blended"] | None = None,
        blend: Float[Array, "B L blended"] | None = None,
        rotary: Int[Array, "B 3 L"] | None = None,
        **named_images: Array,
    ) -> Float[Array, "B L V"]:
        """Return the logits of a whole right-padded batch, without a cache.

        `sources`, `blend` and `rotary` are those of `PromptRows`. Without them, image slots show
        the table's rows in order.
        """
        if sources is None:
            sources = in_order(tokens == self.config.image_token_index)
        table = self.project(self.encode(*images, **named_images))
        embeds = merge(self.language_model.embed(tokens), table, sources, blend)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.language_model.logits(
            self.language_model.hidden(embeds, positions, rotary=rotary)[0]
        )
