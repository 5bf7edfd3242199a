"""Define DFlash's head (Chen et al. 2026, arXiv 2602.06036), which drafts a block in one pass.

Its layers are Qwen3's, or Gemma 4's full ones. They read keys and values of two kinds: of committed
tokens, made of the target's hidden states c = norm(fc(states)), which no layer changes, so that
each layer's are made once a token; and of the block. With gamma = 2 and the newest token x, a block
is x m m, and the slots of the masks m score their own tokens. In full layers all tokens of a block
see each other. Sliding layers read the newest committed tokens only, and are causal in a block
unless the file says otherwise: z-lab's head for Gemma 4 31B, whose file does not, writes 5.62
tokens per pass so and 5.27 otherwise (SGLang, pull request 34524).

DSpark's slots score the token after them: its block is x m. Its Markov head adds W2 W1[t] to the
scores of the token after t.

Two public layouts exist. z-lab's has the layers' entries of config.json at the top level, counts
target layers from 0 and names their outputs. speculators' has them under
`transformer_layer_config`, and its numbers are hidden states after so many layers. z-lab's 1 is
speculators' 2, and here 2. The tensors are named alike:

| tensor                                                          | shape                          |
|-----------------------------------------------------------------|--------------------------------|
| `fc.weight`                                                     | [D, n D] of n target states    |
| `hidden_norm.weight`, `norm.weight`                             | [D]                            |
| `layers.i.*`                                                    | as a Qwen3's or a Gemma 4's    |
| `markov_head.markov_w1.weight`, `markov_w2.weight`              | DSpark: [V, r], [words, r]     |
| `embed_tokens.weight`, `lm_head.weight`                         | optional: [V, D], [words, D]   |
| `d2t`, `t2d`                                                    | see `heads/files.py`           |

A head for a Gemma 4 reads and scores as its trainer did: z-lab's borrow the target's embedding with
its factor, and its output matrix with its cap; DeepSeek's have both matrices, factor and cap of
their own; speculators' have copies of the matrices, and neither factor nor cap.

`confidence_head.proj` (DSpark) predicts where a block should end. No score depends on it. It is
kept and written again, but blocks are not cut: a pass reads the same number of tokens either way.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.config.decoders import decoder_config
from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import known_fields
from jaxspec.config.text import FULL, Qwen3Config, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import (
    HeadConfig,
    check_entries,
    check_rotary,
    placeholder_words,
    shared_sizes,
    target_hash,
    windows_of,
)
from jaxspec.heads.files import (
    ExportOptions,
    Kind,
    Server,
    draft_words,
    renamed,
    sglang_command,
    speculators_entries,
    vllm_command,
    window_facts,
    with_target,
    with_words,
)
from jaxspec.heads.head import (
    BlockAttention,
    KeyedHead,
    Prompt,
    Reading,
    cache_of,
    drawn,
    in_float32,
)
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import INIT, Dense, text_norm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Int, Params

ARCHITECTURES = ("DFlashDraftModel", "Qwen3DSparkModel", "Gemma4DSparkModel")
"""Names in config.json: z-lab's, and DSpark's own of both kinds of layers."""
_GEMMA: dict[str, Any] = {
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False},
    **{"use_bidirectional_attention": None, "draft_vocabulary": None},
}
"""Entries of a Gemma 4 that DeepSeek's files copy, and that a head's layers do not have."""
_NEUTRAL = {"markov_head_type": "vanilla"}
"""Entries with the value for which a head computes as it does here."""
_NEEDED = {
    "block_size": "the slots of a block",
    "mask_token_id": "the token whose embedding stands for those to draft",
}
"""Entries without which a head cannot be read, and their meaning."""
_READ = frozenset(
    {
        *(
            "rms_norm_eps",
            "dflash_config",
            "draft_vocab_size",
            "num_target_layers",
            "mask_token_id",
        ),
        *("block_size", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        *("enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal"),
        *("markov_rank", "sample_from_anchor", "target_hidden_size"),
        *("target_layer_ids", "aux_hidden_state_layer_ids", "rope_scaling", "num_anchors"),
        *("causal", "is_causal", "final_logit_softcapping"),
    }
)
_SLIDING = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
"""Entries that say which layers slide, at the top level or within."""
_OF_HEADS = re.compile(
    "norm|scale|scaling|softcap|multiplier|neox|conv|selector|sink|gate|causal|swa|window|fc|mask"
    "|predicts"
)
"""Parts of the names of entries that may change a head's computation."""


