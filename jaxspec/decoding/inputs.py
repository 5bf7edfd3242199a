"""Hold the prompts of B requests, in each form in which a program's models read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxspec.cache import KVCache
from jaxspec.models.inputs import Pool, PromptRows
from jaxspec.models.language_model import LanguageModel
from jaxspec.typing import Array, Float, Params, Shaped

Images = dict[str, Float[Any, "B U ..."]] | None
"""Image tiles of each row; None if no row has images."""


@dataclass(frozen=True)
class Member:
    """Pair a model with its form of prompts. Static: part of the compiled program."""

    model: LanguageModel
    pool: Pool | None = None
    """Pooling of image features; None keeps all."""
    reads_images: bool = True
    """Whether the prompt shows images."""

    def embed(self, params: Params, prompts: Prompts) -> Shaped[Array, "B L ..."]:
        """Return the prompts' embeddings, with the images that they show."""
        images, rows = prompts.images, prompts.rows
        features = None if images is None else self.model.encode(params, images)
        return self.model.embed(params, rows, features, self.pool)


class Prompts(struct.PyTreeNode):
    """Hold the prompts of B requests as one model reads them."""

    rows: PromptRows
    images: Images = None


class PromptBatch(struct.PyTreeNode):
    """Hold the prompts of B requests, as the target and each source of drafts read them."""

    target: PromptRows
    images: Images
    weights: Float[Any, "B R"] | None = None
    """Initial weights of the mixture."""
    sources: tuple[Any, ...] = ()
    """What `Source.inputs` returned, one entry for each source."""
    whole: PromptRows | None = None
    """Target's whole prompts, if `target` holds only the tokens after `past`."""
    past: KVCache | None = None
    """Target's cache of an earlier turn; then `target` holds only the new tokens."""
    features: Float[Any, "B U P E"] | None = None
    """What the target's tower makes of `images`, which are None then."""
    peers: tuple[Prompts, ...] = ()
    """Prompts of collaborating models 2 to M; the first model reads `target` and `images`."""

    @property
    def prompt(self) -> PromptRows:
        """Return the target's whole prompts."""
        return self.target if self.whole is None else self.whole
