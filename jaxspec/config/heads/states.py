"""Define what heads share that have keys of their own and read hidden states of their target."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from jaxspec.config.heads.head import HeadConfig
from jaxspec.config.schema import check_choice
from jaxspec.errors import InputError

ImageRule = Literal["placeholder", "embedding", "unfused", "zero", "compressed"]
"""What a head reads at the slots of an image.

placeholder: the placeholder's embedding and the target's hidden state, as at a slot of text.
embedding: the image's embedding, as the target shows it, and the hidden state.
unfused: the image's embedding in the place of `fc`'s output (MSD); only EAGLE-1 heads.
zero: the placeholder's embedding, and zeros for the hidden state.
compressed: vectors that learned queries make of all its embeddings; only ViSpec heads.
"""


@dataclass(frozen=True)
class StateHeadConfig(HeadConfig):
    """Describe a head that reads hidden states of its target, and then its own."""

    images: ImageRule = "placeholder"
    """Its rule for images. A head drafts worse by another rule than it was trained with."""

    rules: ClassVar[tuple[str, ...]]
    """Rules that the kind can follow."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.title, self, "images", *self.rules)

    @property
    def shows_images(self) -> bool:
        return self.images in ("embedding", "unfused", "compressed")

    @property
    def reads(self) -> tuple[Any, ...]:
        return "states", self.target_states, self.shows_images

    @property
    def own_states(self) -> tuple[int, ...]:
        """Return its own hidden states that it reads, as `KVCache.kept`."""
        return ()

    @property
    @abstractmethod
    def embedding_rows(self) -> int:
        """Return the rows of its own embedding; 0 for a head that reads the target's."""

    @property
    def extras(self) -> dict[str, Any]:
        """Return the entries of config.json that only this library reads."""
        return {
            name: getattr(self, name) for name in ("target_hash", "target_name", "gamma", "images")
        }

    def with_images(self, rule: str) -> Self:
        if rule not in self.rules:
            rules = ", ".join(self.rules)
            raise InputError(f"{self.title}: unknown image rule {rule!r}; give one of {rules}")
        return replace(self, images=rule)

    @classmethod
    @abstractmethod
    def of_target(cls, target: Any, **options: Any) -> Self:
        """Return the configuration of a new head for a target.

        options: Fields of the head.
        """

    def _check_shown(self, width: int) -> None:
        """Raise InputError if the target's embeddings of images have another width than its own."""
        if self.shows_images and width != self.text_config.hidden_size:
            raise InputError(
                f"{self.title}: width {self.text_config.hidden_size}, but the target's embeddings "
                f"of images have {width}; give the image rule placeholder or zero"
            )
