"""What all kinds of heads share: layers of their own, a target, and the length of their drafts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from jaxspec.config.heads.target import target_hash
from jaxspec.config.text import RotaryConfig, TextConfig
from jaxspec.errors import InputError


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
    model_type: ClassVar[str]
    """Name of the kind in config.json, or its title where public files name none."""

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
                f"{self._named}, and this {target.model_type} is {digest}; "
                "use the head's own target"
            )
        return self._fitted(target, getattr(target, "text_config", target))

    @property
    def _named(self) -> str:
        """Return the target's name as a part of a sentence."""
        return f" ({self.target_name})" if self.target_name else ""

    def options(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def check_rotary(text: TextConfig) -> RotaryConfig:
    """Return a target's decoder. Raises InputError for one without rotary keys."""
    if not isinstance(text, RotaryConfig):
        raise InputError(f"KV head: a {text.model_type} has no rotary keys; give another")
    return text
