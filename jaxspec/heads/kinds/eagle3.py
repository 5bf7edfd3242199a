"""Define EAGLE-3's head (Li et al. 2025, arXiv 2503.01840), from hidden states of its target.

It has one layer, keys and values of its own, and its own output matrix. The state that it reads of
the target is `fc` of some hidden states; for a token that it drafted itself it is its own output.
The target's states are those after DeepStack's addition, as in vLLM, for which these heads are
published; those of transformers 5 and of SGLang are before it. They differ only at image slots.

Two layouts exist, which vLLM, SGLang and tpu-inference load. SafeAILab's and SpecForge's has a
Llama's entries at the top level. speculators' has them under `transformer_layer_config`.

Numbers of target layers are vLLM's: i is the hidden state after i layers, 0 the embedding. So is
`eagle_aux_hidden_state_layer_ids` at the top level. The same entry within `eagle_config` counts the
layers from 0 and names their outputs, as SGLang and ModelOpt read and write it: 1 is the hidden
state after 2 layers. So does `target_layer_ids` in DeepSeek's `Qwen3Eagle3Model` and
`Gemma4Eagle3Model`, which name five.

The tensors of the first layout:

| tensor                                                                  | shape               |
|-------------------------------------------------------------------------|---------------------|
| `fc.weight`                                                             | [D, n target D]     |
| `input_norm.weight`                                                     | norm_before_fc      |
| `fc_norm.i.weight`                                                      | fc_norm             |
| `midlayer.{input_layernorm,hidden_norm,post_attention_layernorm}.weight` | [D]                |
| `midlayer.self_attn.{q,k,v}_proj.weight`                                | [out, 2 D]          |
| `midlayer.self_attn.o_proj.weight`, `midlayer.mlp.*_proj.weight`        | as a Llama's        |
| `norm.weight`                                                           | [D]                 |
| `midlayer.self_attn.{q,k}_norm.weight`                                  | optional (Qwen3's)  |
| `lm_head.weight`                                                        | optional, [words, D] |
| `embed_tokens.weight`                                                   | optional            |
| `d2t` int64 or int32 [draft words]                                      | target id less index |
| `t2d` bool [vocabulary]                                                 | whether it is drafted |

`fc` reads n states, three or as many as config.json names. speculators' and DeepSeek's layer is
`layers.0`; speculators' config.json nests the decoder. DeepSeek's layer for Gemma 4 is a full one
of the target's, whose queries and keys are made of both vectors; its embedding and its scores have
Gemma's factor and cap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.schema import known_fields
from jaxspec.config.text import SLIDING, LlamaConfig, RotaryConfig, TextConfig
from jaxspec.errors import InputError, reading
from jaxspec.heads.config import (
    check_entries,
    check_rotary,
    gemma4_layers,
    placeholder_words,
    shared_sizes,
    target_hash,
    windows_of,
)
from jaxspec.heads.files import (
    ExportOptions,
    Server,
    check_one_layer,
    draft_words,
    renamed,
    sglang_command,
    speculators_entries,
    vllm_command,
    window_facts,
    with_target,
    with_words,
)
from jaxspec.heads.head import in_float32
from jaxspec.heads.kinds import eagle1
from jaxspec.heads.states import StateHead, StateHeadConfig, StateKind
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import INIT, Dense, RMSNorm, text_norm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Int, Params

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
"""Names in config.json of heads with the entries at the top level."""
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
"""Names in config.json of speculators' heads."""

