"""Define Gemma 4's assistants: layers of queries on the target's keys and values.

An assistant has no keys. All drafted tokens take the position of the newest token, and what
distinguishes them is the state before each: the target's last hidden state, then the assistant's
own output, projected back to the target's width.

Files have Hugging Face's names:

| tensor                            | shape                                     |
|-----------------------------------|-------------------------------------------|
| `model.embed_tokens.weight`       | [V, D], also the output matrix            |
| `model.layers.i.*`                | Gemma 4's layers without keys and values  |
| `model.norm.weight`               | [D]                                       |
| `pre_projection.weight`           | [D, 2 B], B is the target's width         |
| `post_projection.weight`          | [B, D]                                    |
| `masked_embedding.centroids.weight` | [groups, D], with groups of tokens      |
| `masked_embedding.token_ordering` | [V], integers: the tokens group by group  |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.directories import read_json
from jaxspec.config.decoders import decoder_config
from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.schema import check_positive, known_fields
from jaxspec.config.text import FULL, SLIDING, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Arrays, Kind, Server, vllm_command
from jaxspec.heads.head import BlockAttention, Head, Places, Reading
from jaxspec.models.attention import Segment
from jaxspec.models.decoder import Decoder
from jaxspec.models.layers import Dense, wide
from jaxspec.typing import Array, Float, Vectors

ASSISTANTS = {
    "gemma4_assistant": "gemma4_text",
    "gemma4_unified_assistant": "gemma4_unified_text",
}
"""model_type of an assistant -> that of its layers."""
_NOT_READ: dict[str, Any] = {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
"""Its tokens have no embeddings for layers, and no cap bounds its scores, whatever a file says."""


@dataclass(frozen=True)
class AssistantConfig(HeadConfig):
    """Describe layers that have queries of their own, and read the target's keys and values.

    A layer reads the last of the target's layers of its kind that make keys.
    """

    text_config: Gemma4TextConfig
    """Its layers, of which none makes keys."""
    target_hash: str = ""
    """Always empty: its files do not name a configuration of the target."""
    backbone_hidden_size: int = 1536
    """Width of the target's embeddings and hidden states."""
    num_centroids: int = 0
    """Groups of tokens, of which only the likeliest are scored; 0 scores all tokens.
    In files it is read only with `use_ordered_embeddings`."""
    centroid_intermediate_top_k: int = 32
    """Number of groups that are scored."""
    key_layers: tuple[int, ...] = ()
    """The target's layer whose keys and values each layer reads; empty before `for_target`."""

    title: ClassVar = "Gemma 4 assistant"
    name: ClassVar = "assistant"
    model_type: ClassVar = title
    start_decides: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.title, self, "backbone_hidden_size", "centroid_intermediate_top_k")
        text = self.text_config
        queries = replace(text, num_kv_shared_layers=text.num_hidden_layers, **_NOT_READ)
        object.__setattr__(self, "text_config", queries)
        tokens, groups = self.text_config.vocab_size, self.num_centroids
        if self.text_config.draft_vocabulary:
            raise InputError(f"{self.title}: scores all tokens; give --draft-vocabulary 0")
        if groups and (tokens % groups or self.centroid_intermediate_top_k > groups):
            raise InputError(
                f"{self.title}: {self.centroid_intermediate_top_k} of {groups} groups of "
                f"{tokens} tokens; give groups of equal sizes, and at most all"
            )

    @property
    def key_layers_read(self) -> tuple[int, ...]:
        return self.key_layers or tuple(range(self.text_config.num_hidden_layers))

    @property
    def scores_itself(self) -> bool:
        return self.num_centroids > 0

    @property
    def embedding(self) -> RotaryConfig:
        return replace(self.text_config, hidden_size=self.backbone_hidden_size)

    @property
    def reads(self) -> tuple[Any, ...]:
        return "keys and states", self.key_layers

    @property
    def kept_options(self) -> dict[str, Any]:
        text = self.text_config
        return {"layers": text.num_hidden_layers, "width": text.hidden_size}

    @property
    def fixed(self) -> tuple[str, ...]:
        return ("masked_embedding",) if self.num_centroids else ()

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        """Let each layer read the target's last layer of its kind that makes keys."""
        layers = self.text_config
        width, tokens = self.backbone_hidden_size, layers.vocab_size
        if not isinstance(text, Gemma4TextConfig) or (text.hidden_size, text.vocab_size) != (
            width,
            tokens,
        ):
            raise InputError(
                f"{self.title}: made for a Gemma 4 of width {width} and {tokens} tokens, and this "
                f"{target.model_type} has width {text.hidden_size} and {text.vocab_size} tokens; "
                "give the assistant's own target"
            )
        last = dict(zip(text.layer_types, text.key_layers, strict=True))
        for index, kind in enumerate(layers.layer_types):
            if kind not in last:
                raise InputError(
                    f"{self.title}: reads {kind} layers, and the target has none; give the "
                    "assistant's own target"
                )
            layer, source = layers.of_layer(index), text.of_layer(last[kind])
            heads, groups = layer.num_attention_heads, source.num_key_value_heads
            if layer.head_dim != source.head_dim or heads % groups:
                raise InputError(
                    f"{self.title}: {heads} heads of {layer.head_dim} in a {kind} layer, and the "
                    f"target's has {groups} of {source.head_dim}; give the assistant's own target"
                )
        return replace(self, key_layers=tuple(last[kind] for kind in layers.layer_types))

    @classmethod
    def of_target(cls, target: Any, layers: int = 4, width: int = 1024, **options: Any) -> Self:
        """Return the configuration of a new assistant for a Gemma 4.

        Its MLPs are eight times as wide as its layers, as in those that Google published.

        Args:
          target: A `ModelConfig`.
          layers: Number of layers: sliding ones, and a full one.
          width: Width of its layers.
          options: Further fields.
        """
        text = getattr(target, "text_config", target)
        if not isinstance(text, Gemma4TextConfig):
            raise InputError(f"{cls.title}: drafts for a Gemma 4, not for a {target.model_type}")
        decoder = replace(
            text,
            num_hidden_layers=layers,
            layer_types=(*[SLIDING] * (layers - 1), FULL),
            hidden_size=width,
            intermediate_size=8 * width,
            use_double_wide_mlp=False,
            tie_word_embeddings=True,
        )
        head = cls(decoder, backbone_hidden_size=text.hidden_size, **options)
        return head.for_target(target)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            text = {"model_type": ASSISTANTS[raw["model_type"]]} | raw["text_config"]
            text |= {"num_kv_shared_layers": 0} | _NOT_READ
            if "unified" in raw["model_type"]:
                raw = {"backbone_hidden_size": 3840} | raw
            if not raw.get("use_ordered_embeddings"):
                raw = raw | {"num_centroids": 0}
            extras = known_fields(cls, {"num_centroids": 2048} | raw | (raw.get("jaxspec") or {}))
            return cls(**extras | {"text_config": decoder_config(text), "key_layers": ()})

    def to_dict(self) -> dict[str, Any]:
        """Return the dictionary of Google's files, with this library's own fields in `jaxspec`."""
        text, groups = self.text_config, self.num_centroids
        (kind,) = (kind for kind, layers in ASSISTANTS.items() if layers == text.model_type)
        name = "Gemma4Unified" if "unified" in kind else "Gemma4"
        return {
            "architectures": [f"{name}AssistantForCausalLM"],
            "model_type": kind,
            "text_config": text.to_hf(),
            "backbone_hidden_size": self.backbone_hidden_size,
            "use_ordered_embeddings": groups > 0,
            "num_centroids": groups or 2048,
            "centroid_intermediate_top_k": self.centroid_intermediate_top_k,
            "tie_word_embeddings": True,
            "jaxspec": {"target_name": self.target_name, "gamma": self.gamma},
        }


