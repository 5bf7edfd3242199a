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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from jaxspec.errors import InputError
from jaxspec.heads.files import Arrays, ExportOptions, Kind, Server
from jaxspec.heads.kinds.kv_head.config import Feature, KVHeadConfig
from jaxspec.heads.kinds.kv_head.module import KVHead
from jaxspec.models.vocabulary import first_tokens
from jaxspec.typing import Params


@dataclass(frozen=True)
class KVHeadKind(Kind[KVHeadConfig]):
    """Read and write KV heads, by this library's own names."""

    def claims(self, raw: Mapping[str, Any]) -> bool:
        is_ours = raw.get("model_type") == KVHeadConfig.model_type
        return is_ours and (raw.get("parallel") is True) == self.module.in_one_pass

    def written(
        self, config: KVHeadConfig, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        return config.to_dict(), tensors

    def exported(
        self, config: KVHeadConfig, params: Params, options: ExportOptions
    ) -> tuple[KVHeadConfig, Params]:
        source, text = options.source, config.text_config
        if options.server is not None:
            advice = f"which {options.server} cannot serve; train an EAGLE-3 head"
            raise InputError(f"{source}: a {config.title}, {advice}")
        if options.target is not None:
            raise InputError(f"{source}: {config.title}s take no vocab-of; leave it out")
        if options.draft_vocabulary is None:
            return config, params
        vocabulary = first_tokens(source, text.draft_vocabulary, options.draft_vocabulary)
        config = replace(config, text_config=replace(text, draft_vocabulary=vocabulary))
        if "markov_out" in params:
            params = {**params, "markov_out": params["markov_out"][:, : len(vocabulary)]}
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
