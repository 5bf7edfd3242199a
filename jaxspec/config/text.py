"""Hold decoder configurations, to and from Hugging Face `config.json` dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

from jaxspec.config.rope import RopeScaling
from jaxspec.config.schema import Part, check_choice, check_positive, known_fields
from jaxspec.errors import InputError


@dataclass(frozen=True)
class TextConfig(Part):
    """Hold the fields of every decoder; the families below add fields of their modules."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    architecture: ClassVar[str]
    """transformers' class."""
    draft_vocabulary: ClassVar[tuple[int, ...]] = ()
    """All tokens are scored, unless a family says otherwise."""
    known_tokens: ClassVar[int] = 0
    """All tokens are known, unless a family says otherwise."""
    sliding_window: ClassVar[int | None] = None
    """Queries read all tokens before them, unless a family says otherwise."""
    embed_scale: ClassVar[float] = 1.0
    """Factor of a token's embedding."""
    final_logit_softcapping: ClassVar[float | None] = None
    """c: scores become c tanh(score / c); None leaves them as they are."""
    joint_images: ClassVar[bool] = False
    """Whether the tokens of an image read one another in a layer, or in some of all layers."""
    num_kv_shared_layers: ClassVar[int] = 0
    """Number of last layers that make no keys and values, and read those of earlier layers."""
    hidden_size_per_layer_input: ClassVar[int] = 0
    """Width of a token's own input to a layer, see `jaxspec.models.per_layer`; 0 without one."""

    @property
    def context(self) -> int:
        """Return the maximum tokens of a prompt and its answer."""
        return self.max_position_embeddings

    @property
    def scored_tokens(self) -> int:
        """Return the number of tokens that the output matrix scores."""
        return len(self.draft_vocabulary) or self.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return the ids that end an answer."""
        eos = self.eos_token_id
        return (eos,) if isinstance(eos, int) else eos or ()

    @property
    def cached_layers(self) -> int:
        """Return the number of layers that make keys and values; they are the first ones."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    @property
    def key_layers(self) -> tuple[int, ...]:
        """Return the layer whose keys and values each layer reads."""
        return tuple(range(self.num_hidden_layers))

    def of_layer(self, index: int) -> Self:
        """Return the configuration of one layer, of its kind where layers differ."""
        del index
        return self

    def to_hf(self) -> dict[str, Any]:
        """Return the dictionary that the family's transformers class reads, versions 4 and 5."""
        return super().to_hf() | {"architectures": [self.architecture]}


FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers."""


class Biases(NamedTuple):
    """Choose the projections of a layer that have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True)
