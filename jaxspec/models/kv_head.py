"""AASD's draft head: decoder layers that read the target's own last-layer keys and values.

The head embeds a token, runs it through its own layers and scores the next token. Embedding and
output head are the target's, frozen. Its queries attend to three kinds of keys and values: the
target's for text, unchanged; the target's for each image, pooled from n to k slots by the KV
projector (K* = W_K K and V* = W_V V); and its own for the tokens that it drafts.

Cached keys are rotated already, and pooling them pools scores: q . (sum_j W_cj K_j) =
sum_j W_cj (q . K_j). So queries and the head's own keys take the tokens' positions in the target's
row, with uncompressed images.

Decoding and training use the same parameters in two ways:

- decoding: `pack` makes an ordinary `KVCache`, and the head is a `CausalLM` over it (`joined`);
- training (Target-Draft attention): `KVHead` runs blocks of J tokens from A anchors at once. The
  block of anchor a sees the target's slots before a, and its own tokens up to each query. A draft
  that starts at a sees the same: a is the newest token and has no key of the target's yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache, write
from jaxspec.config import KVHeadConfig, ModelConfig, target_hash, text_config
from jaxspec.errors import InputError
from jaxspec.models.decoder import Attention, Layer, Places
from jaxspec.models.inputs import Pool
from jaxspec.models.layers import INIT, Dense, RMSNorm, apply, wide
from jaxspec.models.vocabulary import head_kernel
from jaxspec.typing import Array, Bool, Float, Int, Params

NEVER = np.iinfo(np.int32).max
"""Index of a slot that no query reads."""


class HeadRows(struct.PyTreeNode):
    """Slots of the target's prompts that a KV head reads; -1 where a row has fewer."""

    text: Int[Any, "B text"]
    """Slots of text, in order."""
    images: Int[Any, "B I tokens"]
    """Slots of each image, in order."""


class Context(struct.PyTreeNode):
    """The target's keys and values for a head: S slots, those of I images, then those of text."""

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    since: Int[Array, "B S"]
    """Index in the target's row of a slot's last token, which later tokens may read; or NEVER."""
    bias: Float[Array, "B S"] | None
    """Bias on the scores of a slot."""


class Block(NamedTuple):
    """A layer's inputs besides its tokens."""

    context: Context
    k: Float[Array, "B A J K H"] | None = None
    """The layer's keys of the blocks' earlier tokens; None at the first token."""
    v: Float[Array, "B A J K H"] | None = None


class KVProjector(nn.Module):
    """Keys and values of images, n slots each, pooled to k."""

    config: KVHeadConfig

    @nn.compact
    def __call__(
        self,
        k: Float[Array, "B I tokens K H"],
        v: Float[Array, "B I tokens K H"],
        there: Bool[Array, "B I tokens"],
    ) -> tuple[Float[Array, "B I slots K H"], Float[Array, "B I slots K H"]]:
        c = self.config
        if c.pooling == "attention":
            shape = (c.image_slots, *k.shape[-2:])
            queries = self.param("queries", INIT, shape)
            scores = jnp.einsum(
                "cKH,BInKH->BIKcn", queries, k, preferred_element_type=wide(k.dtype)
            )
            # Finite, because all slots of an absent image are masked.
            scores = jnp.where(there[:, :, None, None], scores * k.shape[-1] ** -0.5, -1e30)
            weights = jax.nn.softmax(scores, axis=-1).astype(k.dtype)
            return jnp.einsum("BIKcn,BInKH->BIcKH", weights, k), jnp.einsum(
                "BIKcn,BInKH->BIcKH", weights, v
            )

        def pooled(name: str, x: Array) -> Array:
            average = jnp.asarray(average_pooling(c))
            matrix = average if c.pooling == "avgpool" else self.param(name, lambda _: average)
            out = jnp.einsum(
                "cn,BInKH->BIcKH", matrix.astype(x.dtype), x, preferred_element_type=wide(x.dtype)
            )
            return out.astype(x.dtype)

        return pooled("k", k), pooled("v", v)


def average_pooling(config: KVHeadConfig) -> np.ndarray:
    """Return float32 [k, n] of averages over squares of the image, or over runs.

    Squares need square numbers n and k.
    """
    square = math.isqrt(config.image_tokens) ** 2 == config.image_tokens
    square &= math.isqrt(config.image_slots) ** 2 == config.image_slots
    return Pool(config.image_slots, "avg2d" if square else "avg1d").matrix(config.image_tokens)


