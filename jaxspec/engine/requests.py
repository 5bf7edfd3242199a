"""Define requests and results, and check and encode requests on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
from PIL.Image import Image

from jaxspec.checkpoints.generation import SAMPLED
from jaxspec.checkpoints.processors import QWEN_PIXELS
from jaxspec.data.images import ImageSource, Picture
from jaxspec.data.messages import read_messages
from jaxspec.decoding import grammars, settings
from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.grammars import Grammar
from jaxspec.decoding.settings import HOTTEST, Settings, count_within, is_count, within
from jaxspec.decoding.state import DecodeStats
from jaxspec.engine.memory import Sizes
from jaxspec.errors import InputError, check_counts, check_seed, located
from jaxspec.models.lvlms.gemma4 import SOFT_TOKENS
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.rows import PromptRow

Made = TypeVar("Made")
Stats = TypeVar("Stats", bound=DecodeStats | CollaborationStats | None)
FinishReason = Literal["stop", "length"]

UNSIZED = Sizes(0, (), 0)
EMPTY = Prompt(np.zeros(0, np.int32))
TOP = (0, 5, 20)
"""Numbers of likeliest tokens to compile for."""

RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "temperature": (within(0, HOTTEST), f"0 (greedy) or more, up to {HOTTEST:g}"),
    "top_k": (is_count, "0 (all tokens) or a whole number"),
    "top_p": (lambda value: within(0, 1)(value) and value != 0, "more than 0 and at most 1"),
    "logprobs": (count_within(0, TOP[-1]), f"0 to {TOP[-1]} likeliest tokens"),
    "max_pixels": (count_within(1, QWEN_PIXELS), f"1 to {QWEN_PIXELS}, or leave it out"),
    "max_soft_tokens": (
        lambda value: type(value) is int and value in SOFT_TOKENS,
        f"one of {', '.join(map(str, SOFT_TOKENS))}, or leave it out",
    ),
    "thinking": (lambda value: isinstance(value, bool), "true or false, or leave it out"),
    "response_format": (grammars.is_form, grammars.ADVICE),
    **settings.RULES,
}
"""Field -> whether a value is valid, and the advice for another value."""


@dataclass(frozen=True)
class Request:
    """Ask one question and say how to decode its answer.

    Attributes:
      prompt: Question for the chat template, or token ids from an engine's `encoder`; None with
        `messages`.
      max_new_tokens: Maximum tokens of the answer.
      temperature: Sampling temperature; 0 decodes greedily; None samples at the one of the model's
        file, or at 1.
      top_k: Number of likeliest tokens to sample from; 0: all.
      top_p: Total probability of the likeliest tokens to sample from; 1: all.
      seed: Seed of sampling, 0 to 2**32 - 1.
      stop: Strings that end the answer; its text ends before the first one. Neither reasoning nor
        blank text before the answer's first letter holds one.
      images: Images of a question: file names, PIL images or uint8 arrays [Y, X, 3]. Each replaces
        an `<image>` in the question, or precedes its text.
      messages: Conversation in place of a question, the user's last: {role, content} as in OpenAI's
        and transformers' form, see `jaxspec.data.messages`.
      logprobs: Number of likeliest tokens, up to 20, to return with the log probability of each new
        token; 0: only those of the new tokens; None: none.
      max_pixels: Maximum pixels of each image after resizing, for Qwen2.5-VL and Qwen3-VL; None: as
        their image processor is set.
      max_soft_tokens: Maximum tokens of each image, for Gemma 4: 70, 140, 280, 560 or 1120; None:
        as its image processor is set.
      thinking: Whether the model thinks before it answers, where its chat template has a switch for
        that; None: as the template does by itself.
      min_p: Minimum probability to sample, in units of the likeliest token's; 0: any.
      repetition_penalty: Divisor of the positive scores, and factor of the negative ones, of tokens
        that are in the prompt or the answer; 1: none.
      presence_penalty: Amount by which a token's score falls if it is in the answer, as in vLLM.
      frequency_penalty: Amount by which it falls for each time that the token is in the answer.
      no_repeat_ngram_size: Size of the n-grams of prompt and answer that are not written again; 0:
        none.
      min_new_tokens: Number of tokens before which EOS does not end the answer.
      suppress_tokens: Tokens that are never written.
      begin_suppress_tokens: Tokens that do not begin the answer.
      bad_words: Texts, or lists of token ids, that are never written.
      logit_bias: {token: amount to add to its score}.
      response_format: Form that the answer keeps: {"type": "json_object"}, {"type": "json_schema",
        "json_schema": {"schema": ...}}, {"type": "choice", "choice": ["yes", "no"]} or {"type":
        "regex", "regex": ...}. An answer that ends by "length" is the beginning of one.

    The model's generation_config.json sets what is None here (`EngineConfig.generation_config`);
    temperature, top_k, top_p and min_p only for requests that sample.
    """

    prompt: Prompt[ImageSource] | str | None = None
    max_new_tokens: int = 128
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: Sequence[str] = ()
    images: Sequence[ImageSource] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    logprobs: int | None = None
    max_pixels: int | None = None
    max_soft_tokens: int | None = None
    thinking: bool | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    suppress_tokens: Sequence[int] | None = None
    begin_suppress_tokens: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    logit_bias: Mapping[int, float] | None = None
    response_format: Mapping[str, Any] | None = None

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
        if self.thinking is not None and isinstance(self.prompt, Prompt):
            raise InputError("thinking: the prompt is token ids; leave it out")
        check_counts(max_new_tokens=self.max_new_tokens)
        for name, (valid, mend) in RULES.items():
            value = getattr(self, name)
            if value is not None and not valid(value):
                raise InputError(f"{name}: {value!r:.60}; give {mend}")
        if not isinstance(self.stop, list | tuple) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            raise InputError(f"stop: {self.stop!r:.60}; give a list of non-empty strings")
        check_seed(self.seed)

    @property
    def image_limits(self) -> dict[str, int]:
        """Return the fields that bound each image, where they are set."""
        limits = {"max_pixels": self.max_pixels, "max_soft_tokens": self.max_soft_tokens}
        return {name: most for name, most in limits.items() if most is not None}


class Use(NamedTuple):
    """Count what a plan did for an answer."""

    blocks: int = 0
    tokens: int = 0
    ms: float = 0.0


@dataclass(frozen=True)
class Result(Generic[Stats]):
    """Hold the answer to one request, with counts and times.

    Attributes:
      text: Answer, without its reasoning and the stop string.
      reasoning: What the model thinks before it answers; "" without any.
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
      trace: Origin of each new token: its text (`pieces`), whether it is `reasoning`, its `place`
        in the block if it was drafted (-1: the target wrote it), whether it was each view's
        likeliest token (`agree`; None if the views gave no distribution), the views' `weights`, and
        `shares`: the least and the largest share of the first view, the others in proportion, with
        which the mixture would have drafted it; None without any.
      compile_ms: Compile time, which no other time includes.
      error: Reason why the request got no answer, with `keep_going`; then `text` is empty.
      caption_ms: Captioning time of the images; a caption from disk counts its original time.
      plans: Blocks, tokens and milliseconds of each plan that wrote it, by name, if the engine
        chose among plans (`gamma` "auto").
      cached: Number of prompt tokens that a server has not read again.
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
    reasoning: str = ""
    plans: Mapping[str, Use] = field(default_factory=dict)
    cached: int = 0