class MaskedEmbedding(nn.Module):
    """Score the tokens of the likeliest groups, and give the others -inf."""

    config: AssistantConfig

    def setup(self) -> None:
        tokens = self.config.text_config.vocab_size
        self.centroids = Dense(self.config.num_centroids, bias=False)
        self.token_ordering = self.param(
            "token_ordering", lambda _: jnp.arange(tokens, dtype=jnp.int32)
        )

    def __call__(
        self, hidden: Float[Array, "B T D"], embedding: Float[Array, "V D"]
    ) -> Float[Array, "B T V"]:
        """Return the scores, in `wide` precision."""
        groups = self.token_ordering.reshape(self.config.num_centroids, -1)
        _, best = jax.lax.top_k(self.centroids(hidden), self.config.centroid_intermediate_top_k)
        tokens = groups[best].reshape(*hidden.shape[:2], -1)
        exact = wide(hidden.dtype)
        scores = jnp.einsum(
            "BTD,BTGD->BTG", hidden, embedding[tokens], preferred_element_type=exact
        )
        rows, columns = jnp.arange(len(hidden))[:, None, None], jnp.arange(hidden.shape[1])[:, None]
        whole = jnp.full((*hidden.shape[:2], len(embedding)), -jnp.inf, exact)
        return whole.at[rows, columns, tokens].set(scores)


