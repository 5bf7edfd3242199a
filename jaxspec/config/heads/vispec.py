"""Configure a ViSpec head: an EAGLE-1 head that reads compressed images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxspec.config.heads.eagle1 import Eagle1Config
from jaxspec.config.heads.states import ImageRule


@dataclass(frozen=True)
class VispecConfig(Eagle1Config):
    """Describe an EAGLE-1 head with a compressor of images, whose files have an EAGLE-1 head's
    config.json."""

    images: ImageRule = "compressed"
    queries: int = 2
    """Learned queries: all except the last make slots of an image, and the last makes a vector that
    joins the hidden states of the text after it."""

    title: ClassVar = "ViSpec head"
    model_type: ClassVar = title
    rules: ClassVar = ("compressed",)

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"architectures": ["LlamaForCausalLMViSpec"]}
