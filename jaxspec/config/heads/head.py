"""Define what all heads share: layers of their own, a target, and the length of their drafts."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from jaxspec.config.heads.target import target_hash
from jaxspec.config.text import RotaryConfig, TextConfig
from jaxspec.errors import InputError, check_counts

_NEUTRAL: dict[str, Any] = {
    **{"rope_is_neox_style": True, "is_neox_style": True, "final_logit_softcapping": None},
    "logit_scale": 1,
}
"""Entries that change any head's scores, with the value for which they do not."""
_NONE = re.compile("(?!)")


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
    orders_vocabulary: ClassVar[bool] = False
    """Whether its files have the draft vocabulary in the order of the ids."""

    def __post_init__(self) -> None:
        check_counts(gamma=self.gamma)

    @property
    @abstractmethod
    def target_states(self) -> tuple[int, ...] | None:
        """Return the target's hidden states that it reads, as `KVCache.kept`, or None."""

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
                f"{self._named}, but this {target.model_type} is {digest}; "
                "use the head's own target"
            )
        return self._fitted(target, getattr(target, "text_config", target))

    @property
    def _named(self) -> str:
        """Return the target's name as a part of a sentence."""
        return f" ({self.target_name})" if self.target_name else ""

    @property
    def embedding(self) -> RotaryConfig:
        """Return the decoder whose embedding of tokens it reads."""
        return self.text_config

    def options(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @property
    def shows_images(self) -> bool:
        """Return whether it reads the target's embeddings of images."""
        return False

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
    @abstractmethod
    def keeps_vocabulary(self) -> bool:
        """Return whether its parameters have a fixed draft vocabulary."""

    @property
    def kept_options(self) -> dict[str, Any]:
        """Return the options of `new_head` that a start decides, by name."""
        return {}

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the names of its parameters that training leaves as they are."""
        return ()

    @property
    def corrects(self) -> bool:
        """Return whether the token before adds to a token's scores (a Markov head)."""
        return False

    def started(self, trained: HeadConfig, vocabulary: tuple[int, ...], target: Any) -> Self:
        """Return the configuration of a trained head that is trained on as this one says.

        vocabulary: Its draft vocabulary; () keeps the one of `trained`.

        Raises InputError where the two differ in more than `free` and `kept_options`.
        """
        if type(trained) is not type(self):
            raise InputError(f"its kind is {trained.title!r}, the recipe's {self.title!r}")
        trained_vocabulary = trained.text_config.draft_vocabulary
        if vocabulary not in ((), trained_vocabulary) and trained.keeps_vocabulary:
            raise InputError("has its own draft vocabulary; give --draft-vocabulary 0")
        return self._started(trained, vocabulary or trained_vocabulary, target)

    def _started(self, trained: Self, vocabulary: tuple[int, ...], target: Any) -> Self:
        config, stored = (
            replace(each, text_config=replace(each.text_config, draft_vocabulary=vocabulary))
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
      neutral: More entries with the value for which a head computes what it does here.
      suspects: Parts of the names of other entries that may change a head's computation.
      known: Entries with such names that are read, or change nothing.
    """
    neutral = _NEUTRAL | dict(neutral or {})
    unsupported = [
        f"{key} {json.dumps(value):.40}"
        for key, value in entries.items()
        if (
            value not in (None, neutral[key])
            if key in neutral
            else value and key not in known and suspects.search(key)
        )
    ]
    if unsupported:
        listing = ", ".join(unsupported)
        raise InputError(f"{title}: config.json has {listing}, which is not supported")


def refuse_window(title: str, window: Any) -> None:
    """Raise InputError for a head whose layers slide over so many tokens; None: over all."""
    if window is not None:
        raise InputError(
            f"{title}: sliding_window {window!r:.40}, and heads have no windows; give a head whose "
            "layers are all full"
        )


def check_rotary(text: TextConfig) -> RotaryConfig:
    """Return a target's decoder; InputError for one without rotary keys."""
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
