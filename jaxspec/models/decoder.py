"""Define the decoder of Llama, Mistral, Qwen2, Qwen3, Gemma 3 and Gemma 4.

Its methods are pure functions of (parameters, inputs, cache). `Lvlm` adds the images. Parameter
names are Hugging Face's: `model/layers_0/self_attn/q_proj/weight` is
`model.layers.0.self_attn.q_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache, LayerCache, TreeMask, write_keys_values, write_or_fill
from jaxspec.config import RotaryConfig
from jaxspec.models.attention import attend
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
    scaled,
    text_norm,
)
from jaxspec.models.per_layer import PerLayerGate, PerLayerInputs
from jaxspec.models.vocabulary import fill_vocabulary
from jaxspec.typing import Array, Bool, Float, Int, Keys, Queries


class Places(struct.PyTreeNode):
    """Place T new tokens in each row, and select the slots that they read."""

    slots: Int[Array, "B T"]
    """Cache slots of the tokens; each token reads the slots up to its own."""
    rotary: Int[Array, "B T"] | Int[Array, "B 3 T"]
    """Positions of the rotary angles; three per token for M-RoPE, unless they are equal."""
    seen: Bool[Array, "#B T tree"] | None = None
    """Mask that makes the tokens nodes of a tree, see `attend`."""
    live: int | None = struct.field(pytree_node=False, default=None)
    """Number of slots to read, above every token's slot; static. Whole rows read as many slots as
    they have tokens."""
    reach: Int[Array, "B T"] | None = None
    """Last slot that each token reads, where tokens of an image read one another; None means its
    own slot."""
    first: Int[Array, "B T"] | None = None
    """First slot that each token reads, of rows that hold several conversations; None means 0."""


class Attention(nn.Module):
    config: RotaryConfig

    def setup(self) -> None:
        c = self.config
        self.q_proj = Dense(c.num_attention_heads * c.head_dim, c.biases.qkv)
        self.o_proj = Dense(c.hidden_size, c.biases.output)
        if c.qk_norm:
            self.q_norm = text_norm(c)
        if not c.cached_layers:
            return
        self.k_proj = Dense(c.num_key_value_heads * c.head_dim, c.biases.qkv)
        if not c.attention_k_eq_v:
            self.v_proj = Dense(c.num_key_value_heads * c.head_dim, c.biases.qkv)
        if c.qk_norm:
            self.k_norm = text_norm(c)
        if c.value_norm:
            self.v_norm = RMSNorm(c.rms_norm_eps, affine=False)

    def __call__(
        self, x: Array, at: Places, cache: LayerCache | None
    ) -> tuple[Array, LayerCache | None]:
        """Attend to the cache, which is another layer's if this one makes no keys."""
        q = self.queries(x, at.rotary)
        if self.config.cached_layers:
            out, cache = self.read(q, *self.keys_values(x, at.rotary), at, cache)
        else:
            assert cache is not None
            out = self.attend(q, at, cache)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), cache

    def queries(self, x: Float[Array, "B T width"], rotary: Array) -> Queries:
        """Return the queries, rotated and scaled, of T tokens."""
        return self._rotated("q", self._projected("q", x), rotary, self.config.query_scale)

    def keys_values(self, x: Float[Array, "B T width"], rotary: Array) -> tuple[Keys, Keys]:
        """Return the keys, rotated, and the values of T tokens."""
        k = self._projected("k", x)
        v = k if self.config.attention_k_eq_v else self._projected("v", x)
        return self._rotated("k", k, rotary), self.v_norm(v) if self.config.value_norm else v

    def _projected(self, name: str, x: Float[Array, "B T width"]) -> Float[Array, "B T heads H"]:
        return getattr(self, f"{name}_proj")(x).reshape(*x.shape[:2], -1, self.config.head_dim)

    def _rotated(self, name: str, heads: Array, rotary: Array, scale: float = 1.0) -> Array:
        """Return queries or keys, normed where the family does so, rotated, times `scale`."""
        scaling = self.config.rope_scaling
        if self.config.qk_norm:
            heads = getattr(self, f"{name}_norm")(heads)
        turns = rotary_frequencies(self.config), scale * scaling.attention_factor
        return rotate(heads, rotary, *turns, scaling.mrope_axes)

    def read(
        self, q: Queries, k: Keys, v: Keys, at: Places, cache: LayerCache | None
    ) -> tuple[Queries, LayerCache | None]:
        """Write new keys and values to the cache, if there is one, and attend to visible slots."""
        cache = write_keys_values(cache, k, v, at.slots, at.live)
        return self.attend(q, at, cache), cache

    def attend(self, q: Queries, at: Places, cache: LayerCache) -> Queries:
        """Attend to the visible slots of a cache."""
        k, v = (leaf[:, :, : at.live] for leaf in cache)
        window, reach = self.config.sliding_window, at.reach if self.config.joint_images else None
        return attend(q, k, v, at.slots, at.seen, window, reach, at.first)


