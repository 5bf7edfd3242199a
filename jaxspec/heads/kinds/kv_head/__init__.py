"""Define AASD's KV head: decoder layers that read the target's keys and values.

It embeds a token, runs it through its own layers and scores the next token. Embedding and output
head are the target's, frozen. Its queries attend to three kinds of keys and values: the target's
for text, in place; the target's for each image, pooled from n to k slots by the KV projector
(K* = W_K K and V* = W_V V); and its own for the tokens that it drafts.

Cached keys are rotated already, and pooling them pools scores: q . (sum_j W_cj K_j) =
sum_j W_cj (q . K_j). So queries and the head's own keys take the tokens' positions in the target's
row, with uncompressed images.

The format is this library's own, also of one-pass heads. `config.json` is `KVHeadConfig.to_dict`:
model_type "jaxspec_kv_head", the decoder of the head's layers (`text_config`, with its depth, head
counts, rotary fields and draft vocabulary), how images are pooled, and the target: its path or hub
id (`target_name`) and the hash of its configuration. All layers of the head read the rotated keys
and values of the target's last layer, or of its `key_layers`.

| tensor                                             | shape     | where                         |
|----------------------------------------------------|-----------|-------------------------------|
| `layers.i.{input,post_attention}_layernorm.weight` | [D]       | Llama's layers, as everywhere |
| `layers.i.self_attn.{q,k,v,o}_proj.weight`         | [out, in] | (`.bias` where the target     |
| `layers.i.mlp.{gate,up,down}_proj.weight`          | [out, in] | has one)                      |
| `norm.weight`                                      | [D]       | before the output matrix      |
| `kv_projector.{k,v}`                               | [k, n]    | pooling "linear"              |
| `kv_projector.queries`                             | [k, K, H] | pooling "attention"           |
| `slot_bias`                                        | [1]       | `slot_bias`                   |
| `fc.weight`                                        | [D, 2 D]  | feature "last_hidden"         |
| `masks`                                            | [J-1, D]  | `parallel`                    |
| `markov_in`                                        | [D, r]    | `markov` r                    |
| `markov_out`                                       | [r, V]    | `markov` r; V: tokens scored  |

Embedding and output matrix are the target's and are not stored. `fc` reads a token's embedding and,
behind it, the hidden state that the token was predicted from. EAGLE heads use the same names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.errors import InputError
from jaxspec.heads.files import ExportOptions, Kind, Server
from jaxspec.heads.head import BlockAttention, Head, Places, Prompt, Reading, in_float32
from jaxspec.heads.kinds.kv_head.config import Feature, KVHeadConfig
from jaxspec.models.attention import Segment
from jaxspec.models.decoder import Layer
from jaxspec.models.inputs import Pool
from jaxspec.models.layers import INIT, Dense, text_norm, wide
from jaxspec.typing import Array, Bool, Float, Int, Params, Vectors


class KVProjector(nn.Module):
    """Pool the keys and values of images from n slots to k."""

    config: KVHeadConfig

    @nn.compact
    def __call__(
        self,
        k: Float[Array, "B I tokens K H"],
        v: Float[Array, "B I tokens K H"],
        there: Bool[Array, "B I tokens"],
        group: int,
    ) -> tuple[Float[Array, "B I slots K H"], Float[Array, "B I slots K H"]]:
        """Return the pooled keys and values of each image.

        Args:
          there: Which of the n slots an image fills; a small image has fewer.
          group: Index of the key layer, which has queries of its own.
        """
        c, heads = self.config, k.shape[3]
        if c.pooling == "attention":
            shape = (c.image_slots, max(len(c.key_layers), 1) * heads, k.shape[-1])
            queries = self.param("queries", INIT, shape)[:, group * heads :][:, :heads]
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
            matrix = self.param(name, lambda _: jnp.asarray(average_pooling(c)))
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


class ImageKeys(struct.PyTreeNode):
    """Hold what a KV head makes of prompts: keys of pooled images, and which slots are no text.

    Zeros mean absent images and slots of text, so that rows may be padded with zeros.
    """

    split: ClassVar[bool] = True
    """Over a mesh, as the target's are."""
    k: tuple[Float[Array, "B K pooled H"], ...]
    """Keys of each layer: I images of `image_slots` slots, in order."""
    v: tuple[Float[Array, "B K pooled H"], ...]
    ends: Int[Array, "B pooled"]
    """Slot behind the image's last one; a pooled slot is read from there on."""
    hidden_slots: Bool[Array, "B P"]
    """The target's slots that are not read as text; all those behind are."""


