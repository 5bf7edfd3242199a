"""Draft heads: decoder layers that read the target, AASD's KV head and EAGLE-3's head.

A head embeds a token, runs it through its own layers and scores the next token.

AASD's embedding and output head are the target's, frozen. Its queries attend to three kinds of
keys and values: the target's for text, unchanged; the target's for each image, pooled from n to k
slots by the KV projector (K* = W_K K and V* = W_V V); and its own for the tokens that it drafts.

Cached keys are rotated already, and pooling them pools scores: q . (sum_j W_cj K_j) =
sum_j W_cj (q . K_j). So queries and the head's own keys take the tokens' positions in the target's
row, with uncompressed images.

EAGLE-3's (Li et al. 2025, arXiv 2503.01840) has one layer, keys and values of its own, and its own
output head. Its slot p reads the embedding of token p + 1 next to the hidden state of token p. That
state is `fc` of three of the target's, or, of a token that it drafted itself, its own output. It
takes the position of token p.

A KV head that is `parallel` drafts a block in one pass, as DFlash, P-EAGLE and DSpark do: mask
embeddings stand for the tokens that it does not know. With gamma = 3 and the newest token x, it
reads x m1 m2, and scores what follows each of them. So it reads its layers and the output head
once a block, and a token's scores depend on the tokens drafted before it by `correction` alone.

Decoding and training use the same parameters in two ways:

- decoding: `models/head_cache.py` makes an ordinary `KVCache`, and the head is a `CausalLM` over
  it (`joined`);
- training: `KVHead` runs blocks of J tokens from A anchors at once (`models/anchored.py`).
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.config import EagleConfig, KVHeadConfig
from jaxspec.models.anchored import NEVER, AnchoredAttention, Block, Context
from jaxspec.models.decoder import Places, layer_of
from jaxspec.models.head_slots import HeadRows
from jaxspec.models.kv_projector import KVProjector
from jaxspec.models.layers import INIT, Dense, RMSNorm, apply, times, wide
from jaxspec.models.vocabulary import head_kernel
from jaxspec.typing import Array, Float, Int, Params


class KVHead(nn.Module):
    """Hold a head's parameters, and run its training pass."""

    config: KVHeadConfig

    def setup(self) -> None:
        c, text = self.config, self.config.text_config
        layer = layer_of(text)
        self.layers = [layer(text, AnchoredAttention) for _ in range(text.num_hidden_layers)]
        self.norm = RMSNorm(text.rms_norm_eps)
        if c.reads_hidden:
            self.fc = Dense(text.hidden_size, bias=False)
        if isinstance(text, EagleConfig) and text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)
        if c.pools:
            self.kv_projector = KVProjector(c)
        if c.pools and c.slot_bias:
            weight = math.log(c.image_tokens / c.image_slots)
            self.slot_bias = self.param("slot_bias", lambda _: jnp.full((1,), weight, jnp.float32))
        if c.parallel:
            self.masks = self.param("masks", INIT, (c.gamma - 1, text.hidden_size))
        if c.markov:
            words = len(text.draft_vocabulary) or text.vocab_size
            self.markov_in = self.param("markov_in", INIT, (text.hidden_size, c.markov))
            self.markov_out = self.param("markov_out", nn.initializers.zeros, (c.markov, words))

    def context(
        self, k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], rows: HeadRows
    ) -> Context:
        """Return the slots that the head reads of the target, of what `keys_of` returns."""
        c = self.config
        batch, kv_heads, _, width = k.shape
        since = (
            jnp.where(rows.text < 0, NEVER, rows.text)
            if c.reads_text
            else jnp.full_like(rows.text, NEVER)
        )
        k_text, v_text = (_gather(leaf, rows.text) for leaf in (k, v))
        if not c.pools:
            return Context(k_text, v_text, since, None)
        at = rows.images.reshape(batch, -1)
        shape = (*rows.images.shape, kv_heads, width)
        k_image, v_image = self.kv_projector(
            _gather(k, at).reshape(shape), _gather(v, at).reshape(shape), rows.images >= 0
        )
        slots = k_image.shape[1] * c.image_slots
        last = rows.images.max(-1)
        since = jnp.concatenate(
            [jnp.repeat(jnp.where(last < 0, NEVER, last), c.image_slots, axis=1), since], axis=1
        )
        bias = None
        if c.slot_bias:
            bias = jnp.where(jnp.arange(since.shape[1]) < slots, self.slot_bias, 0.0)
            bias = jnp.broadcast_to(bias, since.shape)
        flat = (batch, slots, kv_heads, width)
        return Context(
            jnp.concatenate([k_image.reshape(flat), k_text], axis=1),
            jnp.concatenate([v_image.reshape(flat), v_text], axis=1),
            since,
            bias,
        )

    def fuse(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"]
    ) -> Float[Array, "... D"]:
        """Return the layers' inputs from embeddings and the hidden states that predicted them."""
        both = jnp.concatenate([embeds, before], axis=-1)
        return both if self.config.fused else self.fc(both)

    def masked(
        self, embeds: Float[Array, "... D"], before: Float[Array, "... D"] | None, count: int
    ) -> Float[Array, "... J D"]:
        """Return the layers' inputs of a block of `count` tokens, of which the first is known.

        Args:
          embeds: Embedding of the known token.
          before: The hidden state that predicted it, for a head that reads hidden states.
        """
        masks = self.masks[: count - 1].astype(embeds.dtype)
        shape = (*embeds.shape[:-1], *masks.shape)
        x = jnp.concatenate([embeds[..., None, :], jnp.broadcast_to(masks, shape)], axis=-2)
        if before is None:
            return x
        return self.fuse(x, jnp.broadcast_to(before[..., None, :], x.shape))

    def correction(self, embeds: Float[Array, "... D"]) -> Float[Array, "... words"]:
        """Return what tokens with these embeddings add to the scores of their followers."""
        exact = embeds.astype(wide(embeds.dtype))
        # Embeddings of any scale learn at the same rate.
        square = jnp.mean(exact * exact, axis=-1, keepdims=True)
        normed = exact * jax.lax.rsqrt(square + self.config.text_config.rms_norm_eps)
        low = times(normed.astype(embeds.dtype), self.markov_in)
        return times(low, self.markov_out, exact.dtype).astype(jnp.float32)

    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return the hidden states that an EAGLE-3 head reads of the target's."""
        text = self.config.text_config
        if isinstance(text, EagleConfig) and text.norm_before_fc:
            states = self.input_norm(states)
        return self.fc(states)

    def own_context(
        self,
        embeds: Float[Array, "B L D"],
        states: Float[Array, "B L fused"],
        rotary: Int[Array, "B L"] | Int[Array, "B 3 L"],
    ) -> Context:
        """Return the keys and values of an EAGLE-3 head over whole rows.

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
        rotary: Int[Array, "B A J"],
        k: Float[Array, "B K S H"],
        v: Float[Array, "B K S H"],
        rows: HeadRows,
        before: Float[Array, "B A D"] | None = None,
    ) -> Float[Array, "B A J D"]:
        """Return the final-normed hidden states of blocks of J tokens that begin at the anchors.

        Args:
          embeds: The target's embeddings of the blocks' tokens; a parallel head reads the first.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the tokens.
          k, v: What `keys_of` returns.
          rows: Slots to read.
          before: The target's hidden states before the anchors, for a head that reads them.
        """
        return self._blocks(embeds, anchors, rotary, self.context(k, v, rows), before)

    def unroll(
        self,
        embeds: Float[Array, "B A J D"],
        anchors: Int[Array, "B A"],
        rotary: Int[Array, "B A J"] | Int[Array, "B 3 A J"],
        row: tuple[Array, Array, Array],
        before: Float[Array, "B A fused"],
    ) -> Float[Array, "B A J D"]:
        """Return what `__call__` does for an EAGLE-3 head: its training-time test.

        Args:
          embeds, anchors: See `__call__`.
          rotary: Positions of the tokens before the blocks' tokens.
          row: Arguments of `own_context`.
          before: The target's hidden states before the anchors.
        """
        context = self.own_context(*row)
        return self._blocks(embeds, anchors, rotary, context, self.combine(before))

    def contexts(self, context: Context) -> list[Context]:
        """Return the context of each of the head's layers."""
        layers = self.config.key_layers
        return context.split(len(layers)) if layers else [context] * len(self.layers)

    def _blocks(
        self, embeds: Array, anchors: Array, rotary: Array, context: Context, before: Array | None
    ) -> Array:
        seen = context.since[:, None] < anchors[..., None]
        blocks: list[Any] = [Block(each) for each in self.contexts(context)]

        def read(x: Array, rotary: Array) -> Array:
            flat, shape = rotary.reshape(*rotary.shape[:-2], -1), x.shape[:3]
            x = x.reshape(shape[0], flat.shape[-1], -1)
            for i, layer in enumerate(self.layers):
                x, blocks[i] = layer(x, Places(flat, flat, seen), blocks[i])
            return x.reshape(*shape, -1)

        if self.config.parallel:
            return self.norm(read(self.masked(embeds[:, :, 0], before, embeds.shape[2]), rotary))
        if before is None:
            return self.norm(read(embeds, rotary))
        fed, out = before[:, :, None], []
        for step in range(embeds.shape[2]):  # each token reads the state before it
            token = slice(step, step + 1)
            x = read(self.fuse(embeds[:, :, token], fed), rotary[..., token])
            out.append(self.norm(x))
            fed = x if self.config.own_states else out[-1]
        return jnp.concatenate(out, axis=2)