@dataclass(frozen=True)
class DFlashText(Qwen3Config):
    """Describe layers of Qwen3, which may read and score as a target of another family does."""

    embed_scale: float = 1.0  # pyright: ignore
    final_logit_softcapping: float | None = None  # pyright: ignore

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        del out["embed_scale"]
        if self.final_logit_softcapping is None:
            del out["final_logit_softcapping"]
        return out


@dataclass(frozen=True)
class DFlashConfig(HeadConfig):
    """Describe a head whose one pass reads the newest token and masks, each seeing all others."""

    text_config: DFlashText | Gemma4TextConfig
    mask_token: int = 0
    """Token whose embedding replaces those of the tokens to draft."""
    target_layers: tuple[int, ...] = ()
    """Hidden states of the target that `fc` reads: 2 is the state after two layers."""
    target_depth: int = 0
    """Layers of the target; 0 where its files do not say."""
    anchored: bool = False
    """Whether each slot of a block scores the token after it, the newest token's too (DSpark).
    Otherwise a mask's slot scores its own token, and a block has one slot more than drafts."""
    markov: int = 0
    """r: rank of DSpark's Markov head, which adds a term for the token before to a token's score;
    0: none."""
    own_embedding: bool = False
    """Whether the head has an embedding of its own, not the target's."""
    scaled: bool = True
    """Whether it reads a Gemma's embedding with the Gemma's factor, and scores by its output matrix
    with its cap, as z-lab's heads were trained; speculators' were trained without."""
    own_output: bool = False
    """Whether the head has an output matrix of its own; one with a draft vocabulary always has."""
    confidence: int = 0
    """Numbers of a slot that DSpark's confidence head reads; 0: it has none."""
    causal: bool = True
    """Whether a block's token sees only those up to itself in sliding layers. In full layers it
    sees all."""

    title: ClassVar = "DFlash head"
    name: ClassVar = "dflash"
    model_type: ClassVar = title
    orders_vocabulary: ClassVar = True

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, vocabulary = list(self.target_layers), self.text_config.vocab_size
        if not layers or layers != sorted(set(layers)) or layers[0] < 0:
            raise InputError(f"DFlash head: reads target layers {layers}; give them in order")
        if not 0 <= self.mask_token < vocabulary:
            raise InputError(f"DFlash head: mask token {self.mask_token} of {vocabulary} tokens")

    def slots_of(self, gamma: int) -> int:
        """Return the slots of a block that drafts this many tokens."""
        return gamma + (not self.anchored)

    @property
    def of_dspark(self) -> bool:
        """Return whether it is of DSpark's form: anchored, or with a Markov head."""
        return self.anchored or self.markov > 0

    @property
    def is_gemma(self) -> bool:
        """Return whether its layers are Gemma 4's."""
        return isinstance(self.text_config, Gemma4TextConfig)

    @property
    def has_output(self) -> bool:
        """Return whether its output matrix is a parameter."""
        return self.own_output or bool(self.text_config.draft_vocabulary)

    @property
    def mask(self) -> int:
        return self.mask_token

    @property
    def states_width(self) -> int:
        return len(self.target_layers) * self.text_config.hidden_size

    @property
    def target_states(self) -> tuple[int, ...]:
        return self.target_layers

    @property
    def reads(self) -> tuple[Any, ...]:
        return "states", self.target_states

    @property
    def keeps_vocabulary(self) -> bool:
        return self.has_output or self.markov > 0

    @property
    def corrects(self) -> bool:
        return self.markov > 0

    @property
    def fixed(self) -> tuple[str, ...]:
        return ("confidence_head",) if self.confidence else ()

    @property
    def kept_options(self) -> dict[str, Any]:
        layers = self.text_config.num_hidden_layers
        kept = {"layers": layers, "target_layers": self.target_layers, "markov": self.markov}
        return kept | {"window": self.text_config.sliding_window or 0}

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        decoder, layers, depth = self.text_config, self.target_layers, text.num_hidden_layers
        fits = layers[-1] < depth and self.target_depth in (0, depth)
        if not fits or (text.hidden_size, text.vocab_size) != (
            decoder.hidden_size,
            decoder.vocab_size,
        ):
            raise InputError(
                f"DFlash head: made for a target{self._named} of width {decoder.hidden_size} and "
                f"{decoder.vocab_size} tokens, with layers {list(layers)}, and not for this "
                f"{target.model_type} of {text.hidden_size}, {text.vocab_size} and {depth} layers"
            )
        tied = text.tie_word_embeddings and not self.has_output and not self.own_embedding
        decoder = replace(decoder, tie_word_embeddings=tied)
        if isinstance(decoder, DFlashText) and self.scaled:
            if not self.own_embedding:
                decoder = replace(decoder, embed_scale=text.embed_scale)
            if not self.has_output and decoder.final_logit_softcapping is None:
                cap = text.final_logit_softcapping
                decoder = replace(decoder, final_logit_softcapping=cap)
        return replace(self, text_config=decoder, target_depth=depth)

    def _started(self, trained: Self, vocabulary: tuple[int, ...], target: Any) -> Self:
        """Return the trained configuration, with this one's block and target."""
        names = ("gamma", "target_name", "target_hash")
        return replace(trained.for_target(target), **{name: getattr(self, name) for name in names})

    @classmethod
    def of_target(
        cls,
        target: Any,
        layers: int = 5,
        target_layers: tuple[int, ...] = (),
        mask_token: int | None = None,
        window: int = 0,
        **options: Any,
    ) -> Self:
        """Return the configuration of a new head for a target, with layers of the target's sizes.

        Rotary positions are the target's slots, also where the target has M-RoPE.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head, and by default the number of states that it reads.
          target_layers: Hidden states that it reads; () means `usual_layers`.
          mask_token: By default the last one, which padded vocabularies do not use.
          window: Newest tokens that its layers read; 0 reads all.
          options: Further fields.
        """
        text = check_rotary(getattr(target, "text_config", target))
        decoder = DFlashText(
            **shared_sizes(text),
            num_hidden_layers=layers,
            tie_word_embeddings=text.tie_word_embeddings,
            rope_scaling=_one_axis(text.rope_scaling),
            sliding_window=window or None,
        )
        head = cls(
            decoder,
            target_hash(target),
            mask_token=text.vocab_size - 1 if mask_token is None else mask_token,
            target_layers=tuple(target_layers) or usual_layers(text.num_hidden_layers, layers),
            target_depth=text.num_hidden_layers,
            **options,
        )
        return head.for_target(target)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Read any public layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`.
        """
        with reading("DFlash head: config.json is not readable", "fetch it again"):
            entries = {**raw, **(raw.get("dflash_config") or {})}
            layers = raw.get("transformer_layer_config") or raw
            whole = {**layers, **entries}
            check_entries(cls.title, whole, _NEUTRAL, _OF_HEADS, _READ)
            for key, meaning in _NEEDED.items():
                if entries.get(key) is None:
                    raise InputError(f"{cls.title}: config.json lacks {key}; add {meaning}")
            extra, spec = raw.get("jaxspec") or {}, raw.get("speculators_config") or {}
            if str(layers.get("model_type")).startswith("gemma4"):
                text = _gemma(layers)
            else:
                text = _decoder(layers, entries, speculators="speculators_model_type" in raw)
            vocabulary = placeholder_words(cls.title, entries, text.vocab_size)
            text = replace(text, draft_vocabulary=vocabulary)
            if "aux_hidden_state_layer_ids" in entries:
                states = entries["aux_hidden_state_layer_ids"]
            else:
                outputs = entries.get("target_layer_ids") or _outputs(
                    entries["num_target_layers"], text.num_hidden_layers
                )
                states = [layer + 1 for layer in outputs]
            markov = entries.get("markov_rank") or 0
            anchored = entries.get("sample_from_anchor")
            if anchored is None:
                anchored = _is_anchored(raw, markov)
            fields = known_fields(
                cls,
                {
                    "target_hash": extra.get("target_hash"),
                    "target_name": extra.get("target_name")
                    or (spec.get("verifier") or {}).get("name_or_path"),
                    "mask_token": entries["mask_token_id"],
                    "target_layers": states,
                    "target_depth": entries.get("num_target_layers"),
                    "anchored": anchored,
                    "scaled": "speculators_model_type" not in raw,
                    "markov": markov,
                    "gamma": entries["block_size"] - (not anchored),
                    "causal": _is_causal(text, whole),
                },
            )
            return cls(**{"text_config": text, "target_hash": ""} | fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the entries in z-lab's layout, or in DSpark's own."""
        out = self.text_config.to_hf() | {"tie_word_embeddings": False}
        out.pop("draft_vocabulary", None)
        states = {
            "mask_token_id": self.mask_token,
            "target_layer_ids": [layer - 1 for layer in self.target_layers],
        }
        dspark = self.of_dspark or self.is_gemma
        kind = states if dspark else {"dflash_config": states}
        if dspark:
            kind |= {"markov_rank": self.markov, "markov_head_type": "vanilla"}
            reads_token = {"confidence_head_with_markov": self.confidence > out["hidden_size"]}
            kind |= {"enable_confidence_head": self.confidence > 0}
            kind |= reads_token if self.confidence else {}
        layer_types = {"layer_types": [FULL] * self.text_config.num_hidden_layers}
        return (
            layer_types
            | out
            | kind
            | ({} if self.causal else {"is_causal": False})
            | {
                "architectures": [ARCHITECTURES[dspark + self.is_gemma]],
                "block_size": self.slots_of(self.gamma),
                "num_target_layers": self.target_depth or self.target_layers[-1] + 1,
                "draft_vocab_size": self.text_config.scored_tokens,
                "sample_from_anchor": self.anchored,
                "jaxspec": {"target_hash": self.target_hash, "target_name": self.target_name},
            }
        )


def _is_anchored(raw: Mapping[str, Any], markov: int) -> bool:
    """Return whether a head is anchored whose config.json does not say so.

    speculators' DSpark heads are since 0.7.0, as its classes and vLLM read files without the entry.
    Development versions of 0.7.0 that left it out trained the other form.
    """
    kind, version = raw.get("speculators_model_type"), str(raw.get("speculators_version") or "")
    if kind is not None:
        older = re.match(r"0\.[0-6]\.|0\.7\.0\.?(dev|a|b|rc)", version)
        return kind == "dspark" and not older
    names = raw.get("architectures") or ()
    return markov > 0 or any("dspark" in str(name).lower() for name in names)


def _decoder(
    layers: Mapping[str, Any], entries: Mapping[str, Any], speculators: bool
) -> DFlashText:
    """Return the configuration of a Qwen3's layers.

    speculators: Whether its window is the number of slots before the block, as in speculators'
      files. Elsewhere the window counts the newest token too, as here.
    """
    heads = {"head_dim": layers["hidden_size"] // layers["num_attention_heads"]}
    fixed = {"model_type": Qwen3Config.model_type, "draft_vocabulary": None}
    usual = {} if layers.get("model_type") == Qwen3Config.model_type else heads
    sliding = {name: entries[name] for name in _SLIDING if name in entries}
    raw = {**usual, **layers, **fixed, **sliding}
    window, kinds = windows_of(raw)
    text = DFlashText.from_hf(raw | {"use_sliding_window": window is not None})
    return replace(
        text,
        rope_scaling=_one_axis(text.rope_scaling),
        tie_word_embeddings=False,
        # one as long as the context is kept, since its layers may be causal in a block
        sliding_window=None if window is None else window + speculators,
        layer_types=kinds,
    )


def _gemma(layers: Mapping[str, Any]) -> Gemma4TextConfig:
    """Return the configuration of a Gemma 4's layers, which are full; InputError for others."""
    kinds = [FULL] * layers["num_hidden_layers"]
    if (other := layers.get("layer_types") or kinds) != kinds:
        raise InputError(
            f"{DFlashConfig.title}: layer_types {other!r:.60} of a Gemma 4; give a head whose "
            "layers are all full"
        )
    text = decoder_config({**layers, **_GEMMA, "layer_types": kinds})
    assert isinstance(text, Gemma4TextConfig)
    return replace(text.without_window(range(len(kinds))), tie_word_embeddings=False)


def _is_causal(text: RotaryConfig, entries: Mapping[str, Any]) -> bool:
    """Return whether sliding layers are causal in a block, as they are unless the file says
    otherwise; InputError for full layers that would be."""
    stated = [entries.get(name) for name in ("is_causal", "causal")]
    full = text.sliding_window is None or FULL in text.layer_types
    if True in stated and full:
        raise InputError(f"{DFlashConfig.title}: is_causal true in full layers is not supported")
    if text.sliding_window is None:
        return True
    return not (False in stated or entries.get("sliding_window_non_causal"))


def _one_axis(scaling: RopeScaling) -> RopeScaling:
    """Return the scaling of positions without M-RoPE's axes."""
    return replace(scaling, mrope_section=(), mrope_interleaved=False)


def _outputs(depth: int, count: int) -> list[int]:
    """Return z-lab's numbers of the layers whose outputs a head of `count` layers reads."""
    if count == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (count - 1)) for i in range(count)]


def usual_layers(depth: int, count: int) -> tuple[int, ...]:
    """Return the states of a target of `depth` layers that heads of `count` layers read."""
    layers = tuple(layer + 1 for layer in _outputs(depth, count))
    if sorted(set(layers)) != list(layers) or layers[-1] >= depth:
        raise InputError(
            f"DFlash head: layers {list(layers)} of {depth}; give target_layers "
            "(--head.target-layers), in order"
        )
    return layers


class MarkovHead(nn.Module):
    """Return what tokens add to the scores of their followers, by a matrix of low rank."""

    config: DFlashConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = nn.Embed(c.text_config.vocab_size, c.markov, embedding_init=INIT)
        self.markov_w2 = Dense(c.text_config.scored_tokens, bias=False, widens=True)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T words"]:
        return self.markov_w2(self.markov_w1(tokens)).astype(jnp.float32)


class CausalAttention(BlockAttention):
    """Attend to segments, and to the tokens of the own block up to the query's."""

    def read(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        at: Any,
        cache: Any,
    ) -> tuple[Float[Array, "B T N H"], Any]:
        before = jnp.tri(*at.seen.shape[-2:], dtype=bool)
        return super().read(q, k, v, at.replace(seen=at.seen & before), cache)


class DFlashHead(KeyedHead):
    """Hold a head's parameters, and compute its blocks."""

    config: DFlashConfig

    in_one_pass: ClassVar[bool] = True
    causal: ClassVar[bool] = False
    reads_before: ClassVar[bool] = False

    def setup(self) -> None:
        text = self.config.text_config
        each = [text.of_layer(layer) for layer in range(text.num_hidden_layers)]
        self.layers = [Layer(layer, self._attention(layer)) for layer in each]
        self.norm, self.hidden_norm = text_norm(text), text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if self.config.markov:
            self.markov_head = MarkovHead(self.config)

    def _attention(self, layer: RotaryConfig) -> type[BlockAttention]:
        slides = layer.sliding_window is not None
        return CausalAttention if slides and self.config.causal else BlockAttention

    def context(self, reading: Reading, prompt: Prompt) -> KVCache:
        assert reading.states is not None
        slots = prompt.rotary
        return cache_of(self.keys(reading.states[:, : slots.shape[1]], None, slots, slots, None))

    def keys(
        self,
        states: Float[Array, "B T fused"],
        after: Float[Array, "B T D"] | None,
        slots: Int[Array, "B T"],
        rotary: Int[Array, "B T"],
        context: Any,
    ) -> list[tuple[Array, Array]]:
        combined = self.hidden_norm(self.fc(states))
        return [layer.self_attn.keys_values(combined, rotary) for layer in self.layers]

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens add to the scores of their followers."""
        return self.markov_head(tokens)

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix.

        The Markov head adds nothing at first.
        """
        c, text = self.config, self.config.text_config
        params = drawn(self, key)
        if c.markov:
            params["markov_head"] = {
                "markov_w1": {"embedding": INIT(key, (text.vocab_size, c.markov), jnp.float32)},
                "markov_w2": {"weight": jnp.zeros((text.scored_tokens, c.markov))},
            }
        if c.confidence:
            proj = {"weight": jnp.zeros((1, c.confidence)), "bias": jnp.zeros(1)}
            params["confidence_head"] = {"proj": proj}
        if c.has_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if c.own_embedding:
            shape = (text.vocab_size, text.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        if target is None:
            return params
        params |= in_float32({"norm": target["model"]["norm"]})
        if c.has_output:
            tokens = text.draft_vocabulary or tuple(range(text.vocab_size))
            params |= in_float32({"lm_head": {"weight": output_rows(target, tokens)}})
        return params


_UNREAD = re.compile(r"verifier_(norm|lm_head)\.|(d2t|t2d)$")
"""Tensors that no score depends on, or that the configuration holds."""


@dataclass(frozen=True)
class DFlashKind(Kind[DFlashConfig]):
    """Read heads in any public layout, and write them for the programs that serve them."""

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        return "hidden_norm.weight" in tensors or "dflash_config" in raw

    unread = ("mask_embedding.pt",)  # vLLM's, in place of the mask token's embedding

    def completed(
        self, config: DFlashConfig, stored: dict[str, StoredTensor]
    ) -> tuple[DFlashConfig, dict[str, StoredTensor]]:
        stored = renamed(config.title, stored, lambda name: name.removeprefix("model."))
        vocabulary = draft_words(config.title, stored, config.text_config)
        confidence = stored.get("confidence_head.proj.weight")
        config = replace(
            config,
            confidence=confidence.shape[-1] if confidence else 0,
            text_config=replace(config.text_config, draft_vocabulary=vocabulary),
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        return config, {name: stored[name] for name in stored if not _UNREAD.match(name)}

    def written(
        self,
        config: DFlashConfig,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        if config.text_config.draft_vocabulary:
            tensors = with_words(config.text_config, tensors)
        if server != "speculators":
            return raw, tensors
        layers = {*config.text_config.to_hf(), "layer_types"} - {"architectures"}
        placed = {*layers, "architectures", "dflash_config", "target_layer_ids", "is_causal"}
        free = {} if config.causal else {"sliding_window_non_causal": True}
        inner = {name: raw[name] for name in raw if name in layers}
        if (window := config.text_config.sliding_window) is not None:
            inner["sliding_window"] = window - 1  # see `_decoder`
        kind = "dspark" if config.of_dspark else "dflash"
        return {
            "architectures": ["DSparkDraftModel" if config.of_dspark else "DFlashDraftModel"],
            "transformer_layer_config": inner,
            "aux_hidden_state_layer_ids": list(config.target_layers),
            "mask_token_id": config.mask_token,
            "tie_word_embeddings": False,
            **{name: raw[name] for name in raw if name not in placed},
            **free,
            **speculators_entries(kind, config, architectures),
        }, tensors

    def exported(
        self, config: DFlashConfig, params: Params, options: ExportOptions
    ) -> tuple[DFlashConfig, Params]:
        if options.server == "sglang" and config.keeps_vocabulary:
            parts = "output matrix, vocabulary or Markov head"
            raise InputError(f"{options.source}: has its own {parts}, which sglang does not read")
        text = config.text_config
        if options.server == "speculators" and (
            text.embed_scale != 1 or text.final_logit_softcapping is not None
        ):
            parts = "an embedding with a factor, or scores with a cap"
            raise InputError(f"{options.source}: has {parts}, which speculators does not read")
        return with_target(config, options), params

    def command(self, config: DFlashConfig, path: str, server: Server) -> str:
        target = config.target_name
        if server == "speculators":
            return f"vllm serve {shlex.quote(path)}"
        if server == "sglang":
            return sglang_command(target, "DFLASH", path)
        method, count = self.tag(config), config.gamma
        return vllm_command(target, method=method, model=path, num_speculative_tokens=count)

    def tag(self, config: DFlashConfig) -> str:
        return "dspark" if config.of_dspark else "dflash"

    def facts(self, config: DFlashConfig) -> dict[str, str]:
        layers = ", ".join(map(str, config.target_layers))
        slot = "newest token" if config.anchored else "first mask"
        facts = {
            "reads": f"the target's hidden states after layers {layers}",
            "drafts": f"{config.gamma} tokens per pass; the {slot}'s slot scores the first",
        }
        facts |= window_facts(config.text_config)
        facts |= {"Markov head": f"rank {config.markov}"} if config.markov else {}
        return facts | ({"confidence head": "kept, not used"} if config.confidence else {})


KIND = DFlashKind(
    config=DFlashConfig,
    module=DFlashHead,
    titles=("DFlash", "DSpark"),
    about="DFlash head: a draft of a block in one pass, from hidden states of its target",
    features=("block",),
    options=("layers", "target_layers", "markov", "mask_token", "anchored", "window"),
    names="dflash|dspark",
    axes=(
        (r"fc/weight", (None, "embed")),
        (r"markov_head/markov_w1/embedding|markov_head/markov_w2/weight", ()),
        (r"confidence_head/proj/(?:weight|bias)", ()),
    ),
)