@dataclass(frozen=True)
class EncodedRequest(Request):
    """Extend a request by its token ids, images of known size, rows and bucket."""

    prompt: Prompt[Picture] = EMPTY
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    settings: Settings = field(default_factory=Settings)
    """Settings of scores, with the values of the model's file."""
    name: str = ""
    """Name in error messages, if there are several."""
    rows: tuple[PromptRow, ...] = ()
    """Token rows of the prompt, one for each form."""
    sizes: Sizes = UNSIZED
    """Bucket."""
    caption_ms: float = 0.0
    owner: str = ""
    """Whose prompts it may share a beginning with."""


def encode(
    encoder: PromptEncoder,
    requests: Sequence[Request | str],
    defaults: Mapping[str, Any] | None = None,
) -> list[EncodedRequest]:
    """Encode requests or questions. Images are decoded later, batch by batch.

    defaults: Values of the model's file for fields that are None.
    """
    encoded = []
    for index, request in enumerate(requests):
        name = f"request {index}" if len(requests) > 1 else ""
        prompt = getattr(request, "prompt", None)
        if isinstance(prompt, Prompt) and prompt.sample:
            name = f"sample {prompt.sample!r}, turn {prompt.turn}"
        with located(name):
            if not isinstance(request, Request | str):
                kind = type(request).__name__
                raise InputError(f"requests: a {kind}; give a Request, or a question as a string")
            if isinstance(request, EncodedRequest):
                encoded.append(request)
                continue
            request = Request(request) if isinstance(request, str) else request
            prompt = prompt_of(request, encoder)
            values = vars(request) | _resolved(request, prompt, encoder, defaults or {})
            values |= {"images": (), "messages": (), "thinking": None, "name": name}
            values["prompt"] = replace(prompt, images=tuple(map(Picture.of, prompt.images)))
            encoded.append(EncodedRequest(**values))
    return encoded


