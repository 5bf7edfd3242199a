"""Define requests and results, and check and encode requests on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from PIL.Image import Image

from jaxspec.data.images import ImageSource, Picture
from jaxspec.data.messages import read_messages
from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.state import DecodeStats
from jaxspec.engine.memory import Sizes
from jaxspec.errors import InputError, check_counts, is_number
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.rows import PromptRow

Made = TypeVar("Made")
Stats = TypeVar("Stats", bound=DecodeStats | CollaborationStats | None)
FinishReason = Literal["stop", "length"]

UNSIZED = Sizes(0, (), 0)
EMPTY = Prompt(np.zeros(0, np.int32))
TOP = (0, 5, 20)
"""Numbers of likeliest tokens to compile for."""
HOTTEST = 1e30
"""Highest temperature that float32 logits can be divided by without underflow."""


@dataclass(frozen=True)
class Request:
    """Ask one question and say how to decode its answer.

    Attributes:
      prompt: Question for the chat template, or token ids from an engine's `encoder`; None with
        `messages`.
      max_new_tokens: Most tokens of the answer.
      temperature: Sampling temperature; 0 decodes greedily.
      top_k: Number of likeliest tokens to sample from; 0: all.
      top_p: Total probability of the likeliest tokens to sample from; 1: all.
      seed: Seed of sampling, 0 to 2**32 - 1.
      logprobs: Number of likeliest tokens, up to 20, to return with the log probability of each new
        token; 0: only those of the new tokens; None: none.
      stop: Strings that end the answer; its text ends before the first one.
      images: Images of a question: file names, PIL images or uint8 arrays [Y, X, 3]. Each replaces
        an `<image>` in the question, or precedes its text.
      messages: Conversation in place of a question, the user's last: {role, content} as in OpenAI's
        and transformers' form, see `jaxspec.data.messages`.
    """

    prompt: Prompt[ImageSource] | str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[str] = ()
    images: Sequence[ImageSource] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.prompt is None and not self.messages:
            raise InputError("prompt: None; give a question, or messages=[...]")
        if self.messages and self.prompt is not None:
            raise InputError("messages: there is a prompt too; give one of them")
        if not isinstance(self.prompt, Prompt | str | None):
            kind = type(self.prompt).__name__
            raise InputError(f"prompt: a {kind}; give a string or engine.encoder.prompt(question)")
        if not isinstance(self.images, list | tuple):
            kind = type(self.images).__name__
            raise InputError(f"images: a {kind}; give a list of images, as images=[page]")
        if self.images and isinstance(self.prompt, Prompt):
            raise InputError("images: the prompt is token ids; give its images to the encoder")
        check_counts(max_new_tokens=self.max_new_tokens)
        if not is_number(self.temperature) or not 0 <= self.temperature <= HOTTEST:
            raise InputError(
                f"temperature: {self.temperature!r}; give 0 (greedy) or more, up to {HOTTEST:g}"
            )
        if not isinstance(self.top_k, Integral) or self.top_k < 0:
            raise InputError(f"top_k: {self.top_k}; give 0 (all tokens) or a whole number")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p: {self.top_p!r}; give more than 0 and at most 1")
        if not isinstance(self.stop, list | tuple) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise InputError(f"stop: {self.stop!r}; give a list of non-empty strings")
        top = self.logprobs
        if top is not None and (not isinstance(top, Integral) or not 0 <= top <= TOP[-1]):
            raise InputError(f"logprobs: {top!r}; give 0 to {TOP[-1]} likeliest tokens, or None")
        if not isinstance(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise InputError(f"seed: {self.seed}; give a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class Result(Generic[Stats]):
    """Hold the answer to one request, with counts and times.

    Attributes:
      text: Answer, without the stop string.
      tokens: New tokens, up to EOS or to the token that completes a stop string.
      finish_reason: "stop" after EOS or a stop string, "length" after the last token that the
        request allows; None while the answer is streamed, and with an `error`.
      stop_string: Stop string that ended the answer; None for any other end.
      logprobs: Log probability of each new token, under the target or the models' combination, at
        temperature 1 and unfiltered; None unless the request has `logprobs`.
      top_logprobs: Likeliest tokens in the place of each new token, with their log probabilities.
      stats: Counts of the request: `DecodeStats`, or `CollaborationStats` of several models; None
        with an `error`.
      prefill_ms: Prefill time of all requests that ran together, without compilation.
      decode_ms: Loop time of all requests that ran together, without compilation.
      batch: Number of requests that ran together, inserted ones included.
      trace: Origin of each new token: its text (`pieces`), its `place` in the block if it was
        drafted (-1: the target wrote it), whether it was each view's likeliest token (`agree`; None
        if the views gave no distribution), the views' `weights`, and `shares`: the least and the
        largest share of the first view, the others in proportion, with which the mixture would
        have drafted it; None without any.
      compile_ms: Compile time, which no other time includes.
      error: Reason why the request got no answer, with `keep_going`; then `text` is empty.
      caption_ms: Captioning time of the images; a caption from disk counts its original time.
    """

    text: str
    tokens: tuple[int, ...]
    stats: Stats
    prefill_ms: float
    decode_ms: float
    batch: int
    trace: dict[str, list[Any]] | None = None
    compile_ms: float = 0.0
    error: str = ""
    caption_ms: float = 0.0
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[dict[int, float], ...] | None = None


@dataclass(frozen=True)
class EncodedRequest(Request):
    """Extend a request by its token ids, images of known size, rows and bucket."""

    prompt: Prompt[Picture] = EMPTY
    name: str = ""
    """Name in error messages, if there are several."""
    rows: tuple[PromptRow, ...] = ()
    """Token rows of the prompt, one for each form."""
    sizes: Sizes = UNSIZED
    """Bucket."""
    caption_ms: float = 0.0


def encode(encoder: PromptEncoder, requests: Sequence[Request | str]) -> list[EncodedRequest]:
    """Encode requests or questions. Images are decoded later, batch by batch."""
    encoded = []
    for index, request in enumerate(requests):
        name = f"request {index}" if len(requests) > 1 else ""
        prompt = getattr(request, "prompt", None)
        if isinstance(prompt, Prompt) and prompt.sample:
            name = f"sample {prompt.sample!r}, turn {prompt.turn}"
        with _named(name):
            if not isinstance(request, Request | str):
                kind = type(request).__name__
                raise InputError(f"requests: a {kind}; give a Request, or a question as a string")
            request = Request(request) if isinstance(request, str) else request
            prompt = request.prompt
            if not isinstance(prompt, Prompt):
                prompt = encoder.prompt(*contents(request))
            values = {f.name: getattr(request, f.name) for f in fields(Request)}
            values |= {
                "prompt": replace(prompt, images=tuple(map(Picture.of, prompt.images))),
                "images": (),
                "messages": (),
            }
            encoded.append(EncodedRequest(**values, name=name))
    return encoded


def contents(request: Request) -> tuple[str | list[Message], Sequence[ImageSource]]:
    """Return a request's question and its images, or its messages with their images."""
    if isinstance(request.prompt, str):
        return request.prompt, request.images
    return read_messages(request.messages, request.images), ()


def each(
    work: Callable[..., Made], requests: Sequence[EncodedRequest], *columns: Sequence[Any]
) -> list[Made]:
    """Map `work` over the requests and other sequences; an InputError names the request."""
    outputs = []
    for request, *arguments in zip(requests, *columns, strict=True):
        with _named(request.name):
            outputs.append(work(request, *arguments))
    return outputs


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the name before the text of an InputError."""
    try:
        yield
    except InputError as error:
        if not name:
            raise
        raise InputError(f"{name}: {error}") from error


def decoded(request: EncodedRequest) -> EncodedRequest:
    """Return the request with its images as pixels; InputError for one that cannot be read."""
    images = tuple(Picture.of(picture.rgb()) for picture in request.prompt.images)
    return replace(request, prompt=replace(request.prompt, images=images))


def decoded_images(requests: Sequence[EncodedRequest], spare: int) -> list[list[Image]]:
    """Return each request's images as RGB, then `spare` empty lists."""
    return (
        each(lambda request: [picture.rgb() for picture in request.prompt.images], requests)
        + [[]] * spare
    )