class AssistantHead(Head):
    """Hold an assistant's parameters, and compute its blocks."""

    config: AssistantConfig

    moves: ClassVar[bool] = False

    def setup(self) -> None:
        c = self.config
        self.model = Decoder(c.text_config, BlockAttention)
        self.pre_projection = Dense(c.text_config.hidden_size, bias=False)
        self.post_projection = Dense(c.backbone_hidden_size, bias=False)
        if c.num_centroids:
            self.masked_embedding = MaskedEmbedding(c)

    @property
    def layers(self) -> Any:
        return self.model.layers

    def segments(self, context: Any, reading: Reading, at: Places) -> list[list[Segment]]:
        """Return the target's slots before the newest token, within each layer's window."""
        segments, text = [], self.config.text_config
        for layer, i in enumerate(self.config.key_places):
            slots, last = jnp.arange(reading.k[i].shape[2])[None], at.newest[..., None] - 1
            # A row without a token reads slot 0, so that its scores are finite.
            seen = at.own(slots <= jnp.maximum(last, 0), slots)
            window = text.of_layer(layer).sliding_window
            if window is not None:
                # As in transformers, a window is the distance to the newest key, not a count.
                seen &= slots >= last - window
            segments.append([Segment(reading.k[i], reading.v[i], seen)])
        return segments

    def fuse(self, embeds: Vectors, before: Vectors, context: Any, slots: Any) -> Array:
        return self.pre_projection(jnp.concatenate([embeds, before], axis=-1))

    def closed(self, x: Vectors) -> tuple[Vectors, Array]:
        hidden = self.model.norm(x)
        return hidden, self.post_projection(hidden)

    def scores(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Return the scores of the likeliest groups' tokens, float32, of a head with groups."""
        table = self.model.embed_tokens.embedding
        return self.masked_embedding(hidden, table).astype(jnp.float32)

    def everything(self, count: int = 1) -> Any:
        hidden, *_ = super().everything(count)
        score = self.scores if self.config.num_centroids else self.model.embed_tokens.attend
        return score(hidden)


@dataclass(frozen=True)
class AssistantKind(Kind[AssistantConfig]):
    """Read and write assistants as they are published.

    generation_config.json has the number of tokens to draft, which transformers asks for.
    """

    def claims(self, raw: Mapping[str, Any]) -> bool:
        return str(raw.get("model_type")) in ASSISTANTS

    def read(self, path: Path, raw: dict[str, Any]) -> AssistantConfig:
        config, file = self.config.from_dict(raw), path / "generation_config.json"
        gamma = read_json(file).get("num_assistant_tokens") if file.is_file() else None
        return replace(config, gamma=gamma) if isinstance(gamma, int) else config

    def generation(self, config: AssistantConfig) -> dict[str, Any]:
        return {"num_assistant_tokens": config.gamma}

    def written(
        self, config: AssistantConfig, tensors: Arrays, server: Server, architectures: Sequence[str]
    ) -> tuple[dict[str, Any], Arrays]:
        tensors = {
            name: leaf.astype(np.int64) if leaf.dtype == np.int32 else leaf
            for name, leaf in tensors.items()
        }
        dtype = str(tensors["pre_projection.weight"].dtype)
        return config.to_dict() | {"dtype": dtype}, tensors

    def refusal(self, config: AssistantConfig, server: Server) -> str:
        if server == "vllm":
            return ""
        return f"a {config.title}, which is written in one layout, not for {server}; leave that out"

    def command(self, config: AssistantConfig, path: str, server: Server) -> str:
        count = config.gamma
        return vllm_command(
            config.target_name, method="mtp", model=path, num_speculative_tokens=count
        )


KIND = AssistantKind(
    config=AssistantConfig,
    module=AssistantHead,
    titles=(AssistantConfig.title,),
    about="Gemma 4 assistant: a draft that reads its target's key-value cache",
    note="transformers 5.23 loads no assistant, also none of Google's: its check of "
    "`num_kv_shared_layers` refuses a model of which all layers read another's keys.",
    features=("assistant",),
    options=("layers", "width"),
    axes=(
        (r"(?:pre|post)_projection/weight|masked_embedding/centroids/weight", (None, "embed")),
        (r"masked_embedding/token_ordering", ()),
    ),
)
