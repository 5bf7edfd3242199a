"""Define what commands share: a prompt's options, its answer on standard output, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from PIL.Image import Image

from jaxspec.config import LvlmConfig, ModelConfig, text_config
from jaxspec.data.images import ImageSource, Picture, load_image
from jaxspec.data.messages import image_source, read_messages
from jaxspec.decoding.sources.lookup import LOOKUP
from jaxspec.engine.config import NEW_BUCKETS, GenerationConfig
from jaxspec.engine.drafts import HEAD
from jaxspec.engine.engine import Engine, Request, Result
from jaxspec.engine.requests import EMPTY
from jaxspec.errors import InputError, located, reading
from jaxspec.models.int8 import Weights
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.placeholders import check_text, place_images
from jaxspec.prompts.rows import bucket
from jaxspec.prompts.views import VIEWS
from jaxspec.runtime import clear, say


def progress(activity: str) -> None:
    """Show an activity on a terminal, which the next output overwrites.

    A pipe or file does not get it, so that a failure leaves one line there.
    """
    if sys.stderr.isatty():
        print(f"\r\033[K{activity} ...", end="", file=sys.stderr, flush=True)


def show(answer: Iterator[Result]) -> Result:
    """Print an answer as it is written, without its reasoning; return the whole."""
    printed, result = 0, None
    for result in answer:
        if not printed:
            clear()
        if result.reasoning and not result.text and result.finish_reason is None:
            progress("thinking")
        print(end=result.text[printed:], flush=True)
        printed = len(result.text)
    print()
    assert result is not None
    return result


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Choose how models are loaded."""

    chat_template: Path | None = None
    """File with the chat template to use, in place of the model's own."""
    thinking: Literal["on", "off"] | None = None
    """Let the model think before it answers, or not, where its chat template has a switch for that
    (Gemma 4, Qwen3); by default as the template does by itself."""
    tiles: bool = True
    """Let LLaVA-NeXT read one tile an image, as in TABED's released code."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type that models compute in; by default float32 on CPUs, else that of their files."""
    target_weights: Weights | None = None
    """int8 holds the layers of the target, or of all models that decode together, in half the bytes
    of 16 bits; answers are then the quantised model's own."""

    @cached_property
    def template(self) -> str | None:
        """Return the chat template that replaces the model's own; InputError for an unread file."""
        if self.chat_template is None:
            return None
        with reading(f"--chat-template: {self.chat_template}", "give a file with a jinja template"):
            return self.chat_template.read_text(encoding="utf-8")

    @property
    def thinks(self) -> bool | None:
        """Return `Request.thinking`."""
        return None if self.thinking is None else self.thinking == "on"

    def encoder(self, engine: Engine) -> PromptEncoder:
        """Return the engine's encoder of prompts, which from now on has the given template."""
        if self.template is not None:
            engine.encoder.tokenizer.chat_template = self.template
        return replace(engine.encoder, thinking=self.thinks)

    @property
    def computes_in(self) -> jnp.dtype | None:
        """Return the data type of all models; None leaves the choice to `LoadedModel.load`."""
        return self.dtype and jnp.dtype(self.dtype)