class AnchoredAttention(Attention):
    """Target-Draft attention of A blocks' next J tokens.

    Each token reads the slots before its block's anchor, and its own block.
    """

    def read(
        self,
        q: Float[Array, "B A*J N H"],
        k: Float[Array, "B A*J K H"],
        v: Float[Array, "B A*J K H"],
        at: Places,
        cache: Any,
    ) -> tuple[Float[Array, "B A*J N H"], Any]:
        block: Block = cache
        context, seen = block.context, at.seen
        assert seen is not None
        batch, _, heads, width = q.shape
        anchors, kv_heads = seen.shape[1], k.shape[2]
        q = q.reshape(batch, anchors, -1, kv_heads, heads // kv_heads, width)
        k, v = (x.reshape(batch, anchors, -1, kv_heads, width) for x in (k, v))
        if block.k is not None and block.v is not None:
            k, v = jnp.concatenate([block.k, k], axis=2), jnp.concatenate([block.v, v], axis=2)
        exact = wide(q.dtype)
        before = (
            jnp.einsum("BAJKGH,BSKH->BAKGJS", q, context.k, preferred_element_type=exact)
            * width**-0.5
        )
        if context.bias is not None:
            before += context.bias[:, None, None, None, None]
        before = jnp.where(seen[:, :, None, None, None], before, -jnp.inf)
        inside = (
            jnp.einsum("BAJKGH,BATKH->BAKGJT", q, k, preferred_element_type=exact) * width**-0.5
        )
        new, known = inside.shape[-2:]  # the new tokens are the last; 2 of 3: 110, 111
        inside = jnp.where(jnp.tri(new, known, known - new, bool), inside, -jnp.inf)
        probs = jax.nn.softmax(jnp.concatenate([before, inside], axis=-1), axis=-1).astype(v.dtype)
        out = jnp.einsum("BAKGJS,BSKH->BAJKGH", probs[..., : seen.shape[-1]], context.v)
        out += jnp.einsum("BAKGJT,BATKH->BAJKGH", probs[..., seen.shape[-1] :], v)
        return out.reshape(batch, -1, heads, width), Block(context, k, v)


class KVHead(nn.Module):
    """The head's parameters, and its training pass."""

    config: KVHeadConfig

    def setup(self) -> None:
        c = self.config
        self.layers = [
            Layer(c.text_config, AnchoredAttention) for _ in range(c.text_config.num_hidden_layers)
        ]
        self.norm = RMSNorm(c.text_config.rms_norm_eps)
        if c.reads_hidden:
            self.fc = Dense(c.text_config.hidden_size, bias=False)
        if c.pools:
            self.kv_projector = KVProjector(c)
        if c.pools and c.slot_bias:
            weight = math.log(c.image_tokens / c.image_slots)
            self.slot_bias = self.param("slot_bias", lambda _: jnp.full((1,), weight, jnp.float32))

    def context(
        self, k: Float[Array, "B K S H"], v: Float[Array, "B K S H"], rows: HeadRows
    ) -> Context:
        """Return the slots that the head reads of the target's last layer."""
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
        return self.fc(jnp.concatenate([embeds, before], axis=-1))

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
          embeds: The target's embeddings of the blocks' tokens.
          anchors: Index of each block's first token in the target's row.
          rotary: Positions of the tokens.
          k, v: The target's last layer.
          rows: Slots to read.
          before: The target's hidden states before the anchors, for a head that reads them.
        """
        context = self.context(k, v, rows)
        seen = context.since[:, None] < anchors[..., None]
        blocks: list[Any] = [Block(context)] * len(self.layers)

        def read(x: Array, rotary: Array) -> Array:
            flat, shape = rotary.reshape(rotary.shape[0], -1), x.shape
            x = x.reshape(*flat.shape, -1)
            for i, layer in enumerate(self.layers):
                x, blocks[i] = layer(x, Places(flat, flat, seen), blocks[i])
            return self.norm(x).reshape(shape)

        if before is None:
            return read(embeds, rotary)
        states = [before[:, :, None]]
        for step in range(embeds.shape[2]):  # each token reads the state before it
            token = slice(step, step + 1)
            states.append(read(self.fuse(embeds[:, :, token], states[-1]), rotary[..., token]))
        return jnp.concatenate(states[1:], axis=2)


def states_before(
    config: KVHeadConfig, hidden: Float[Array, "B L D"], anchors: Int[Array, "B A"]
) -> Float[Array, "B A D"] | None:
    """Return the target's hidden states before the anchors; None for a head that reads none."""
    if not config.reads_hidden:
        return None
    return jnp.take_along_axis(hidden, jnp.maximum(anchors - 1, 0)[..., None], axis=1)


def _gather(leaf: Float[Array, "B K S H"], at: Int[Array, "B text"]) -> Float[Array, "B text K H"]:
    """Return the slots `at`; zeros for -1, so that masked values are finite."""
    rows = jnp.take_along_axis(leaf, jnp.maximum(at, 0)[:, None, :, None], axis=2).swapaxes(1, 2)
    return jnp.where((at < 0)[..., None, None], 0, rows)


def pack(
    config: KVHeadConfig, params: Params, target: KVCache, rows: HeadRows, slots: int
) -> KVCache:
    """Return the head's cache after prefill: the slots of `KVHead.context`, each row without gaps.

    `shift` is the number of slots that a row has fewer than the target's row, so that new tokens
    take the target's positions. With 10 slots of text and an image pooled from 576 slots to 64,
    length is 74 and shift 512. All layers of the head begin with the same keys and values.
    """
    context: Context = apply(
        KVHead(config), params, target.k[-1], target.v[-1], rows, method="context"
    )
    there = context.since < target.length[:, None]
    length = there.sum(1)
    places = jnp.where(there, jnp.cumsum(there, axis=1) - 1, slots)

    def packed(leaf: Array) -> Array:
        batch, _, heads, width = leaf.shape
        return write(jnp.zeros((batch, heads, slots, width), leaf.dtype), leaf, places)

    bias = None
    if context.bias is not None:
        bias = packed(context.bias[..., None, None])[:, 0, :, 0]
    hidden = None
    if target.hidden is not None:
        shape = (*target.hidden.shape[:2], slots, target.hidden.shape[-1])
        hidden = _with_newest(jnp.zeros(shape, target.hidden.dtype), target, length)
    layers = config.text_config.num_hidden_layers
    return KVCache(
        k=(packed(context.k),) * layers,
        v=(packed(context.v),) * layers,
        length=length,
        shift=target.length + target.shift - length,
        bias=bias,
        hidden=hidden,
    )


def adopt_target_kv(
    config: KVHeadConfig, cache: KVCache, target: KVCache, emitted: Int[Array, " B"], count: int
) -> KVCache:
    """Replace the head's keys and values of `count` newly verified tokens by the target's.

    `emitted` of them stay; the next block overwrites the slots after them. A head that reads no
    text keeps none.
    """
    new = jnp.arange(count)
    if not config.reads_text:
        hidden = (
            cache.hidden
            if cache.hidden is None
            else _with_newest(cache.hidden, target, cache.length)
        )
        return cache.replace(shift=cache.shift + emitted, hidden=hidden)
    source = (target.length - emitted)[:, None] + new
    places = cache.length[:, None] + new

    def taken(leaf: Array, theirs: Any) -> Array:
        verified = jnp.take_along_axis(
            theirs, source[:, None, :, None], axis=2, mode="clip"
        ).swapaxes(1, 2)
        return write(leaf, verified, places)

    return cache.replace(
        k=tuple(taken(leaf, target.k[-1]) for leaf in cache.k),
        v=tuple(taken(leaf, target.v[-1]) for leaf in cache.v),
        length=cache.length + emitted,
        hidden=cache.hidden if cache.hidden is None else taken(cache.hidden, target.hidden),
    )


def _with_newest(
    hidden: Float[Array, "B 1 S D"], target: KVCache, length: Int[Array, " B"]
) -> Array:
    """Write the hidden state of the target's newest token, where a draft begins."""
    assert target.hidden is not None
    newest = jnp.take_along_axis(target.hidden, (target.length - 1)[:, None, None, None], axis=2)
    return write(hidden, newest, (length - 1)[:, None])


def joined(head: Params, target: Params, words: tuple[int, ...] = ()) -> Params:
    """Return the head's parameters as a `CausalLM`, with the target's embedding and output head.

    With a draft vocabulary the output head has the columns of its words, which `head` may hold.
    """
    target = target.get("language_model", target)
    own = {
        name: leaf for name, leaf in head.items() if name == "norm" or name.startswith("layers_")
    }
    model = {"embed_tokens": target["model"]["embed_tokens"]} | own
    if words:
        return {
            "model": model,
            "lm_head": head.get("lm_head") or {"kernel": head_kernel(target, words)},
        }
    return {"model": model} | ({"lm_head": target["lm_head"]} if "lm_head" in target else {})


def init_head(config: KVHeadConfig, target: Params | None, key: jax.Array) -> Params:
    """Return initial parameters, float32.

    Layers and norm are copies of the target's last ones, or random without a target. The KV
    projector averages.
    """
    text = config.text_config
    images = jnp.zeros((1, 1, max(config.image_tokens, 1)), jnp.int32)
    leaf = jnp.zeros((1, text.num_key_value_heads, 1, text.head_dim))
    zero = jnp.zeros((1, 1), jnp.int32)
    embeds = jnp.zeros((1, 1, 1, text.hidden_size))
    make = jax.jit(KVHead(config).init)
    before = embeds[:, :, 0] if config.reads_hidden else None
    params = dict(
        make(key, embeds, zero, zero[..., None], leaf, leaf, HeadRows(zero, images), before)[
            "params"
        ]
    )
    if config.reads_hidden:  # at first the embedding alone
        params["fc"] = {"kernel": jnp.eye(2 * text.hidden_size, text.hidden_size)}
    if target is None:
        return params
    theirs = target["model"]
    layers = sorted(
        (name for name in theirs if name.startswith("layers_")),
        key=lambda name: int(name.split("_")[1]),
    )
    last = {f"layers_{i}": theirs[name] for i, name in enumerate(layers[-text.num_hidden_layers :])}
    return params | jax.tree.map(
        lambda leaf: jnp.array(leaf, jnp.float32), last | {"norm": theirs["norm"]}
    )


@cache
def abstract_head(config: KVHeadConfig) -> Params:
    """Return the shapes of the parameters; nothing is allocated."""
    return jax.eval_shape(lambda: init_head(config, None, jax.random.key(0)))


def reads_as_text(config: KVHeadConfig, shown: np.ndarray) -> np.ndarray:
    """Return the slots of a row that are read unpooled: text, and images with pooling "none"."""
    return np.arange(len(shown)) if config.pooling == "none" else np.flatnonzero(shown < 0)


def head_rows(
    config: KVHeadConfig, shown: Sequence[np.ndarray], width: int, images: int
) -> HeadRows:
    """Return the slots of prompts that a head reads, on the host.

    Args:
      shown: Index of the image in each slot of each row; -1 for text.
      width: Most text slots.
      images: I, most images.
    """
    rows = no_rows(config, len(shown), width, images)
    for row, image in enumerate(shown):
        reads = reads_as_text(config, image)
        if len(reads) > width:
            raise InputError(
                f"KV head: {len(reads)} tokens of a prompt, and room for {width}; "
                "use a larger bucket"
            )
        rows.text[row, : len(reads)] = reads
        for i in range(image.max(initial=-1) + 1 if config.pools else 0):
            slots = np.flatnonzero(image == i)[: config.image_tokens]
            if config.pooling != "attention" and len(slots) < config.image_tokens:
                raise InputError(
                    f"KV head: an image of {len(slots)} tokens, and its {config.pooling!r} "
                    f"pooling was made for {config.image_tokens}; "
                    "use a head with 'attention' pooling"
                )
            rows.images[row, i, : len(slots)] = slots
    return rows


def no_rows(config: KVHeadConfig, batch: int, width: int, images: int) -> HeadRows:
    """Return `head_rows` without any slot to read."""
    shape = (batch, images if config.pools else 0, config.image_tokens)
    return HeadRows(np.full((batch, width), -1, np.int32), np.full(shape, -1, np.int32))


def check_target(config: KVHeadConfig, target: ModelConfig) -> None:
    """Refuse a target that the head was not made for."""
    text, found = text_config(target), target_hash(target)
    if found != config.target_hash:
        name = f" ({config.target_name})" if config.target_name else ""
        raise InputError(
            f"KV head: made for a target of configuration {config.target_hash}{name}, and this "
            f"{target.model_type} ({text.num_hidden_layers} layers of {text.hidden_size}) is "
            f"{found}; use the head's own target"
        )
