"""Describe what all heads share: layers of their own, a target, and the length of their drafts.

A head knows the target that it was made for by a hash of the target's configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from jaxspec.config import ModelConfig, text_config
from jaxspec.config.decoders import decoder_config
from jaxspec.config.gemma4 import Gemma4TextConfig
from jaxspec.config.rope import RopeScaling
from jaxspec.config.text import FULL, SLIDING, Qwen3Config, RotaryConfig, TextConfig
from jaxspec.errors import InputError, check_counts

_NEUTRAL: dict[str, Any] = {
    **{"rope_is_neox_style": True, "is_neox_style": True, "final_logit_softcapping": None},
    "logit_scale": 1,
}
"""Entries that change any head's scores, with the value for which they do not."""
_NONE = re.compile("(?!)")
_GEMMA: dict[str, Any] = {
    **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False},
    **{"use_bidirectional_attention": None, "draft_vocabulary": None},
}
"""Entries of a Gemma 4 that DeepSeek's files copy, and that a head's layers do not have."""


@dataclass(frozen=True)
class HeadConfig(ABC):
    """Describe a head's layers and target."""

    text_config: RotaryConfig
    """Its own layers, as a decoder."""
    target_hash: str
    """`target_hash` of the target's configuration; empty where the head's files lack it."""
    target_name: str = ""
    """Name of the target, for people."""
    gamma: int = 5
    """J: draft length of its training."""

    title: ClassVar[str]
    """Name of the kind, for people."""
    free: ClassVar[tuple[str, ...]] = ("gamma", "target_name")
    """Fields that may change when a trained head is trained on."""
    model_type: ClassVar[str]
    """Name of the kind in config.json, or its title where public files name none."""
    name: ClassVar[str]
    """Name of the kind among a program's parameters."""
    orders_vocabulary: ClassVar[bool] = False
    """Whether its files have the draft vocabulary in the order of the ids."""
    reads_spans: ClassVar[bool] = False
    """Whether it reads which slots show which image."""
    start_decides: ClassVar[bool] = False
    """Whether a start decides its layers and what they read, and not the recipe."""
    keeps_vocabulary: ClassVar[bool] = False
    """Whether its parameters have a fixed draft vocabulary."""
    packs: ClassVar[bool] = True
    """Whether it can learn from rows that hold several conversations."""
    key_layers_read: ClassVar[tuple[int, ...]] = ()
    """Target's layer whose keys each of its layers reads; () for none."""
    scores_itself: ClassVar[bool] = False
    """Whether its module scores tokens, and not an output matrix."""
    mask_token: ClassVar[int | None] = None
    """Token whose embedding replaces those of the tokens to draft; None without one."""
    shows_images: ClassVar[bool] = False
    """Whether it reads the target's embeddings of images."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Names of its parameters that training leaves as they are."""
    markov: ClassVar[int] = 0
    """r: rank of a Markov head as in DSpark, which adds a term for the token before to a token's
    score; 0: none."""
    target_states: ClassVar[tuple[int, ...] | None] = ()
    """The target's hidden states that it reads, as `KVCache.kept`; None for none."""
    own_embedding: ClassVar[bool] = False
    """Whether its parameters have `embed_tokens`, in place of the target's."""
    has_output: ClassVar[bool] = False
    """Whether they have `lm_head`, in place of the target's output matrix."""

    def __post_init__(self) -> None:
        check_counts(gamma=self.gamma)

    @property
    def states_width(self) -> int:
        """Return the numbers of a token's hidden states that it reads; 0 for none."""
        if self.target_states is None:
            return 0
        return max(len(self.target_states), 1) * self.embedding.hidden_size

    @property
    def target_keys(self) -> tuple[int, ...]:
        """Return the target's layers whose keys it reads, without repeats."""
        return tuple(sorted({*self.key_layers_read}))

    @property
    def key_places(self) -> tuple[int, ...]:
        """Return the index in `target_keys` of what each of its layers reads."""
        return tuple(map(self.target_keys.index, self.key_layers_read))

    @property
    def follows_mrope(self) -> bool:
        """Return whether its positions are the target's where images shift them (M-RoPE)."""
        return bool(self.text_config.rope_scaling.mrope_section)

    def slots_of(self, gamma: int) -> int:
        """Return the slots of a block that drafts this many tokens in one pass."""
        return gamma

    @classmethod
    @abstractmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Return the configuration that a head's config.json describes."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the entries of config.json."""

    @abstractmethod
    def _fitted(self, target: Any, text: TextConfig) -> Self:
        """Return the configuration with the layers of this target that it reads.

        text: The target's decoder.
        """

    def for_target(self, target: Any) -> Self:
        """Return the configuration with the layers of this target that it reads.

        Raises InputError for a target that the head was not made for.
        """
        digest = target_hash(target)
        if self.target_hash and digest != self.target_hash:
            raise InputError(
                f"{self.title}: made for a target of configuration {self.target_hash}"
                f"{self._target_note}, but this {target.model_type} is {digest}; "
                "use the head's own target"
            )
        return self._fitted(target, getattr(target, "text_config", target))

    @property
    def _target_note(self) -> str:
        """Return the target's name as a part of a sentence."""
        return f" ({self.target_name})" if self.target_name else ""

    def _misfit(self, target: Any, width: int, tokens: int, layers: str = "") -> InputError:
        """Return the error of a target that the head was not made for.

        layers: Layers that the head needs, as a part of the sentence.
        """
        text = getattr(target, "text_config", target)
        return InputError(
            f"{self.title}: made for a target{self._target_note} of width {width} and {tokens} "
            f"tokens{layers}, and not for this {target.model_type} of {text.hidden_size}, "
            f"{text.vocab_size} and {text.num_hidden_layers} layers; give the head's own target"
        )

    @property
    def embedding(self) -> RotaryConfig:
        """Return the decoder whose embedding of tokens it reads."""
        return self.text_config

    def options(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def with_images(self, rule: str) -> Self:
        """Return the configuration with another rule for images, see `ImageRule`.

        Raises InputError for a rule that the kind cannot follow.
        """
        raise InputError(f"{self.title}: follows no image rule, {rule!r}; leave the rule out")

    @property
    @abstractmethod
    def reads(self) -> tuple[Any, ...]:
        """Return the part of a target pass that it reads in training; equal heads can share it."""

    @property
    def kept_options(self) -> dict[str, Any]:
        """Return the options of `new_head` that a start decides, by name."""
        return {}

    def started(self, trained: HeadConfig, vocabulary: tuple[int, ...], target: Any) -> Self:
        """Return the configuration for training a trained head further, with this one's options.

        vocabulary: Its draft vocabulary; () keeps the one of `trained`.

        Raises InputError for another kind or vocabulary, and for other fields that differ, except
        those that are `free`, unless a start decides its layers.
        """
        if type(trained) is not type(self):
            raise InputError(f"its kind is {trained.title!r}, the recipe's {self.title!r}")
        stored_ids = trained.text_config.draft_vocabulary
        if vocabulary not in ((), stored_ids) and (self.start_decides or trained.keeps_vocabulary):
            scored = "has its own draft vocabulary" if stored_ids else "scores all tokens"
            raise InputError(f"{scored}; give --draft-vocabulary 0")
        if self.start_decides:  # the layers and what they read, whatever their number and sizes
            fitted: Any = trained.for_target(target)
            names = ("gamma", "target_name", "target_hash")
            return replace(fitted, **{name: getattr(self, name) for name in names})
        config, stored = (
            replace(
                each,
                text_config=replace(each.text_config, draft_vocabulary=vocabulary or stored_ids),
            )
            for each in (self, trained)
        )
        for name in (field.name for field in fields(config) if field.name not in self.free):
            if (expected := getattr(config, name)) != (actual := getattr(stored, name)):
                raise InputError(f"its {name} is {actual!r:.60}, the recipe's {expected!r:.60}")
        return config


def check_entries(
    title: str,
    entries: Mapping[str, Any],
    neutral: Mapping[str, Any] | None = None,
    suspects: re.Pattern[str] = _NONE,
    known: frozenset[str] = frozenset(),
) -> None:
    """Raise InputError for entries of config.json that change scores and are not supported.

    Args:
      neutral: More entries, each with the value that changes no score.
      suspects: Parts of the names of other entries that may change a head's computation.
      known: Entries with such names that are read, or change nothing.
    """
    neutral = _NEUTRAL | dict(neutral or {})
    unsupported = [
        f"{key} {json.dumps(value):.40}"
        for key, value in entries.items()
        if (
            key not in known and value not in (None, neutral[key])
            if key in neutral
            else value and key not in known and suspects.search(key)
        )
    ]
    if unsupported:
        listing = ", ".join(unsupported)
        raise InputError(f"{title}: config.json has {listing}, which is not supported")


def placeholder_words(title: str, entries: Mapping[str, Any], tokens: int) -> tuple[int, ...]:
    """Return as many draft words as config.json says; () for all tokens. `d2t` has their ids.

    Raises InputError for what is not a number of words.

    tokens: Size of the target's vocabulary.
    """
    size = entries.get("draft_vocab_size")
    if size is not None and (type(size) is not int or size < 1):
        raise InputError(f"{title}: draft_vocab_size {size!r:.40}; give 1 or more")
    return tuple(range(size)) if size is not None and size < tokens else ()


def windows_of(raw: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """Return `sliding_window` and `layer_types` of a head's layers, whatever their family is.

    Layers slide where `layer_types` says so, unless `use_sliding_window` says otherwise.
    """
    uses = raw.get("use_sliding_window")
    slides = SLIDING in (raw.get("layer_types") or ()) if uses is None else uses
    window, kinds = Qwen3Config.windows({**raw, "use_sliding_window": slides})
    return window, () if window is None else kinds


def gemma4_layers(title: str, raw: Mapping[str, Any]) -> Gemma4TextConfig:
    """Return the configuration of a Gemma 4's layers, which are full; InputError for others."""
    kinds = [FULL] * raw["num_hidden_layers"]
    if (other := raw.get("layer_types") or kinds) != kinds:
        raise InputError(
            f"{title}: layer_types {other!r:.60} of a Gemma 4; give a head whose layers are all "
            "full"
        )
    text = decoder_config({**raw, **_GEMMA, "layer_types": kinds})
    assert isinstance(text, Gemma4TextConfig)
    return replace(text.without_window(range(len(kinds))), tie_word_embeddings=False)


def check_rotary(target: ModelConfig) -> RotaryConfig:
    """Return a target's decoder; InputError for one without rotary keys."""
    text = text_config(target)
    if not isinstance(text, RotaryConfig):
        raise InputError(
            f"target: a {text.model_type} has no rotary keys, which heads read; give another"
        )
    return text


def shared_sizes(text: RotaryConfig) -> dict[str, Any]:
    """Return the fields of a target's decoder that the layers of a new head have too."""
    names = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
        *("rope_theta", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
    return {name: getattr(text, name) for name in names}


_DEPENDS_ON = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "tie_word_embeddings"),
)
"""Fields of a decoder that a head relies on."""


def target_hash(target: Any) -> str:
    """Return 16 hexadecimal digits of SHA-256 over the target's fields that a head relies on."""
    text: TextConfig = getattr(target, "text_config", target)
    fields: dict[str, Any] = {name: getattr(text, name, None) for name in _DEPENDS_ON}
    if isinstance(fields["rope_scaling"], RopeScaling):
        rope = asdict(fields["rope_scaling"])
        # Fields that older heads' targets did not have.
        for name in ("mrope_interleaved", "partial_rotary_factor"):
            if rope[name] == getattr(RopeScaling(), name):
                del rope[name]
        fields["rope_scaling"] = rope
    for name in ("global_head_dim", "num_global_key_value_heads"):
        if hasattr(text, name):
            fields[name] = getattr(text, name)
    if text is not target:
        vision = target.vision_config  # of an LVLM
        fields["images"] = [
            target.model_type,
            target.image_token_index,
            vision.hidden_size,
            vision.patch_size,
        ]
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