@dataclass(frozen=True)
class Question:
    """Ask about images, or in text only."""

    prompt: str | None = None
    """The question. Each <image> in it marks the place of an image; without marks, images come
    first. A text model reads <image> as it is written."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """An image file. Repeat the option for several images, in order."""
    system: str | None = None
    """System prompt before the conversation."""
    messages: Path | None = None
    """In place of --prompt, a JSON file with a conversation: a list of {role, content}, the user's
    last, as OpenAI's and transformers' chats have it. Its image files are relative to it."""
    max_pixels: int | None = None
    """Maximum pixels of each image after resizing, for Qwen2.5-VL and Qwen3-VL: fewer make fewer
    image tokens. By default as their image processor is set."""
    max_soft_tokens: int | None = None
    """Maximum tokens of each image, for Gemma 4: 70, 140, 280, 560 or 1120. By default as its image
    processor is set, to 280."""
    no_chat_template: bool = False
    """Give the model the bare prompt: for base models."""

    def check(self, models: Loading) -> None:
        """Raise InputError for options that contradict each other."""
        if (self.prompt is None) == (self.messages is None):
            reason = "neither is given" if self.prompt is None else "--messages is given too"
            raise InputError(f"--prompt: {reason}; give --prompt TEXT or --messages FILE")
        if self.no_chat_template and (self.messages or self.system):
            option = "--messages" if self.messages else "--system"
            raise InputError(f"{option}: --no-chat-template has no roles; give one of them")
        if self.prompt is not None and self.pictures:
            place_images(self.prompt, len(self.pictures))
        elif self.prompt is not None:
            check_text(self.prompt)  # a text model reads <image> as it is written
        elif self.conversation[0].role == "system" and self.system:
            raise InputError(f"--system: {self.messages} has a system prompt; leave one out")
        check_text(self.system or "", "--system")
        options = {"--chat-template": models.template, "--thinking": models.thinking}
        for option, value in options.items():
            if value is not None and self.no_chat_template:
                raise InputError(f"{option}: --no-chat-template leaves it out; give one of them")

    @cached_property
    def conversation(self) -> list[Message[ImageSource]]:
        """Return the messages of the file; InputError for a file without any."""
        assert self.messages is not None
        mend = 'give [{"role": "user", "content": "..."}]'
        with reading(f"--messages: {self.messages}", mend):
            values = json.loads(self.messages.read_text(encoding="utf-8"))
        if isinstance(values, dict):  # the body of a request to OpenAI's interface
            values = values.get("messages")
        with located(self.messages):
            folder = self.messages.parent
            return read_messages(
                values, self.pictures, lambda value: Picture.of(image_source(value, folder))
            )

    @cached_property
    def pictures(self) -> list[Image]:
        """Return the images; raise InputError for a file that is no image."""
        return [load_image(path) for path in self.image]


@dataclass(frozen=True)
class Drawing:
    """Draw tokens at random; by default the likeliest is taken."""

    sample: bool = False
    """Sample as the model's generation_config.json says, where --temperature, --top-k, --top-p or
    --min-p is not given."""
    temperature: float | None = None
    """0, the default, decodes greedily; larger values sample."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; 0: from all."""
    top_p: float | None = None
    """Sample from the likeliest tokens whose probabilities sum to this."""
    min_p: float | None = None
    """Sample from tokens at least this many times as likely as the likeliest."""
    seed: int = 0
    """Seed of sampling."""


@dataclass(frozen=True)
class Scores:
    """Change the scores of tokens; by default as the model's generation_config.json says."""

    generation_config: GenerationConfig = "auto"
    """ignore leaves that file out, except for its EOS."""
    repetition_penalty: float | None = None
    """Divide the positive scores of tokens that are in prompt or answer by this, and multiply the
    negative ones; 1: no penalty."""
    presence_penalty: float = 0.0
    """Lower the score of tokens that are in the answer by this, as in OpenAI's interface."""
    frequency_penalty: float = 0.0
    """Lower a token's score by this for each time that the token is in the answer."""
    no_repeat_ngram_size: int | None = None
    """Write no n-gram of this size twice, or again after the prompt; 0: any."""
    min_new_tokens: int | None = None
    """Do not end the answer before this many tokens."""
    bad_words: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Never write this text. Repeat the option for several texts."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a `Request`."""
        values = {name: value for name, value in vars(self).items() if name != "generation_config"}
        return values | {"bad_words": self.bad_words or None}


@dataclass(frozen=True)
class Output:
    """Limit the answer, and choose the form in which it is printed."""

    max_new_tokens: int = 128
    """Stop the answer after this many tokens."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End the answer, not its reasoning, before this string. Repeat the option for several."""
    stream: bool = True
    """Print the answer when it is complete; by default a terminal shows it as it is written."""
    json: bool = False
    """Print one JSON object with text, reasoning, tokens, finish_reason and stats instead of the
    text."""


