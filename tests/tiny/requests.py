"""Models as an engine reads them, and what they are asked: requests, and conversations to learn
from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.config import LlavaConfig, ModelConfig
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.loading.models import LoadedModel
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.typing import Params
from picturebook.samples import Sample
from tests.tiny.checkpoints import CONFIG, image_processor, tokenizer

ENGINE = EngineConfig(
    views=("M", "T"),
    gamma=3,
    batch_size=4,
    new_buckets=(32,),
    prompt_buckets=(64, 128, 256),
    image_buckets=(0, 1, 2),
)
"""Sizes of tests that need no others, so that they share programs."""


def loaded(params: Params, config: ModelConfig = CONFIG, words: Any = None) -> LoadedModel:
    """The model with the tokeniser and the image processor of its directory."""
    pages = image_processor() if isinstance(config, LlavaConfig) else None
    return LoadedModel(config, jax.device_put(params), words or tokenizer(), pages)


def page(seed: int = 0, height: int = 28, width: int = 28) -> np.ndarray:
    """Noise."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def request_of(
    engine: Engine,
    words: str,
    images: int = 0,
    seed: int = 0,
    max_new_tokens: int = 12,
    **options: Any,
) -> Request:
    prompt = engine.encoder.prompt(words, [page(seed + i) for i in range(images)])
    return Request(prompt, max_new_tokens, seed=seed, **options)


class Talk(Sequence[Sample]):
    """Sample i has i mod 3 images, of shade i, and i mod 5 words in its answer."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: Any) -> Sample:
        images = tuple(np.full((20, 30, 3), i % 256, np.uint8) for _ in range(i % 3))
        answer = f"It is {i}" + " so" * (i % 5)
        return Sample(
            str(i), "talk", images, ((PLACEHOLDER * len(images) + "What?", answer), ("And?", "No."))
        )