class LastResort(BlockAttention):
    """Attend to a block's tokens only where a query can read no other slot."""

    last: ClassVar[float | None] = -1e30


class KVHead(Head):
    """Hold a head's parameters, and compute its blocks."""

    config: KVHeadConfig

    def setup(self) -> None:
        c, text = self.config, self.config.text_config
        layers = map(text.of_layer, range(text.num_hidden_layers))
        attention = BlockAttention if c.own_keys else LastResort
        self.layers = [Layer(layer, attention) for layer in layers]
        self.norm = text_norm(text)
        if c.reads_hidden:
            self.fc = Dense(text.hidden_size, bias=False)
        if c.pools:
            self.kv_projector = KVProjector(c)
        if c.pools and c.slot_bias:
            weight = math.log(c.image_tokens / c.image_slots)
            self.slot_bias = self.param("slot_bias", lambda _: jnp.full((1,), weight, jnp.float32))

    def context(self, reading: Reading, prompt: Prompt) -> ImageKeys:
        """Pool the keys of images, and mark the slots that are not read as text."""
        c, spans = self.config, prompt.spans
        assert spans is not None
        first, count = spans[..., 0], spans[..., 1]
        slots = jnp.arange(prompt.rotary.shape[-1])
        behind = first + count
        inside = (slots >= first[..., None]) & (slots < behind[..., None])
        hidden = inside.any(1) & (c.pooling != "none")
        if not c.pools:
            return ImageKeys((), (), jnp.zeros((len(spans), 0), jnp.int32), hidden)
        offset = jnp.arange(c.image_tokens)
        there = offset < count[..., None]
        at = jnp.where(there, first[..., None] + offset, -1)
        pooled = [
            self.kv_projector(_gather(reading.k[i], at), _gather(reading.v[i], at), there, group)
            for group, i in enumerate(c.key_places[: len(c.key_layers) or 1])
        ]
        if not c.key_layers:  # all layers read the same keys
            pooled *= len(self.layers)
        k, v = (
            tuple(leaf.reshape(len(at), -1, *leaf.shape[3:]).swapaxes(1, 2) for leaf in leaves)
            for leaves in zip(*pooled, strict=True)
        )
        return ImageKeys(k, v, jnp.repeat(behind * (count > 0), c.image_slots, 1), hidden)

    def segments(self, context: ImageKeys, reading: Reading, at: Places) -> list[list[Segment]]:
        """Return each layer's segments: text before the newest token, and pooled images."""
        c, newest = self.config, at.newest[..., None]
        slots = jnp.arange(reading.k[0].shape[2])[None]
        hidden = jnp.pad(
            context.hidden_slots, ((0, 0), (0, slots.size - context.hidden_slots.shape[1]))
        )
        text = at.own((slots < newest) & ~hidden[:, None], slots)
        images = (context.ends[:, None] > 0) & (context.ends[:, None] <= newest)
        images = at.own(images, context.ends - 1)
        bias = None
        if c.pools and c.slot_bias:
            bias = jnp.broadcast_to(self.slot_bias, (1, images.shape[-1]))
        segments = []
        for layer, i in enumerate(c.key_places):
            parts = [Segment(reading.k[i], reading.v[i], text)] if c.reads_text else []
            if c.pools:
                parts.append(Segment(context.k[layer], context.v[layer], images, bias))
            segments.append(parts)
        return segments

    def fuse(self, embeds: Vectors, before: Vectors | None, context: Any, slots: Any) -> Vectors:
        if before is None:
            return embeds
        return self.fc(jnp.concatenate([embeds, before], axis=-1))

    def everything(self, count: int = 1) -> Any:
        return super().everything(max(self.config.image_tokens, count))

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> dict[str, Any]:
        """Return what `Head.initial` does, with copies of the target's last layers, or of those
        whose keys the head's layers read. The KV projector averages.
        """
        c, text = self.config, self.config.text_config
        params = super().initial(target, key)
        if c.reads_hidden:  # at first only the embedding
            params["fc"] = {"weight": jnp.eye(text.hidden_size, 2 * text.hidden_size)}
        if target is None:
            return params
        decoder = target["model"]
        layers = sorted(
            (name for name in decoder if name.startswith("layers_")),
            key=lambda name: int(name.split("_")[1]),
        )
        makers = [decoder[name] for name in layers if "k_proj" in decoder[name]["self_attn"]]
        like = c.key_layers or range(-text.num_hidden_layers, 0)
        for i, at in enumerate(like):
            parts = params[f"layers_{i}"]
            params[f"layers_{i}"] = in_float32({name: makers[at][name] for name in parts})
        return params