class RotaryConfig(TextConfig):
    """Describe decoders of Llama's shape: rotary positions, RMS norms, gated MLP.

    The families differ in biases and in defaults, which are their transformers classes'. These
    defaults are Llama's.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0
    """0 means: as many as query heads."""
    head_dim: int = 0
    """0 means: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    draft_vocabulary: tuple[int, ...] = field(default=(), repr=False)  # pyright: ignore
    """Tokens that the output matrix scores, see `jaxspec.models.vocabulary`; empty: all."""
    known_tokens: int = 0  # pyright: ignore
    """The number of tokens that a draft has learned, the first ones; 0 means all. Later ones are
    its target's, and get no probability. Other libraries pass this entry over."""
    sliding_window: int | None = None  # pyright: ignore
    """Tokens that a query of a sliding layer reads, itself included; None: all."""
    layer_types: tuple[str, ...] = ()
    """`sliding_attention` or `full_attention` for each layer; empty: all slide."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads
        )
        object.__setattr__(
            self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads
        )
        check_choice("text config", self, "hidden_act", *self.activations)
        check_positive("text config", self, "rms_norm_eps", "rope_theta")
        if self.sliding_window is not None:
            check_positive("text config", self, "sliding_window")
        self.rope_scaling.check_sections(self.head_dim)

    qk_norm: ClassVar[bool] = False
    """Whether each attention head's queries and keys are normed before they are rotated."""
    sandwich: ClassVar[bool] = False
    """Whether the outputs of attention and MLP are normed too."""
    norm_offset: ClassVar[int | None] = None
    """Number that is added to the weights of norms, whose products are then float32."""
    value_norm: ClassVar[bool] = False
    """Whether each attention head's values are normed, without a weight."""
    attention_k_eq_v: ClassVar[bool] = False
    """Whether one projection makes both keys and values."""
    layer_scalar: ClassVar[bool] = False
    """Whether a layer's output is multiplied by a number of its own."""
    query_scale: ClassVar[float] = 1.0
    """Factor of queries in addition to the usual one, head_dim ** -0.5."""
    biases: ClassVar[Biases] = Biases()
    """Projections that have a bias."""
    activations: ClassVar[tuple[str, ...]] = ("silu",)
    """Values of `hidden_act` that the family knows."""

    @property
    def context(self) -> int:
        return self.rope_scaling.context(self.max_position_embeddings)

    def of_layer(self, index: int) -> Self:
        """Return the configuration of one layer, without a window if the layer is full."""
        if not self.layer_types:
            return self
        slides = self.layer_types[index] == SLIDING
        return replace(self, layer_types=(), sliding_window=self.sliding_window if slides else None)

    def without_window(self, layers: Sequence[int]) -> Self:
        """Return a decoder of layers like these ones, except that they read all tokens."""
        del layers
        return replace(self, sliding_window=None, layer_types=())

    def for_head(self, layers: Sequence[int]) -> Self:
        """Return a head's decoder: layers like these ones that read all tokens."""
        return replace(self.without_window(layers), num_hidden_layers=len(layers))

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        """Return `sliding_window` and `layer_types` of the family's dictionary."""
        del raw
        return None, ()

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        """Read the family's dictionary, with the rotary keys of transformers 4 or 5."""
        window, kinds = cls.windows(raw)
        entries = known_fields(cls, raw | {"sliding_window": window, "layer_types": kinds})
        rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
        positions = entries.get("max_position_embeddings", cls.max_position_embeddings)
        entries["rope_scaling"] = RopeScaling.from_hf(rope, positions)
        entries |= known_fields(cls, {"rope_theta": rope.get("rope_theta")})
        # Unlike elsewhere, null is not the class's default here: Qwen2's is 32, Mistral's 8.
        if raw.get("num_key_value_heads", 0) is None:
            entries["num_key_value_heads"] = 0
        config = cls(**entries)
        ids, tokens, layers = config.draft_vocabulary, config.vocab_size, config.num_hidden_layers
        if ids and (len({*ids}) < len(ids) or min(ids) < 0 or max(ids) >= tokens):
            last = tokens - 1
            raise InputError(f"text config: draft_vocabulary: give ids from 0 to {last}, each once")
        if not 0 <= config.known_tokens <= tokens:
            raise InputError(f"text config: known_tokens {config.known_tokens}; give 0 to {tokens}")
        if kinds and (len(kinds) != layers or {*kinds} - {FULL, SLIDING}):
            raise InputError(
                f"text config: layer_types {kinds!r:.60} for {layers} layers; "
                f"give {FULL} or {SLIDING} for each"
            )
        # A window that no row fills changes nothing.
        if config.sliding_window is not None and config.sliding_window >= config.context:
            return config.without_window(range(layers))
        return config

    def to_hf(self) -> dict[str, Any]:
        """Return the family's dictionary, with the rotary keys of transformers 4 and 5."""
        scaling, out = self.rope_scaling.to_hf(), super().to_hf()
        del out["sliding_window"], out["layer_types"]
        for name in ("draft_vocabulary", "known_tokens"):  # entries that only this library reads
            if not out[name]:
                del out[name]
        return out | {
            "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
            "rope_parameters": {"rope_theta": self.rope_theta} | scaling,
        }