def keys_of(
    config: KVHeadConfig, cache: KVCache
) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
    """Return the keys and values that a head reads of its target's cache.

    Those of several layers stand one behind the other on the axis of heads: K is their sum.
    """
    layers = config.key_layers or (-1,)
    k, v = (jnp.concatenate([leaf[i] for i in layers], axis=1) for leaf in (cache.k, cache.v))
    return k, v


def corrected(
    config: KVHeadConfig,
    params: Params,
    scores: Float[Array, "... words"],
    embeds: Float[Array, "... D"],
) -> Float[Array, "... words"]:
    """Return the scores of tokens, with the correction of a head that has one.

    embeds: Embeddings of the tokens before them.
    """
    if not config.markov:
        return scores
    return scores + apply(KVHead(config), params, embeds, method="correction")


def states_before(
    config: KVHeadConfig, hidden: Float[Array, "B L D"] | None, anchors: Int[Array, "B A"]
) -> Float[Array, "B A D"] | None:
    """Return the target's hidden states before the anchors; None for a head that reads none."""
    if not config.reads_hidden or hidden is None:
        return None
    return jnp.take_along_axis(hidden, jnp.maximum(anchors - 1, 0)[..., None], axis=1)


def _gather(leaf: Float[Array, "B K S H"], at: Int[Array, "B text"]) -> Float[Array, "B text K H"]:
    """Return the slots `at`; zeros for -1, so that masked values are finite."""
    rows = jnp.take_along_axis(leaf, jnp.maximum(at, 0)[:, None, :, None], axis=2).swapaxes(1, 2)
    return jnp.where((at < 0)[..., None, None], 0, rows)