@dataclass(frozen=True)
class Ask:
    """Hold the options of a prompt and its answer, in groups."""

    question: Question
    sampling: Drawing
    scores: Scores
    output: Output

    def request(self, models: Loading) -> Request:
        """Return the checked request; `answer` fills in the prompt once there is a tokeniser."""
        self.question.check(models)
        bucket(self.output.max_new_tokens, NEW_BUCKETS, "--max-new-tokens")
        sampling = {name: value for name, value in vars(self.sampling).items() if name != "sample"}
        if self.sampling.temperature is None and not self.sampling.sample:
            sampling["temperature"] = 0.0
        return Request(
            EMPTY,
            self.output.max_new_tokens,
            stop=self.output.stop,
            max_pixels=self.question.max_pixels,
            max_soft_tokens=self.question.max_soft_tokens,
            **sampling,
            **self.scores.fields(),
        )

    def check_target(self, *models: ModelConfig) -> None:
        """Raise InputError if the answer fills a model's context, or no model reads the images.

        models: The target, or the models that write together.
        """
        most = self.output.max_new_tokens
        for number, config in enumerate(models, start=1):
            context = text_config(config).context
            if most >= context:
                whose = "the target" if len(models) == 1 else f"model {number}"
                raise InputError(
                    f"--max-new-tokens: {most}, and {whose}'s context has {context} tokens for "
                    "prompt and answer; give fewer"
                )
        question = self.question
        messages = [] if question.messages is None else question.conversation
        shows = question.image or any(message.images for message in messages)
        if shows and not any(isinstance(config, LvlmConfig) for config in models):
            which = "the target is a text model" if len(models) == 1 else "all are text models"
            raise InputError(f"images: {which}; give no image")


SAMPLING = ("sample", "top_k", "top_p", "min_p", "seed")
"""Options that only sampling reads."""


def answer(
    ask: Ask,
    models: Loading,
    engine: Engine,
    request: Request,
    describe: Callable[[Result], tuple[dict[str, Any], str]],
    *loaded: str,
) -> None:
    """Print the loaded models, the memory estimate, the answer and its stats.

    Args:
      describe: Returns the program's own stats, and their summary for the last line.
      loaded: Lines about the loaded models.
    """
    question, output = ask.question, ask.output
    encoder = replace(models.encoder(engine), system=question.system or "")
    if question.prompt is None:
        prompt = encoder.prompt(question.conversation)
    elif question.no_chat_template:
        prompt = encoder.completion(question.prompt, question.pictures)
    else:
        prompt = encoder.prompt(question.prompt, question.pictures)
    (encoded,) = engine.batcher.read([replace(request, prompt=prompt)])
    memory = engine.memory_report(encoded)
    for line in (*loaded, memory):
        say(line)
    idle = [name for name in SAMPLING if getattr(ask.sampling, name) != getattr(Drawing, name)]
    if idle and encoded.temperature == 0:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        say(f"{options}: without effect at --temperature 0, which takes the likeliest token")
    progress("compiling and decoding")
    if not sys.stderr.isatty():
        say("compiling and decoding ...")
    streams = output.stream and not output.json and sys.stdout.isatty()
    result = show(engine.stream(encoded)) if streams else engine.generate(encoded)
    pace = 1e3 * result.stats.emitted / result.decode_ms
    stats, summary = describe(result)
    compiled = f"{result.compile_ms / 1e3:.1f} s compiling"
    say(f"done: {len(result.tokens)} tokens, {summary}, {pace:.2f} tokens/s, {compiled}")
    stats = stats | {
        "caption_ms": result.caption_ms,
        "compile_ms": result.compile_ms,
        "prefill_ms": result.prefill_ms,
        "decode_tokens_per_second": pace,
        "temperature": encoded.temperature,
        "dtype": str(jax.tree.leaves(engine.assembly.lead.params)[0].dtype),
        "target_weights": models.target_weights,
        "device": jax.devices()[0].device_kind,
        "batch": result.batch,
        "seed": encoded.seed,
    }
    if output.json:
        names = "text", "reasoning", "tokens", "finish_reason", "stop_string"
        print(json.dumps({name: getattr(result, name) for name in names} | {"stats": stats}))
    elif not streams:
        print(result.text)


def refuse_set(options: Any, names: Sequence[str], why: str) -> None:
    """Raise InputError for the first of these options that has another value than its default."""
    changed = [name for name in names if getattr(options, name) != getattr(type(options), name)]
    if changed:
        raise InputError(f"--{changed[0].replace('_', '-')}: {why}")


def view_names(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list of views, in the spelling of `VIEWS`.

    Spaces and the case of letters do not matter: " m,t-SLOTS" gives M and T-slots.
    """
    spelt = {name.lower(): name for name in (*VIEWS, HEAD, LOOKUP)}
    names = (name.strip().lower() for name in text.split(","))
    return tuple(spelt.get(name, name.upper()) for name in names)  # P36 is in no list


def numbers(option: str, text: str, kind: type = float) -> tuple[Any, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        whole = "whole " if kind is int else ""
        raise InputError(f"{option}: {text!r} is not a list of {whole}numbers, as 1,2") from None