class Layer(nn.Module):
    """Run a layer of its own configuration, see `RotaryConfig.of_layer`."""

    config: RotaryConfig
    attention: type[Attention] = Attention

    def setup(self) -> None:
        c = self.config
        self.input_layernorm = text_norm(c)
        self.self_attn = self.attention(c)
        self.post_attention_layernorm = text_norm(c)
        self.mlp = GatedMLP(c.intermediate_size, c.biases.mlp, c.hidden_act)
        if c.sandwich:
            self.pre_feedforward_layernorm = text_norm(c)
            self.post_feedforward_layernorm = text_norm(c)
        if c.hidden_size_per_layer_input:
            self.add_input = PerLayerGate(c)
            nn.share_scope(self, self.add_input)
        if c.layer_scalar:
            self.layer_scalar = self.param("layer_scalar", nn.initializers.ones, (1,))

    def __call__(
        self,
        x: Float[Array, "B T width"],
        at: Any,
        cache: Any,
        more: Float[Array, "B T part"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Return the layer's output and its cache, which is of the kind that its attention reads.

        more: The tokens' own input to this layer; for a decoder without such inputs, features to
          add to the output (DeepStack).
        """
        c = self.config
        normed, x = self.normed(x)
        out, cache = self.self_attn(normed, at, cache)
        if c.sandwich:
            x = x + self.post_attention_layernorm(out)
            x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + out
            x = x + self.mlp(self.post_attention_layernorm(x))
        if more is not None:
            x = self.add_input(x, more) if c.hidden_size_per_layer_input else x + more
        return x * self.layer_scalar if c.layer_scalar else x, cache

    def normed(self, x: Float[Array, "B T width"]) -> tuple[Array, Float[Array, "B T D"]]:
        """Return the attention's input, and the stream that its output is added to."""
        return self.input_layernorm(x), x

    def keys_values(self, x: Float[Array, "B T width"], rotary: Array) -> tuple[Array, Array]:
        """Return the layer's keys, rotated, and values of T tokens."""
        return self.self_attn.keys_values(self.normed(x)[0], rotary)


def run_layers(
    layers: Sequence[Callable[..., Any]],
    x: Array,
    at: Places,
    cache: KVCache | None,
    inputs: Sequence[Array] = (),
    key_layers: Sequence[int] | None = None,
) -> tuple[Array, KVCache | None]:
    """Run layer after layer, each with a pair of cache leaves.

    The hidden states that `cache.kept` names are written to the cache.

    Args:
      inputs: `more` of each of the first layers, see `Layer`. As in transformers, those past the
        last layer are left out.
      key_layers: As in `TextConfig`; None lets each layer read its own pair.
    """
    if not inputs and cache is None and (looped := loop_layers(layers, x, at, None)) is not None:
        return looped[0], None
    leaves: list[Any] = [None] * len(layers)
    if cache is not None:
        leaves = [*zip(cache.k, cache.v, strict=True)]
    states = [x]
    for i, (layer, source) in enumerate(zip(layers, key_layers or range(len(layers)), strict=True)):
        x, leaves[source] = call_layer(layer, x, at, leaves[source], *inputs[i : i + 1])
        states.append(x)
    if cache is None:
        return x, None
    if cache.kept:
        cache = keep_hidden(cache, jnp.concatenate([states[i] for i in cache.kept], axis=-1), at)
    return x, cache.replace(k=tuple(k for k, _ in leaves), v=tuple(v for _, v in leaves))


def keep_hidden(cache: KVCache, states: Float[Array, "B T D"], at: Places) -> KVCache:
    """Return the cache with the hidden states of T new tokens."""
    assert cache.hidden is not None
    return cache.replace(hidden=write_or_fill(cache.hidden, states[:, :, None], at.slots, at.live))


class Decoder(nn.Module):
    """Run embedding, layers and final norm, as Hugging Face's `LlamaModel`."""

    config: RotaryConfig
    attention: type[Attention] = Attention

    def setup(self) -> None:
        c = self.config
        self.embed_tokens = Embed(c.vocab_size, c.hidden_size, embedding_init=INIT)
        if c.hidden_size_per_layer_input:
            self.per_layer = PerLayerInputs(c)
            nn.share_scope(self, self.per_layer)
        self.layers = [Layer(c.of_layer(i), self.attention) for i in range(c.num_hidden_layers)]
        self.norm = text_norm(c)

    def __call__(
        self, embeds: Array, at: Places, cache: KVCache | None
    ) -> tuple[Array, KVCache | None]:
        x, *inputs = self.parts(embeds)
        x, cache = run_layers(self.layers, x, at, cache, inputs, self.config.key_layers)
        x = self.norm(x)
        if cache is not None and cache.hidden is not None and not cache.kept:
            cache = keep_hidden(cache, x, at)
        return x, cache

    def parts(self, embeds: Array) -> list[Array]:
        """Return the first layer's input, and `inputs` of `run_layers`."""
        c = self.config
        if c.hidden_size_per_layer_input:
            x, per_layer = jnp.split(embeds, [c.hidden_size], axis=-1)
            return [x, *self.per_layer(x, per_layer)]
        return jnp.split(embeds, embeds.shape[-1] // c.hidden_size, axis=-1)


class CausalLM(nn.Module):
    """Run a decoder and its output matrix, as Hugging Face's `LlamaForCausalLM` does."""

    config: RotaryConfig

    def setup(self) -> None:
        self.model = Decoder(self.config)
        c = self.config
        if c.draft_vocabulary or not c.tie_word_embeddings:
            self.lm_head = Dense(c.scored_tokens, bias=False, widens=True)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T wide"]:
        """Return token embeddings, and behind them those for all layers, if the family has some.

        Ids past the vocabulary, such as a target's padding in a draft, read the last row.
        """
        c, rows = self.config, jnp.clip(tokens, 0, self.config.vocab_size - 1)
        embeds = scaled(self.model.embed_tokens(rows), c.embed_scale)
        if not c.hidden_size_per_layer_input:
            return embeds
        return jnp.concatenate([embeds, self.model.per_layer.embed(rows)], axis=-1)

    def shown(self, features: Float[Array, "B rows D"]) -> Float[Array, "B rows wide"]:
        """Return images' features as `embed` returns tokens; for the layers they are padding."""
        c = self.config
        padding = self.embed(jnp.full((1, 1), c.pad_token_id or 0))[..., c.hidden_size :]
        padding = jnp.broadcast_to(padding, (*features.shape[:2], padding.shape[-1]))
        return jnp.concatenate([features, padding.astype(features.dtype)], axis=-1)

    def hidden(
        self, embeds: Float[Array, "B T wide"], at: Places, cache: KVCache | None = None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Return the final-normed hidden states of T tokens a row, and the written cache.

        The caller sets the cache's `length`. Without a cache the tokens attend to each other only.
        """
        return self.model(embeds, at, cache)

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Return the scores of the next token, float32."""
        return fill_vocabulary(self.config, self.scores(hidden))

    def scores(self, hidden: Float[Array, "... D"]) -> Float[Array, "... words"]:
        """Return the scores of the draft vocabulary, or of all tokens without one."""
        tied = self.config.tie_word_embeddings and not self.config.draft_vocabulary
        scores = self.model.embed_tokens.attend(hidden) if tied else self.lm_head(hidden)
        scores, cap = scores.astype(jnp.float32), self.config.final_logit_softcapping
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def extend(
        self, tokens: Int[Array, "B T"], cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Append T tokens to each row at its length; return next-token logits and the cache.

        The tokens follow one another, or are the last nodes of `tree`.
        """
        count = tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(count)
        rotary, mask = positions + cache.shift[:, None], None
        if tree is not None:
            root = cache.length + cache.shift + count - tree.seen.shape[-1]
            rotary, mask = root[:, None] + tree.depth, tree.seen
        at = Places(positions, rotary, mask)
        hidden, cache_after = self.hidden(self.embed(tokens), at, cache)
        assert cache_after is not None
        return self.logits(hidden), cache_after.replace(length=cache.length + count)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Return the logits of a whole right-padded batch, without a cache."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.logits(self.hidden(self.embed(tokens), Places(positions, positions))[0])


class Lvlm(nn.Module):
    """Share the code that all LVLMs have.

    `encode` turns images into tower features. `project` turns these into a table of rows, which
    prompt slots show. `language_model` reads the prompt.
    """

    config: Any

    def __call__(self, tokens: Int[Array, "B L"], **images: Array) -> Array:
        """Read a text and images, so that `init` makes all parameters."""
        self.project(self.encode(**images))
        return self.language_model(tokens)