def joined(head: Params, target: Params, words: tuple[int, ...] = ()) -> Params:
    """Return the head's parameters as a `CausalLM`, which borrows missing parts from the target.

    Embedding and output head may be missing. With a draft vocabulary the output head has the
    columns of its words, which `head` may hold.
    """
    target = target.get("language_model", target)
    own = {
        name: leaf
        for name, leaf in head.items()
        if name in ("norm", "embed_tokens") or name.startswith("layers_")
    }
    model = {"embed_tokens": target["model"]["embed_tokens"]} | own
    if words or "lm_head" in head:
        return {
            "model": model,
            "lm_head": head.get("lm_head") or {"kernel": head_kernel(target, words)},
        }
    return {"model": model} | ({"lm_head": target["lm_head"]} if "lm_head" in target else {})


def init_head(config: KVHeadConfig, target: Params | None, key: jax.Array) -> Params:
    """Return initial parameters, float32.

    Layers are copies of the target's last ones, or of those whose keys they read, and the norm is
    its norm; without a target all are random. The KV projector averages. An EAGLE-3 head copies the
    target's norm and output head.
    """
    text = config.text_config
    if isinstance(text, EagleConfig):
        return _init_eagle(config, text, target, key)
    images = jnp.zeros((1, 1, max(config.image_tokens, 1)), jnp.int32)
    heads = max(len(config.key_layers), 1) * text.num_key_value_heads
    leaf = jnp.zeros((1, heads, 1, text.head_dim))
    zero = jnp.zeros((1, 1), jnp.int32)
    embeds = jnp.zeros((1, 1, 1, text.hidden_size))
    before = embeds[:, :, 0] if config.reads_hidden else None
    rows = HeadRows(zero, images)
    params = _drawn(config, None, key, embeds, zero, zero[..., None], leaf, leaf, rows, before)
    if config.reads_hidden:  # at first the embedding alone
        params["fc"] = {"kernel": jnp.eye(2 * text.hidden_size, text.hidden_size)}
    if target is None:
        return params
    theirs = target["model"]
    layers = sorted(
        (name for name in theirs if name.startswith("layers_")),
        key=lambda name: int(name.split("_")[1]),
    )
    like = config.key_layers or range(-text.num_hidden_layers, 0)
    last = {f"layers_{i}": theirs[layers[at]] for i, at in enumerate(like)}
    return params | jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.float32), last | {"norm": theirs["norm"]}
    )


@partial(jax.jit, static_argnums=(0, 1))
def _drawn(config: KVHeadConfig, method: str | None, key: jax.Array, *inputs: Any) -> Params:
    """Return random parameters, for a method of the head and its inputs."""
    return dict(KVHead(config).init(key, *inputs, method=method)["params"])


def _init_eagle(
    config: KVHeadConfig, text: EagleConfig, target: Params | None, key: jax.Array
) -> Params:
    states = jnp.zeros((1, 1, 3 * text.target_hidden_size))
    zero, embeds = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, 1, text.hidden_size))
    row = embeds[0], states, zero
    params = _drawn(config, "unroll", key, embeds, zero, zero[..., None], row, states)
    words = len(text.draft_vocabulary) or text.vocab_size
    if text.own_output:
        params["lm_head"] = {"kernel": INIT(key, (text.hidden_size, words), jnp.float32)}
    if text.own_embedding:
        shape = (text.vocab_size, text.hidden_size)
        params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
    if target is None:
        return params
    kernel = head_kernel(target, text.draft_vocabulary or tuple(range(text.vocab_size)))
    theirs = {"norm": target["model"]["norm"], "lm_head": {"kernel": kernel}}
    return params | jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), theirs)


@cache
def abstract_head(config: KVHeadConfig) -> Params:
    """Return the shapes of the parameters; nothing is allocated."""
    return jax.eval_shape(lambda: init_head(config, None, jax.random.key(0)))