_NEUTRAL: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "draft_num_hidden_layers": 1,
}
"""Entries that trainers write, with the value for which a head computes as it does here."""
_READ = frozenset(
    {
        *("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "initializer_range"),
        *("embed_requires_grad", "target_hidden_size", "rms_norm_eps", "norm_before_residual"),
        *("norm_before_fc", "fc_norm", "norm_output", "parallel_draft_heads_num_layers"),
    }
)
_OF_HEADS = re.compile("norm|scale|aux|draft|eagle|mask|parallel|residual|quant|lora|expert")
"""Parts of the names of entries that may change a head's computation."""


@dataclass(frozen=True)
class EagleConfig(LlamaConfig):
    """Describe one Llama layer that reads an embedding and a hidden state."""

    norm_before_residual: bool = False
    """Whether the layer's output is added to the hidden state's norm, not to the state itself."""
    norm_before_fc: bool = False
    """Whether a norm of the states together precedes `fc`."""
    fc_norm: bool = False
    """Whether a norm of each of the states precedes `fc`, as in EAGLE-3.1."""
    norm_output: bool = False
    """Whether the next token reads the final-normed state, not the one before the norm."""
    qk_norm: bool = False  # pyright: ignore
    """Whether queries and keys are normed before they are rotated, as in Qwen3."""
    own_embedding: bool = False
    """Whether the head has an embedding of its own, not the target's."""
    own_output: bool = True
    """Whether the head has an output matrix of its own, not the target's."""
    target_hidden_size: int = 0
    """Width of the target; 0 means hidden_size."""
    target_layers: tuple[int, ...] = ()
    """Hidden states of the target that `fc` reads; () means 2, n/2 and n-3 of n layers."""

    architecture = ARCHITECTURES[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read either layout; InputError for options that this library lacks.

        The draft vocabulary has the right size, and its tokens are in the file `d2t`. The number of
        layers is 1, because trainers copy the target's; the tensors tell.
        """
        nested = dict(raw.get("eagle_config") or {})
        outputs = nested.pop("eagle_aux_hidden_state_layer_ids", raw.get("target_layer_ids")) or []
        outer = {**raw, **nested, "eagle_config": None, "transformer_layer_config": None}
        decoder = raw.get("transformer_layer_config") or raw
        whole = {**decoder, **outer}
        check_entries("EAGLE-3 head", whole, _NEUTRAL, _OF_HEADS, _READ)
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        entries = {**decoder, **{name: outer.get(name) for name in (*names, "target_hidden_size")}}
        entries |= {"tie_word_embeddings": False, "draft_vocabulary": None}
        entries |= {"model_type": cls.model_type, "num_hidden_layers": 1}
        entries["target_layers"] = raw.get("eagle_aux_hidden_state_layer_ids") or [
            layer + 1 for layer in outputs
        ]
        config = super().from_hf(entries)
        kinds = (whole.get("layer_types") or [])[:1]
        window, _ = windows_of({**whole, "num_hidden_layers": 1, "layer_types": kinds})
        fields = known_fields(cls, {"sliding_window": window})
        fields["draft_vocabulary"] = placeholder_words("EAGLE-3 head", outer, config.vocab_size)
        return replace(config, **fields, target_layers=tuple(sorted(config.target_layers)))

    def to_hf(self) -> dict[str, Any]:
        """Return the entries in SafeAILab's layout."""
        out = super().to_hf()
        out.pop("draft_vocabulary", None)
        layers = list(out.pop("target_layers"))
        for name in ("own_embedding", "own_output", "qk_norm", "attention_factor"):
            out.pop(name, None)
        nested: dict[str, Any] = {"use_aux_hidden_state": True}
        if 0 not in layers:  # the embedding is no layer's output
            nested["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
        if self.sliding_window is not None:
            out |= {"sliding_window": self.sliding_window, "layer_types": [SLIDING]}
        return out | {
            "draft_vocab_size": self.scored_tokens,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": nested,
        }


@dataclass(frozen=True)
class GemmaEagleConfig(Gemma4TextConfig):
    """Describe one full layer of a Gemma 4 that reads an embedding and a hidden state."""

    own_embedding: bool = False
    own_output: bool = True
    target_layers: tuple[int, ...] = ()

    norm_before_residual: ClassVar[bool] = False
    norm_before_fc: ClassVar[bool] = False
    fc_norm: ClassVar[bool] = False
    norm_output: ClassVar[bool] = False
    architecture = "Gemma4Eagle3Model"

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read DeepSeek's layout; InputError for options that this library lacks."""
        title = Eagle3Config.title
        check_entries(title, raw, _NEUTRAL, _OF_HEADS, _READ | {"final_logit_softcapping"})
        layer = gemma4_layers(title, raw)
        states = {"target_layers": [output + 1 for output in raw["target_layer_ids"]]}
        vocabulary = placeholder_words(title, raw, layer.vocab_size)
        fields: dict[str, Any] = {**vars(layer), **known_fields(cls, states)}
        return cls(**{**fields, "draft_vocabulary": vocabulary})

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        for name in ("own_embedding", "own_output", "draft_vocabulary"):
            out.pop(name, None)
        outputs = [layer - 1 for layer in out.pop("target_layers")]
        more = {"draft_num_hidden_layers": 1, "draft_vocab_size": self.scored_tokens}
        return out | {"target_layer_ids": outputs} | more


@dataclass(frozen=True)
class Eagle3Config(StateHeadConfig):
    """Describe a head that reads the states of a few layers of its target, usually three."""

    text_config: EagleConfig | GemmaEagleConfig

    title: ClassVar = "EAGLE-3 head"
    name: ClassVar = "eagle3"
    model_type: ClassVar = title
    orders_vocabulary: ClassVar = True
    rules: ClassVar = ("placeholder", "embedding", "zero")

    def __post_init__(self) -> None:
        super().__post_init__()
        text, layers = self.text_config, list(self.text_config.target_layers)
        if any(layer < 0 for layer in layers):
            raise InputError(f"EAGLE-3 head: reads target layers {layers}; give none below 0")
        if text.num_hidden_layers != 1:
            raise InputError(f"EAGLE-3 head: num_hidden_layers {text.num_hidden_layers}; give 1")

    @property
    def target_states(self) -> tuple[int, ...]:
        return self.text_config.target_layers

    @property
    def states(self) -> int:
        """Return the number of the target's states that `fc` reads."""
        return len(self.target_states) or 3

    @property
    def states_width(self) -> int:
        return self.states * self.text_config.target_hidden_size

    @property
    def embedding_rows(self) -> int:
        return self.text_config.vocab_size if self.text_config.own_embedding else 0

    @property
    def keeps_vocabulary(self) -> bool:
        return True

    @property
    def kept_options(self) -> dict[str, Any]:
        text = self.text_config
        kept = {"target_layers": text.target_layers, "window": text.sliding_window or 0}
        return {"images": self.images} | kept

    def _fitted(self, target: Any, text: TextConfig) -> Self:
        decoder = self.text_config
        layers = decoder.target_layers or usual_layers(text.num_hidden_layers)
        sizes = text.hidden_size, text.vocab_size
        expected = decoder.target_hidden_size, decoder.vocab_size
        rotary = isinstance(text, RotaryConfig)
        if not rotary or sizes != expected or max(layers) > text.num_hidden_layers:
            raise InputError(
                f"EAGLE-3 head: made for a target{self._named} of width {expected[0]} and "
                f"{expected[1]} tokens, with layers {list(layers)}, and not for this "
                f"{target.model_type}"
            )
        self._check_shown(text.hidden_size)
        return replace(self, text_config=replace(decoder, target_layers=layers))

    def _started(self, trained: Self, vocabulary: tuple[int, ...], target: Any) -> Self:
        """Return the configuration with the trained decoder, draft vocabulary and rule for images.

        A head without an output matrix of its own goes on without one.
        """
        fitted = trained.for_target(target)
        return replace(self, text_config=fitted.text_config, images=fitted.images)

    @classmethod
    def of_target(
        cls,
        target: Any,
        layers: int = 1,
        target_layers: tuple[int, ...] = (),
        window: int = 0,
        **options: Any,
    ) -> Self:
        """Return the configuration of a new head for a target: its sizes, without biases.

        Args:
          target: A `ModelConfig`.
          layers: Decoder layers of the head; only 1 is supported.
          target_layers: Hidden states that it reads; () means 2, n/2 and n-3.
          window: Newest tokens that its layer reads; 0 reads all.
          options: Further fields.
        """
        text = check_rotary(getattr(target, "text_config", target))
        decoder = EagleConfig(
            **shared_sizes(text),
            rope_scaling=text.rope_scaling,
            num_hidden_layers=layers,
            target_layers=tuple(target_layers) or usual_layers(text.num_hidden_layers),
            sliding_window=window or None,
        )
        return cls(decoder, target_hash(target), **options)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        with reading(f"{cls.title}: config.json is not readable", "fetch it again"):
            extra, spec = raw.get("jaxspec") or {}, raw.get("speculators_config") or {}
            name = (spec.get("verifier") or {}).get("name_or_path") or ""
            entries = {"target_hash": "", "target_name": name} | known_fields(cls, extra)
            is_gemma = str(raw.get("model_type")).startswith("gemma4")
            layer = GemmaEagleConfig if is_gemma else EagleConfig
            return cls(layer.from_hf(raw), **entries)

    def to_dict(self) -> dict[str, Any]:
        return self.text_config.to_hf() | {"jaxspec": self.extras}


def usual_layers(depth: int) -> tuple[int, ...]:
    """Return the layers of a target that EAGLE-3 heads read by default."""
    layers = (2, depth // 2, depth - 3)
    if sorted(set(layers)) != list(layers):
        raise InputError(
            f"EAGLE-3 head: layers {layers} of {depth}; give target_layers (--head.target-layers), "
            "in order"
        )
    return layers


class FusedLayer(Layer):
    """Run EAGLE-3's layer, whose attention reads an embedding and a hidden state side by side."""

    config: EagleConfig | GemmaEagleConfig

    def setup(self) -> None:
        super().setup()
        self.hidden_norm = text_norm(self.config)

    def __call__(
        self, x: Float[Array, "B T both"], at: Any, cache: Any, more: None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        normed, stream = self._normed(x)
        out, cache = self.self_attn(normed, at, cache)
        return self.finish(stream, out), cache

    def keys_values(self, x: Float[Array, "B T both"], rotary: Array) -> tuple[Array, Array]:
        return self.self_attn.keys_values(self._normed(x)[0], rotary)

    def _normed(self, x: Array) -> tuple[Array, Array]:
        """Return the attention's input, and the stream that its output is added to."""
        embeds, hidden = jnp.split(x, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        stream = normed if self.config.norm_before_residual else hidden
        return jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1), stream


class Eagle3Head(StateHead):
    """Hold an EAGLE-3 head's `fc`, norms and layer."""

    config: Eagle3Config

    layer: ClassVar[Callable[..., Any]] = FusedLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.norm = text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)
        if text.fc_norm:
            self.fc_norm = [RMSNorm(text.rms_norm_eps) for _ in range(self.config.states)]

    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return `fc` of the states, normed together (`norm_before_fc`), one by one
        (`fc_norm`), or as they are."""
        text = self.config.text_config
        if text.norm_before_fc:
            states = self.input_norm(states)
        if text.fc_norm:
            parts = jnp.split(states, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        return self.fc(states)

    def fuse(
        self,
        embeds: Float[Array, "... D"],
        before: Float[Array, "... D"],
        context: Any,
        newest: Int[Array, "B roots"],
    ) -> Float[Array, "... both"]:
        return jnp.concatenate([embeds, before], axis=-1)

    def closed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Array]:
        normed = self.norm(x)
        return normed, normed if self.config.text_config.norm_output else x

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix."""
        text = self.config.text_config
        params = dict(super().initial(target, key))
        if text.own_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if target is None:
            return params
        copied: dict[str, Any] = {"norm": target["model"]["norm"]}
        if text.own_output:
            vocabulary = text.draft_vocabulary or tuple(range(text.vocab_size))
            copied["lm_head"] = {"weight": output_rows(target, vocabulary)}
        return {**params, **in_float32(copied)}


_LAYER = re.compile(r"^(?:midlayer|layers\.0)\.")
_OUTER = (
    *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size"),
    *("eagle_aux_hidden_state_layer_ids", "jaxspec", "torch_dtype"),
)
"""Entries at the top level of speculators' config.json."""


@dataclass(frozen=True)
class Eagle3Kind(StateKind[Eagle3Config]):
    """Read heads in either public layout, and write them for the programs that serve them."""

    def resembles(
        self, raw: Mapping[str, Any], names: Sequence[str], tensors: Collection[str]
    ) -> bool:
        """Know heads by their names, by `draft_vocab_size` or by their tensors.

        Some trainers write their target's architecture and depth.
        """
        if eagle1.has_tensors(tensors):
            return False
        named = any("eagle3" in name for name in names) or raw.get("draft_vocab_size") is not None
        normed = any(name.endswith("hidden_norm.weight") for name in tensors)
        return named or ("fc.weight" in tensors and normed)

    def completed(
        self, config: Eagle3Config, stored: dict[str, StoredTensor]
    ) -> tuple[Eagle3Config, dict[str, StoredTensor]]:
        """Return the configuration with its draft vocabulary and the optional tensors it has.

        A head without an output matrix uses the target's.

        Raises InputError for a draft vocabulary that is not a list of the target's tokens, and for
        heads with more layers.
        """
        stored = renamed(
            config.title, stored, lambda name: _LAYER.sub("layers.0.", name.removeprefix("model."))
        )
        check_one_layer(config.title, stored)
        text: Any = replace(
            config.text_config,
            own_embedding="embed_tokens.weight" in stored,
            own_output="lm_head.weight" in stored,
        )
        if isinstance(text, EagleConfig):
            text = replace(text, qk_norm="layers.0.self_attn.q_norm.weight" in stored)
        text = replace(text, draft_vocabulary=draft_words(config.title, stored, text))
        parameters = {name: stored[name] for name in stored if name not in ("d2t", "t2d")}
        return replace(config, text_config=text), parameters

    def written(
        self,
        config: Eagle3Config,
        tensors: dict[str, np.ndarray],
        server: Server,
        architectures: list[str] | None,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        raw = config.to_dict() | {"torch_dtype": str(tensors["fc.weight"].dtype)}
        tensors = with_words(config.text_config, tensors)
        if isinstance(config.text_config, GemmaEagleConfig):
            return raw, tensors
        if server != "speculators":
            return raw, {_LAYER.sub("midlayer.", name): leaf for name, leaf in tensors.items()}
        outside = (*_OUTER, "eagle_config", "architectures")
        inner = {key: value for key, value in raw.items() if key not in outside}
        target_size = inner.pop("target_hidden_size")
        return {
            "architectures": [SPECULATORS[0]],
            "transformer_layer_config": inner,
            "target_hidden_size": None if target_size == inner["hidden_size"] else target_size,
            "tie_word_embeddings": False,
            **{key: raw[key] for key in _OUTER},
            **speculators_entries("eagle3", config, architectures),
        }, tensors

    def exported(
        self, config: Eagle3Config, params: Params, options: ExportOptions
    ) -> tuple[Eagle3Config, Params]:
        source, server, text = options.source, options.server, config.text_config
        unread = ["qk_norm"] if server else []
        if server == "sglang":
            unread += ["norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"]
        if names := [name for name in unread if getattr(text, name)]:
            raise InputError(f"{source}: has {', '.join(names)}, which {server} does not read")
        if server == "sglang" and 0 in text.target_layers:
            reason = "reads the target's embedding, and sglang only layers' outputs"
            raise InputError(f"{source}: {reason}")
        return with_target(config, options), params

    def facts(self, config: Eagle3Config) -> dict[str, str]:
        return {"image rule": config.images} | window_facts(config.text_config)

    def command(self, config: Eagle3Config, path: str, server: Server) -> str:
        target, count = config.target_name, min(config.gamma, 3)
        if server == "speculators":
            return f"vllm serve {shlex.quote(path)}"
        if server == "sglang":
            steps = (
                f" --speculative-num-steps {count} --speculative-eagle-topk 1"
                f" --speculative-num-draft-tokens {count + 1}"
            )
            return sglang_command(target, "EAGLE3", path, steps)
        return vllm_command(target, method="eagle3", model=path, num_speculative_tokens=count)


KIND = Eagle3Kind(
    config=Eagle3Config,
    module=Eagle3Head,
    titles=("EAGLE-3",),
    about="EAGLE-3 head: a draft that reads hidden states of its target",
    features=("fused",),
    options=("images", "layers", "target_layers", "window"),
    axes=((r"fc/weight", (None, "embed")),),
)