def nth_seed(seed: int, n: int) -> int:
    """Add a request's number to the seed of several requests, in the 32 bits of a seed."""
    return (seed + n) % 2**32


def prompt_of(
    request: Request,
    encoder: PromptEncoder,
    before: tuple[Prompt[ImageSource], Sequence[int]] | None = None,
) -> Prompt[ImageSource]:
    """Return the prompt of a request's question or messages, or the one that it holds.

    before: The prompt, and the tokens of its answer, that the question follows.
    """
    if isinstance(request.prompt, Prompt):
        return request.prompt
    if request.thinking is not None:
        encoder = replace(encoder, thinking=request.thinking)
    question, images = request.prompt, request.images
    if question is None:
        question, images = read_messages(request.messages, request.images), ()
    if before is None:
        return encoder.prompt(question, images)
    return encoder.follow_up(*before, question, images)


def _resolved(
    request: Request, prompt: Prompt, encoder: PromptEncoder, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of an encoded request that the model's file may set.

    Defaults of sampling hold for requests that sample.
    """
    samples = request.temperature != 0
    values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "bad_words": ()}
    values |= {name: value for name, value in defaults.items() if samples or name not in SAMPLED}
    values |= {name: value for name, value in vars(request).items() if value is not None}
    forms = (tuple(form) for word in values["bad_words"] for form in _token_forms(encoder, word))
    values["bad_words"] = tuple(dict.fromkeys(forms))
    values["min_p"] = values.get("min_p", 0.0) if samples else 0.0
    if form := request.response_format:
        text = form["type"] == "text"
        values["response_format"] = None if text else Grammar(form, encoder, prompt)
    settings = {f.name: values[f.name] for f in fields(Settings) if f.name in values}
    sampling = {name: values[name] for name in ("temperature", "top_k", "top_p")}
    return {**sampling, "settings": Settings(**settings)}


def _token_forms(encoder: PromptEncoder, word: str | Sequence[int]) -> list[Sequence[int]]:
    """Return the token ids of a text at the start of a word and within one; of blank text, as it
    follows a letter, because some tokenisers begin every text with a space.
    """
    if not isinstance(word, str):
        return [word]
    if text := word.lstrip():
        forms: list[Sequence[int]] = [encoder.ids(text), encoder.ids(f" {text}")]
    else:
        forms = [encoder.ids(f"a{word}")[len(encoder.ids("a")) :]]
    if not all(forms):
        raise InputError(f"bad_words: {word!r:.60} has no token; leave it out")
    return forms


def each(
    work: Callable[..., Made], requests: Sequence[EncodedRequest], *columns: Sequence[Any]
) -> list[Made]:
    """Map `work` over the requests and other sequences; an InputError names the request."""
    outputs = []
    for request, *arguments in zip(requests, *columns, strict=True):
        with located(request.name):
            outputs.append(work(request, *arguments))
    return outputs


def decoded(request: EncodedRequest) -> EncodedRequest:
    """Return the request with its images as pixels; InputError for one that cannot be read."""
    images = tuple(Picture.of(picture.rgb()) for picture in request.prompt.images)
    return replace(request, prompt=replace(request.prompt, images=images))


def decoded_images(requests: Sequence[EncodedRequest]) -> list[list[Image]]:
    """Return each request's images as RGB."""
    return each(lambda request: [picture.rgb() for picture in request.prompt.images], requests)