@dataclass(frozen=True)
class LlamaConfig(RotaryConfig):
    """Describe Llama 1 to 3 and Vicuna."""

    model_type: str = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False

    architecture = "LlamaForCausalLM"

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_bias, self.mlp_bias)


@dataclass(frozen=True)
class MistralConfig(RotaryConfig):
    """Describe Mistral; in v0.1 all layers slide."""

    model_type: str = "mistral"
    intermediate_size: int = 14336
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072

    architecture = "MistralForCausalLM"

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        return raw.get("sliding_window", 4096), ()

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"sliding_window": self.sliding_window}


@dataclass(frozen=True)
class Qwen2Config(RotaryConfig):
    """Describe Qwen2 and Qwen2.5, Coder and Math too."""

    model_type: str = "qwen2"
    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    architecture = "Qwen2ForCausalLM"
    biases = Biases(qkv=True)

    @classmethod
    def windows(cls, raw: dict[str, Any]) -> tuple[int | None, tuple[str, ...]]:
        if not raw.get("use_sliding_window"):
            return None, ()
        first = 28 if raw.get("max_window_layers") is None else raw["max_window_layers"]
        layers = range(raw.get("num_hidden_layers") or cls.num_hidden_layers)
        kinds = raw.get("layer_types") or [SLIDING if i >= first else FULL for i in layers]
        if {*kinds} == {FULL}:
            return None, ()
        return raw.get("sliding_window", 4096), () if {*kinds} == {SLIDING} else tuple(kinds)

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        if self.sliding_window is None:
            return out | {"use_sliding_window": False}
        kinds = list(self.layer_types) or [SLIDING] * self.num_hidden_layers
        return out | {
            "use_sliding_window": True,
            "sliding_window": self.sliding_window,
            "max_window_layers": kinds.count(FULL),
            "layer_types": kinds,
        }


@dataclass(frozen=True)
class MimoConfig(Qwen2Config):
    """Describe MiMo-7B, a Qwen2 whose files also hold an MTP head (`jaxspec.heads.kinds.mtp`)."""

    model_type: str = "mimo"

    architecture = "MiMoForCausalLM"


@dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Describe dense Qwen3."""

    model_type: str = "qwen3"
    head_dim: int = 128
    attention_bias: bool = False

    architecture = "Qwen3ForCausalLM"
    qk_norm = True

    @property
    def biases(self) -> Biases:
        return Biases(self.attention_bias, self.attention_bias)


@dataclass(frozen=True)
class OptConfig(TextConfig):
    """Describe OPT and Galactica. Defaults are those of transformers' `OPTConfig`."""

    model_type: str = "opt"
    vocab_size: int = 50272
    hidden_size: int = 768
    intermediate_size: int = 3072
    """`ffn_dim` in the file."""
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = field(init=False)
    head_dim: int = field(init=False)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1
    word_embed_proj_dim: int = 0
    """Width of the embedding and the output matrix; 0 means hidden_size."""
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = False
    """`_remove_final_layer_norm` in the file."""
    layer_norm_elementwise_affine: bool = True
    enable_bias: bool = True
    activation_function: str = "relu"

    architecture = "OPTForCausalLM"
    _RENAMED: ClassVar = {
        "intermediate_size": "ffn_dim",
        "remove_final_layer_norm": "_remove_final_layer_norm",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        object.__setattr__(
            self, "word_embed_proj_dim", self.word_embed_proj_dim or self.hidden_size
        )
        check_choice("text config", self, "activation_function", "relu", "gelu")

    @property
    def final_layer_norm(self) -> bool:
        """Return whether a norm follows the last layer."""
        return self.do_layer_norm_before and not self.remove_final_layer_norm

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> Self:
        renamed = {name: raw[key] for name, key in cls._RENAMED.items() if key in raw}
        return super().from_hf(raw | renamed | {"num_key_value_heads": None, "head_dim": None})

    def to_hf(self) -> dict[str, Any]:
        out = super().to_hf()
        del out["num_key_value_heads"], out["head_dim"]
        return {self._RENAMED.get(key, key): value for key, value in out.items()}