def _gather(leaf: Float[Array, "B K S H"], at: Int[Array, "B I tokens"]) -> Array:
    """Return the slots `at`, [B, I, tokens, K, H]; zeros for -1, so that all values are finite."""
    slots = jnp.maximum(at, 0).reshape(len(at), 1, -1, 1)
    rows = jnp.take_along_axis(leaf, slots, axis=2).swapaxes(1, 2)
    return jnp.where((at < 0)[..., None, None], 0, rows.reshape(*at.shape, *rows.shape[2:]))


@dataclass(frozen=True)
class KVHeadKind(Kind[KVHeadConfig]):
    """Read and write KV heads, by this library's own names."""

    cuts_vocabulary: ClassVar = True

    def claims(self, raw: Mapping[str, Any]) -> bool:
        is_ours = raw.get("model_type") == KVHeadConfig.model_type
        return is_ours and (raw.get("parallel") is True) == self.module.in_one_pass

    def refusal(self, config: KVHeadConfig, server: Server) -> str:
        return f"a {config.title}, which {server} cannot serve; train an EAGLE-3 head"

    def exported(
        self, config: KVHeadConfig, params: Params, options: ExportOptions
    ) -> tuple[KVHeadConfig, Params]:
        config, params = super().exported(config, params, options)
        if options.target is not None:
            raise InputError(f"{options.source}: {config.title}s take no vocab-of; leave it out")
        if "markov_out" in params:
            tokens = config.text_config.scored_tokens
            params = {**params, "markov_out": params["markov_out"][:, :tokens]}
        return config, params

    def image_slots(self, config: KVHeadConfig) -> int | None:
        return config.image_slots if config.pools else None

    def facts(self, config: KVHeadConfig) -> dict[str, str]:
        if not config.pools:
            return {}
        slots = f"{config.image_slots} an image, from {config.image_tokens} tokens"
        return {"image slots": f"{slots} ({config.pooling})"}


ABOUT = "KV head: a draft that reads its target's key-value cache"
POOLED = ("pooling", "image_slots", "slot_bias", "image_tokens")
"""Options of `new_head` about pooled images."""
OPTIONS = (*POOLED, "layers", "key_layers", "reads_text")
KIND = KVHeadKind(
    config=KVHeadConfig,
    module=KVHead,
    titles=("KV",),
    about=ABOUT,
    features=get_args(Feature),
    options=(*OPTIONS, "own_keys"),
    axes=((r"kv_projector/(?:k|v|queries)|slot_bias", ()), (r"fc/weight", (None, "embed"))),
)
