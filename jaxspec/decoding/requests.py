"""Requests and results, and what the host does with them: checks, batches, prompts as rows,
options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
from PIL.Image import Image

from jaxspec.config import ModelConfig, text_config
from jaxspec.data.images import Picture
from jaxspec.errors import InputError, check_counts
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.rows import PromptRow
from jaxspec.sampling import Sampling

Made = TypeVar("Made")

LARGEST = 2**31 - 1
"""The largest int32."""
HOTTEST = 1e30
"""Highest temperature: logits over it are still numbers in float32."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to decode it."""

    prompt: Prompt | str
    """Token ids from an engine's `encoder`, or a question, which the engine puts into the model's
    chat template."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    """1 keeps all tokens."""
    seed: int = 0
    stop: Sequence[str] = ()
    """Strings that end the answer; its text ends before the first of them."""
    images: Sequence[Any] = ()
    """Images of a question: file names, PIL images or uint8 arrays [Y, X, 3]. Each takes the place
    of an `<image>` in the question, or comes before the text."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, Prompt | str):
            kind = type(self.prompt).__name__
            raise InputError(
                f"prompt: a {kind}; give a string, or what engine.encoder.prompt(question, images) "
                f"makes"
            )
        if not isinstance(self.images, list | tuple):
            kind = type(self.images).__name__
            raise InputError(f"images: a {kind}; give a list of images, as images=[page]")
        if self.images and not isinstance(self.prompt, str):
            raise InputError(
                "images: the prompt is token ids, and has images of its own; give them to the "
                "encoder"
            )
        check_counts(max_new_tokens=self.max_new_tokens)
        if not 0 <= self.temperature <= HOTTEST:
            raise InputError(
                f"temperature: {self.temperature}; give 0 (greedy) or more, up to {HOTTEST:g}"
            )
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise InputError(f"top_k: {self.top_k}; give 0 (all tokens) or a whole number")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p}; give more than 0 and at most 1")
        if isinstance(self.stop, str) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise InputError(f"stop: {self.stop!r}; give a list of strings that are not empty")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise InputError(f"seed: {self.seed}; give a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Result:
    """What one request gave."""

    text: str
    tokens: tuple[int, ...]
    """New tokens, EOS included where it was reached, or what makes a string to stop at whole."""
    stats: Any
    """Counts of the request: `DecodeStats`, or `CollaborationStats` of models that write
    together."""
    prefill_ms: float
    """Milliseconds of all requests that ran together; compilation not counted."""
    decode_ms: float
    """Milliseconds of their whole loop after prefill, compilation not counted."""
    batch: int
    """How many these requests were: as many as decode at once, and those that took their places."""
    trace: dict[str, list[Any]] | None = None
    """Tells each new token's text (`pieces`), its `place` in the block if it was drafted (-1: the
    target wrote it), whether it was each view's likeliest (`agree`; None where the views were not
    asked), and the views' `weights`."""
    compile_ms: float = 0.0
    """What compiling for them took; in none of the other times."""
    error: str = ""
    """Why the request could not be read, with `keep_going`; then there is no text."""
    caption_ms: float = 0.0
    """What captioning the request's images took, when that was done: captions kept on disk count as
    much as new ones. Neither in `prefill_ms` nor in `decode_ms`."""


@dataclass(frozen=True)
class EncodedRequest(Request):
    """A request as it will be decoded: its prompt is token ids and images of known size."""

    prompt: Prompt
    name: str = ""
    """Which of several it is, for errors."""
    rows: tuple[PromptRow, ...] = ()
    """The prompt in each form that the program's models read."""
    sizes: Any = None
    """`Sizes` of its bucket."""
    caption_ms: float = 0.0


def encode(encoder: PromptEncoder, requests: Sequence[Request | str]) -> list[EncodedRequest]:
    """Return requests, or questions, encoded. Images are decoded later, by the batch."""
    encoded = []
    for index, one in enumerate(requests):
        name = f"request {index}" if len(requests) > 1 else ""
        with _told_of(name):
            if not isinstance(one, Request | str):
                kind = type(one).__name__
                raise InputError(f"requests: a {kind}; give a Request, or a question as a string")
            request = Request(one) if isinstance(one, str) else one
            prompt = request.prompt
            if isinstance(prompt, str):
                prompt = encoder.prompt(prompt, tuple(request.images))
            values = {f.name: getattr(request, f.name) for f in fields(Request)}
            values |= {
                "prompt": replace(prompt, images=tuple(map(Picture.of, prompt.images))),
                "images": (),
            }
            encoded.append(EncodedRequest(**values, name=name))
    return encoded


def each(
    work: Callable[..., Made], requests: Sequence[EncodedRequest], *beside: Sequence[Any]
) -> list[Made]:
    """Return what `work` makes of each request, and of what lies beside it; an InputError names the
    request."""
    made = []
    for request, *rest in zip(requests, *beside, strict=True):
        with _told_of(request.name):
            made.append(work(request, *rest))
    return made


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        if not name:
            raise
        raise InputError(f"{name}: {error}") from error


def decoded_images(requests: Sequence[EncodedRequest], spare: int) -> list[list[Image]]:
    """Return each request's images as RGB, and none for `spare` rows more."""
    return (
        each(lambda request: [picture.rgb() for picture in request.prompt.images], requests)
        + [[]] * spare
    )


def in_batches(sizes: Sequence[Any], most: int) -> list[list[int]]:
    """Return which of the requests of these `Sizes` run together: so many at most, the longest
    first.

    They are padded to the largest of their batch. So in no size is one over twice as large as
    another, and of images all have some or none.
    """
    batches: list[tuple[list[int], set[Any]]] = []
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True):
        for members, known in batches:
            if len(members) < most and all(_near(sizes[i], other) for other in known):
                members.append(i)
                known.add(sizes[i])
                break
        else:
            batches.append(([i], {sizes[i]}))
    return [members for members, _ in batches]


def _near(one: Any, other: Any) -> bool:
    """Return whether no size is over twice as large as the other; as of 0 any is."""
    return all(max(pair) <= 2 * min(pair) for pair in zip(one.flat, other.flat, strict=True))


def all_greedy(requests: Sequence[Request]) -> bool:
    """Return whether none of the requests samples."""
    return all(request.temperature == 0 for request in requests)


def sampling_options(requests: Sequence[Request], config: ModelConfig, batch: int) -> Sampling:
    """Return the requests' options as numpy, with rows that emit nothing up to `batch`; the config
    tells EOS."""

    def column(values: list[Any], dtype: Any, fill: Any) -> np.ndarray:
        return np.asarray(values + [fill] * (batch - len(values)), dtype)

    eos = text_config(config).eos_token_id
    ids = (eos,) if isinstance(eos, int) else eos or ()
    fields = {
        "temperature": column([r.temperature for r in requests], np.float32, 0),
        "top_k": column([min(r.top_k, LARGEST) for r in requests], np.int32, 0),
        "top_p": column([r.top_p for r in requests], np.float32, 1),
        "max_new_tokens": column([r.max_new_tokens for r in requests], np.int32, 0),
        "eos": np.asarray(ids or (-1,), np.int32),
        "key_data": column(
            [(0, r.seed) for r in requests], np.uint32, (0, 0)
        ),  # what `jax.random.key` makes of a seed
    }
    return Sampling(**fields)
