"""Read the body of a request: JSON in OpenAI's form becomes `Request`s, or one clear refusal.

Nothing here is fetched from an address. A field that would change the answer and is not supported
is refused by name, unless it has the value that changes nothing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from jaxspec.engine.requests import TOP, Request
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.serve.fields import check_keys, flag, typed, whole_number
from jaxspec.serve.messages import Budget, Limits, read_message
from jaxspec.serve.worker import Lane

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True, False),  # a chat's own are written once, whatever it says
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "ignore_eos": (False,),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # none are shown
    "stop_token_ids": ([],),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "truncate_prompt_tokens": (-1,),
    "use_beam_search": (False,),
}
"""Fields that are not supported, and the values next to null that change nothing."""
SILENT = {
    *("metadata", "service_tier", "store", "user", "safety_identifier", "request_id", "priority"),
    *("parallel_tool_calls", "prompt_cache_key", "cache_salt", "reasoning_effort"),
}
"""Fields that change no answer."""
OF_STREAMS = ("include_usage", "include_obfuscation", "continuous_usage_stats")
"""Fields of `stream_options`. Only the first changes an answer's parts."""
PASSED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "max_soft_tokens"),
)
"""Fields of a `Request` by the same name."""
KNOWN = {
    *("model", "n", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
    *("logit_bias", "min_tokens", "draft", "trace", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice"),
    *PASSED,
}
MOST_STOPS = 16
LONGEST_STOP = 1000
"""Maximum characters of a stop string."""


class NotServed(InputError):
    """Report a model of another name."""


@dataclass(frozen=True)
class Job:
    """Hold what a checked body asks for.

    Attributes:
      requests: A request for each prompt.
      count: Choices of an answer to each prompt; they differ by their seeds.
      most: Maximum new tokens; None for all that there is room for.
      names: Fields of the body that a `Request` calls otherwise, by its names.
      stream: Whether the answer is sent in parts.
      usage: Whether a last part has the numbers of tokens.
      lane: Batch that answers: with drafts or without.
      trace: Whether to say where each token came from.
    """

    requests: tuple[Request, ...]
    count: int
    most: int | None
    names: dict[str, str]
    stream: bool
    usage: bool
    lane: Lane
    trace: bool


def parse(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; InputError for anything else."""
    body = parsed("body", raw)
    if not isinstance(body, dict):
        raise InputError('body: not a JSON object; give one, as {"messages": [...]}')
    return body


def parsed(where: str, text: bytes | str) -> Any:
    """Return a value of JSON; InputError for anything else."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    with shallow(where):
        try:
            text = text.decode() if isinstance(text, bytes) else text
            return json.loads(text, parse_constant=refuse)
        except ValueError as error:
            raise InputError(f"{where}: not JSON ({str(error)[:100]})") from None


@contextmanager
def shallow(where: str) -> Iterator[None]:
    """Raise InputError where JSON has more levels than what reads it."""
    try:
        yield
    except RecursionError:
        raise InputError(f"{where}: JSON of too many levels; give at most some hundred") from None


def chat(body: dict[str, Any], encoder: PromptEncoder, limits: Limits) -> Job:
    """Return what `POST /v1/chat/completions` asks for."""
    _check_fields(body, {"messages", "logprobs", "top_logprobs", "chat_template_kwargs"})
    if not encoder.chats:
        raise InputError(
            "messages: the model has no chat template; ask POST /v1/completions, or start the "
            "server with --chat-template"
        )
    messages = typed(body, "messages", list)
    if not messages:
        raise InputError("messages: none; give one or more")
    if len(messages) > limits.tokens:
        raise InputError(f"messages: {len(messages)} of them; give at most {limits.tokens}")
    budget = Budget(limits)
    turns = [read_message(message, f"messages[{i}]", budget) for i, message in enumerate(messages)]
    top = whole_number(body, "top_logprobs", 0)
    if top > TOP[-1]:
        raise InputError(f"top_logprobs: {top}; give 0 to {TOP[-1]}")
    thinking, max_pixels = _thinking(body, limits), budget.max_pixels()
    request = Request(messages=turns, thinking=thinking, max_pixels=max_pixels)
    if flag(body, "logprobs"):
        return _job(body, [replace(request, logprobs=top)], limits)
    if top:
        raise InputError("top_logprobs: needs logprobs; give logprobs true")
    return _job(body, [request], limits)


def _thinking(body: dict[str, Any], limits: Limits) -> bool | None:
    """Return whether the model thinks, by vLLM's field for variables of the chat template."""
    switches = typed(body, "chat_template_kwargs", dict, {})
    for name in switches.keys() - {"enable_thinking"}:
        raise InputError(f"chat_template_kwargs.{name[:60]}: not supported; leave it out")
    if switches.get("enable_thinking") is None:
        return limits.thinking
    return flag(switches, "enable_thinking")


def completion(body: dict[str, Any], encoder: PromptEncoder, limits: Limits) -> Job:
    """Return what `POST /v1/completions` asks for."""
    _check_fields(body, {"prompt", "logprobs", "add_special_tokens"})
    value: Any = body.get("prompt")
    budget = Budget(limits)
    values = value if isinstance(value, list) and not _is_ids(value) else [value]
    if not values:
        raise InputError("prompt: an empty list; give a string, or a list of them")
    if len(values) > limits.choices:
        raise InputError(f"prompt: {len(values)} prompts; give 1 to {limits.choices}")
    size, begins = len(encoder.tokenizer), flag(body, "add_special_tokens", default=True)
    prompts: list[Request] = []
    for value in values:
        if isinstance(value, str):
            text = budget.text(value, "prompt")
            prompts.append(Request(encoder.completion(text, begins=begins)))
        elif _is_ids(value):
            if not all(0 <= token < size and token != encoder.image_token for token in value):
                raise InputError(f"prompt: a token id outside 0 to {size - 1}, or an image's")
            prompts.append(Request(Prompt(np.asarray(value, np.int32), continued=True)))
        else:
            raise InputError("prompt: give a string, a list of token ids, or a list of these")
    if body.get("logprobs") is not None:
        top = whole_number(body, "logprobs", 0)
        prompts = [replace(prompt, logprobs=top) for prompt in prompts]
    return _job(body, prompts, limits)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(x) is int for x in value)


def _job(body: dict[str, Any], prompts: Sequence[Request], limits: Limits) -> Job:
    """Return the job of these prompts, with the fields that both paths have."""
    if body.get("model") not in (None, limits.model):
        raise NotServed(f"model: {str(body['model'])[:60]!r} is not here; ask for {limits.model!r}")
    count = whole_number(body, "n", 1)
    if not 1 <= count * len(prompts) <= limits.choices:
        raise InputError(f"n: {count * len(prompts)} answers; give 1 to {limits.choices}")
    options: dict[str, Any] = {"temperature": None, "max_soft_tokens": limits.max_soft_tokens}
    options |= {name: body[name] for name in PASSED if body.get(name) is not None}
    if options.get("top_k") == -1:  # vLLM's name for all tokens
        options["top_k"] = 0  # the model's file may set another number
    stop = options.get("stop", [])
    options["stop"] = stop = [stop] if isinstance(stop, str) else stop
    if isinstance(stop, list) and len(stop) > MOST_STOPS:
        raise InputError(f"stop: {len(stop)} strings; give at most {MOST_STOPS}")
    if isinstance(stop, list) and any(len(str(text)) > LONGEST_STOP for text in stop):
        raise InputError(f"stop: a string of over {LONGEST_STOP} characters; give a shorter one")
    if type(seed := options.get("seed")) is int and -(2**63) <= seed < 2**64:
        options["seed"] = seed % 2**32
    options["logit_bias"] = _logit_bias(body)
    form, options["response_format"] = _answer_form(body)
    options["min_new_tokens"] = whole_number(body, "min_tokens", None)
    name, most = _token_limit(body)
    names = {"max_new_tokens": name, "response_format": form}
    stream = flag(body, "stream")
    if body.get("stream_options") is not None and not stream:
        raise InputError("stream_options: the answer is not streamed; leave it out")
    lane: Lane = "drafted" if flag(body, "draft", default=True) else "plain"
    if lane == "plain" and not limits.races:
        raise InputError("draft: false needs a server that was started with --race")
    parts = typed(body, "stream_options", dict, {})
    check_keys({key: value or None for key, value in parts.items()}, OF_STREAMS, "stream_options")
    usage = flag(parts, "include_usage")
    with in_names(names):
        requests = tuple(
            replace(prompt, **{"seed": secrets.randbits(32)} | options) for prompt in prompts
        )
    return Job(requests, count, most, names, stream, usage, lane, flag(body, "trace"))


def _logit_bias(body: dict[str, Any]) -> dict[int, float]:
    """Return the biases by token id; JSON's keys are strings."""
    biases = typed(body, "logit_bias", dict, {})
    if not all(re.fullmatch("[0-9]{1,9}", key) for key in biases):
        raise InputError("logit_bias: give {token id: number}")
    return {int(key): value for key, value in biases.items()}


def _answer_form(body: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the name and the value of the field that gives the answer's form, as OpenAI calls it
    or vLLM.
    """
    kinds = {"json": "json_schema", "regex": "regex", "choice": "choice"}
    outputs = typed(body, "structured_outputs", dict, {})
    check_keys(outputs, (*kinds, "json_object"), "structured_outputs")
    fields = {f"guided_{name}": (name, body.get(f"guided_{name}")) for name in kinds}
    fields |= {f"structured_outputs.{name}": (name, value) for name, value in outputs.items()}
    forms: dict[str, Any] = {}
    if body.get("response_format") is not None:
        forms["response_format"] = body["response_format"]
    for where, (name, value) in fields.items():
        if value is None or value is False:
            continue
        if name == "json_object":
            forms[where] = {"type": name}
            continue
        if name == "json":
            value = {"schema": parsed(where, value) if isinstance(value, str) else value}
        forms[where] = {"type": kinds[name], kinds[name]: value}
    if len(forms) > 1:
        raise InputError(f"{' and '.join(forms)}: give one of them")
    return next(iter(forms.items()), ("response_format", None))


def _token_limit(body: dict[str, Any]) -> tuple[str, int | None]:
    """Return the name and the value of the field that limits new tokens."""
    names = ("max_completion_tokens", "max_tokens")
    counts = {name: whole_number(body, name, 0) for name in names if body.get(name) is not None}
    if len({*counts.values()}) > 1:
        raise InputError("max_tokens: differs from max_completion_tokens; give one of them")
    name, most = next(iter(counts.items()), ("max_tokens", None))
    if most == 0:
        raise InputError(f"{name}: 0; give 1 or more")
    return name, most


@contextmanager
def in_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InputError within name the body's fields, not the engine's."""
    try:
        yield
    except InputError as error:
        message = str(error)
        for engine_field, body_field in names.items():
            message = message.replace(engine_field, body_field)
        raise InputError(message) from error


def _check_fields(body: dict[str, Any], more: set[str]) -> None:
    """Raise InputError for the first field that is unknown, or unsupported and not neutral."""
    uncalled = {"tools"} if body.get("tool_choice") == "none" else set[str]()
    for name, value in body.items():
        if name in KNOWN | more | SILENT | uncalled or value is None:
            continue
        if name not in NEUTRAL:
            raise InputError(f"{name[:60]}: no such field; leave it out")
        is_bool = isinstance(value, bool)  # true is not 1
        if not any(value == x and isinstance(x, bool) == is_bool for x in NEUTRAL[name]):
            raise InputError(f"{name}: not supported; leave it out")
