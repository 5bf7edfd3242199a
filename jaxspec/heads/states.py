"""Define what heads share that have keys of their own and read their target's hidden states.

Slot p reads the embedding of token p + 1 next to the hidden state of token p. That state is the
target's, or, of a token that the head drafted itself, its own. It takes the position of token p.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeVar

import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.checkpoints.locating import model_name
from jaxspec.config.schema import check_choice
from jaxspec.errors import InputError
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Kind
from jaxspec.heads.head import BlockAttention, Fused, KeyedHead, Prompt, Reading, Slots, cache_of
from jaxspec.typing import Array, Vectors

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
    def extras(self) -> dict[str, Any]:
        """Return the entries of config.json that only this library reads."""
        return {
            name: getattr(self, name) for name in ("target_hash", "target_name", "gamma", "images")
        }

    def to_dict(self) -> dict[str, Any]:
        return self.text_config.to_hf() | {"jaxspec": self.extras}

    def with_images(self, rule: str) -> Self:
        if rule not in self.rules:
            rules = ", ".join(self.rules)
            raise InputError(f"{self.title}: unknown image rule {rule!r}; give one of {rules}")
        return replace(self, images=rule)


class StateHead(KeyedHead):
    """Hold a head's parameters except its embedding and output matrix, and compute blocks."""

    config: StateHeadConfig

    behind: ClassVar[int] = 1
    layer: ClassVar[Callable[..., Any]]
    """Its decoder layer."""

    def setup(self) -> None:
        text = self.config.text_config
        layers = range(text.num_hidden_layers)
        self.layers = [self.layer(text.of_layer(layer), BlockAttention) for layer in layers]

    def context(self, reading: Reading, prompt: Prompt) -> KVCache:
        """Return the keys of whole rows.

        Slot p is of token p + 1. The last one wraps around to token 0, which means nothing there.
        """
        states, embeds, images = reading.states, prompt.embeds, prompt.images
        assert states is not None
        assert embeds is not None
        states, rule = states[:, : embeds.shape[1]], self.config.images
        if images is not None and rule == "zero":
            states = jnp.where(images[..., None], 0, states)
        elif images is not None and prompt.image_embeds is not None:
            embeds = jnp.where(images[..., None], prompt.image_embeds, embeds)
        after = jnp.roll(embeds, -1, axis=1)
        whole = self.behind + jnp.arange(embeds.shape[1])[None]
        if prompt.first is not None:
            whole -= prompt.first
        x = self.fuse(after, self.combine(states), None, whole)
        if images is not None and rule == "unfused":
            x = jnp.where(jnp.roll(images, -1, axis=1)[..., None], after, x)
        return cache_of([layer.keys_values(x, prompt.rotary) for layer in self.layers])

    def keys(
        self, states: Fused, after: Vectors | None, slots: Slots, rotary: Slots, context: Any
    ) -> list[tuple[Array, Array]]:
        assert after is not None
        x = self.fuse(after, self.combine(states), context, slots + self.behind)
        return [layer.keys_values(x, rotary) for layer in self.layers]


Config = TypeVar("Config", bound=StateHeadConfig)
IMAGE_RULES = {
    r"(?:.*/)?MSD-|LlavaLlamaForCausalLM$": "unfused",
    r"(?:Cloudriver/)?EAGLE2?-": "embedding",
    r"(?:Cloudriver/)?EAGLE3-(?:Qwen2\.5-VL|LLaVA)": "zero",
    r"(?:Rayzl/)?qwen2\.5-vl-7b-eagle3-sgl": "embedding",
    r"Qwen2VLForConditionalGeneration$": "unfused",
}
"""Pattern of a hub id, a folder's name or an architecture -> rule.

They are MSD; MMSpec's EAGLE, which reads what its target shows, and its EAGLE-3, whose code zeroes
the states; SpecForge's head, trained on images; MSD for Qwen2-VL and Qwen2.5-VL.
"""


class StateKind(Kind[Config]):
    """Read heads whose config.json may not name their rule for images."""

    def read(self, path: Path, raw: dict[str, Any]) -> Config:
        """Return the configuration, with the rule of its id or architecture unless it has one."""
        config, extras = super().read(path, raw), raw.get("jaxspec")
        if isinstance(extras, dict) and "images" in extras:
            return config
        architectures = raw.get("architectures")
        names = [model_name(path), *(architectures if isinstance(architectures, list) else ())]
        rules = (
            rule
            for pattern, rule in IMAGE_RULES.items()
            if rule in config.rules and any(re.match(pattern, str(name)) for name in names)
        )
        rule = next(rules, None)
        return config if rule is None else config.with_images(rule)
