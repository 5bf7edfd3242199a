"""Make models as an engine reads them, and what they are asked: requests, and conversations to
learn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import LlavaConfig, ModelConfig
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.engine import Engine, EngineConfig, Request, Result
from jaxspec.engine.session import Session
from jaxspec.loading.models import LoadedHead, LoadedModel
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec.sharding import shardings
from jaxspec.typing import Params
from picturebook.samples import Sample
from tests.tiny.checkpoints import CONFIG, image_processor, tokenizer
from tests.tiny.models import kv_head

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
    """Return the model with the tokeniser and the image processor of its directory."""
    pages = image_processor() if isinstance(config, LlavaConfig) else None
    return LoadedModel(config, jax.device_put(params), words or tokenizer(), pages)


def split(model: LoadedModel, mesh: Mesh) -> LoadedModel:
    """Return the model on a mesh."""
    places = shardings(model.config, model.params, mesh)
    return replace(model, params=jax.device_put(model.params, places))


def head_of(target: LoadedModel, **options: Any) -> LoadedHead:
    return LoadedHead(*kv_head(target.model, target.params, **options))


def page(seed: int = 0, height: int = 28, width: int = 28) -> np.ndarray:
    """Return a page of noise."""
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


def tokens(results: Iterable[Result]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def run_live(batch: Batch, waiting: dict[int, Any]) -> dict[int, Result]:
    """Return the results of requests that join a live batch as rows become free, token by token."""
    results = dict[int, Result]()
    while waiting or batch.busy:
        batch.join(waiting)
        batch.decode(stride=1)
        results |= batch.results()
    return results


def check_session(
    engine: Engine,
    turns: Iterable[tuple[str, Sequence[Any]]],
    new: int = 8,
    plain: Engine | None = None,
) -> None:
    """Check that each turn, a question and its images, is answered as the whole prompt is.

    plain: Answers the whole prompts; None for the engine itself.
    """
    session, prompt, answer = Session(engine), None, ()
    for question, images in turns:
        said = session.ask(question, images=images, max_new_tokens=new)
        if prompt is None:
            prompt = engine.encoder.prompt(question, images)
        else:
            prompt = engine.encoder.follow_up(prompt, answer, question, images)
        whole = (plain or engine).generate(Request(prompt, new))
        for field in ("tokens", "text", "finish_reason", "stop_string"):
            assert getattr(said, field) == getattr(whole, field), field
        answer = whole.tokens


class Talk(Sequence[Sample]):
    """Give samples: number i has i mod 3 images, of shade i, and i mod 5 words in its answer."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: Any) -> Sample:
        images = tuple(np.full((20, 30, 3), i % 256, np.uint8) for _ in range(i % 3))
        answer = f"It is {i}" + " so" * (i % 5)
        return Sample(
            str(i), "talk", images, ((PLACEHOLDER * len(images) + "What?", answer), ("And?", "No."))
        )
