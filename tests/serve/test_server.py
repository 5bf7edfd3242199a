"""Clients see a server that is exact whatever else runs, in OpenAI's form, within its limits."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import math
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from starlette.testclient import TestClient

from jaxspec.decoding.steps import run_prefill
from jaxspec.engine import compile_cache
from jaxspec.engine.engine import Engine, EngineConfig, Request, Result
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.serve import app, connections
from jaxspec.serve.answers import counts
from jaxspec.serve.examples import examples
from jaxspec.serve.worker import Full, Late, Ticket, Unready, Worker, next_stride
from tests import tiny
from tests.serve.conftest import BODY, MODEL, NEW, QUEUE, SIZES, Served
from tests.serve.mutations import mutated

PAGES = [Image.fromarray(tiny.page(i, 25, 31)) for i in range(4)]
QUESTIONS = ("Hi", "What is it?", "Tell me all that you see in this picture, and why.")


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"


def shown(*urls: str) -> dict[str, Any]:
    """Return the messages of a body that shows images."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}]}


def body_of(i: int) -> dict[str, Any]:
    """Return a request of kind i: with or without an image, in one turn or three, greedy or drawn,
    with a stop string, of its own length.
    """
    rng = np.random.default_rng(i)
    text = QUESTIONS[i % 3]
    content: Any = text
    if i % 2:
        image = {"type": "image_url", "image_url": {"url": data_url(PAGES[i % 4])}}
        content = [image, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    if i % 5 == 0:
        messages += [{"role": "assistant", "content": "So."}, {"role": "user", "content": "Why?"}]
    return {
        "messages": messages,
        "max_tokens": int(rng.integers(1, NEW + 1)),
        "temperature": float(i % 3 == 1),
        "seed": i,
        "stop": ["e"] if i % 7 == 3 else None,
        **({"presence_penalty": 1.5, "logit_bias": {"40": 2.0}} if i % 12 == 6 else {}),
    }


def alone(served: Served, body: dict[str, Any]) -> Any:
    """Return what `Engine.generate` answers to the request alone."""
    options = {name: body[name] for name in ("temperature", "seed")}
    options["presence_penalty"] = body.get("presence_penalty", 0.0)
    options["logit_bias"] = {int(key): x for key, x in body.get("logit_bias", {}).items()}
    request = Request(
        messages=body["messages"],
        max_new_tokens=body["max_tokens"],
        stop=body["stop"] or (),
        **options,
    )
    return served.alone.generate(request)


def worker_of(served: Served, *more: Any, **options: Any) -> Worker:
    """Return another worker of the engine, which compiles nothing that it does not need."""
    return Worker(served.engine, examples(served.engine, *SIZES), *more, **options)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def ticket(request: Any, loop: Any, kind: type[Ticket] = Ticket, **lane: Any) -> Any:
    return kind(request, time.monotonic() + 300, asyncio.Event(), loop, **lane)


def idle(served: Served) -> None:
    """Wait until no request is open or has a row; a row is freed within a block."""
    for _ in range(600):
        if not (served.server.open or served.worker.tickets or served.worker.waiting):
            return
        threading.Event().wait(0.05)
    raise AssertionError("a row is stuck")


def test_answers_are_as_if_alone_whatever_runs_beside(served: Served) -> None:
    """64 mixed requests, 16 at once, are answered as if alone and compile no program, though one in
    eight is given up after its first part.
    """
    client, programs = served.client, len(compile_cache.EXECUTABLES)

    def ask(i: int) -> tuple[str | None, str, int]:
        body = body_of(i)
        if i % 2:
            whole = client.chat.completions.create(model=MODEL, **body)
            (choice,) = whole.choices
            return choice.message.content, choice.finish_reason, whole.usage.completion_tokens
        usage = {"include_usage": True}
        stream = client.chat.completions.create(
            model=MODEL, stream=True, stream_options=usage, **body
        )
        text, reason, count = "", "", 0
        for chunk in stream:
            if i % 8 == 0:
                stream.close()
                return None, "", 0
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason or reason
            count = chunk.usage.completion_tokens if chunk.usage else count
        return text, reason, count

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(64)))
    idle(served)
    assert len(compile_cache.EXECUTABLES) == programs
    for i, (text, reason, count) in enumerate(answers):
        if text is None:
            continue
        result = alone(served, body_of(i))
        expected = (result.text, result.finish_reason, len(result.tokens))
        assert (text, reason, count) == expected, i


def test_drafts_change_nothing_and_say_where_tokens_came_from(served: Served) -> None:
    body = body_of(3) | {"stop": None, "temperature": 0.0, "max_tokens": NEW}
    runs = []
    for draft in (True, False):
        extra = {"draft": draft, "trace": True}
        answer = served.client.chat.completions.create(model=MODEL, extra_body=extra, **body)
        runs.append(answer.choices[0].model_extra["jaxspec"])
    drafted, plain = runs
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["passes"] < plain["passes"]
    assert drafted["prompt"] == answer.usage.prompt_tokens
    assert len(drafted["pieces"]) == len(drafted["place"]) == len(drafted["tokens"])
    assert any(place >= 0 for place in drafted["place"])


def test_the_openai_client_is_answered(served: Served) -> None:
    client = served.client
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    body: Any = body_of(4) | {"n": 6, "max_tokens": 8}  # of them two have a row at once
    answer = client.chat.completions.create(model=MODEL, **body)
    texts = [alone(served, body | {"seed": 4 + i}).text for i in range(6)]
    assert [choice.message.content for choice in answer.choices] == texts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

    body |= {"n": 1, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(model=MODEL, **body).choices
    tokens = choice.logprobs.content
    special = served.engine.encoder.tokenizer.all_special_tokens
    pieces = [token.token for token in tokens if token.token not in special]
    assert "".join(pieces).strip() == choice.message.content
    assert all(token.top_logprobs[0].logprob >= token.logprob for token in tokens)
    (request,) = [Request(messages=body["messages"], max_new_tokens=8)]
    scores = served.alone.logprobs(request, served.alone.generate(request).tokens)
    np.testing.assert_allclose([token.logprob for token in tokens], scores, atol=1e-4)

    text = client.completions.create(model=MODEL, prompt="Once", max_tokens=5, temperature=0)
    prompt = served.engine.encoder.completion("Once")
    assert text.choices[0].text == served.alone.generate(Request(prompt, 5)).text
    parts = client.completions.create(
        model=MODEL, prompt=["Once", "Hi"], max_tokens=5, temperature=0, stream=True
    )
    texts = {0: "", 1: ""}
    for part in parts:
        texts[part.choices[0].index] += part.choices[0].text
    assert texts[0] == text.choices[0].text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"best_of": 2}, "best_of: not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias: give"),
        ({"tools": [{"type": "function"}]}, "tools: not supported"),
        ({"nonsense": 1}, "nonsense: no such field"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x: not supported"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x: not supported"),
        ({"chat_template_kwargs": {"enable_thinking": 1}}, "enable_thinking: give true or false"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "thinking: the chat template has no"),
        ({"\ud800": 1}, r"\ud800: no such field"),
        ({"temperature": -1}, "temperature: -1"),
        ({"top_p": True}, "top_p: True"),
        ({"seed": True}, "seed: True"),
        ({"max_tokens": 0}, "max_tokens: 0"),
        ({"max_completion_tokens": 0, "max_tokens": 0}, "max_completion_tokens: 0"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: 21"),
        ({"n": 1000}, "n: 1000 answers"),
        ({"stop": ["x", "x" * 1001]}, "stop: a string of over 1000 characters"),
        ({"messages": []}, "messages: none"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a character"),
        # images are read from nowhere else
        (shown("https://127.0.0.1/photo.png"), "no address is fetched"),
        (shown("file:///etc/passwd"), "no address is fetched"),
        (shown("data:image/png;base64,!!"), "not base64"),
        (shown("data:image/png;base64,aGk="), "not one of the formats"),
        (shown("data:image/png;base64"), "no data URL"),
        (shown("Data:;base64,\ud800"), "not base64"),
        (shown(data_url(Image.new("L", (3000, 3000)))), "over 100000 pixels"),
    ],
)
def test_a_refusal_names_the_field(served: Served, change: dict[str, Any], words: str) -> None:
    status, answer = post(served, body_of(0) | change)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert words in answer["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {str(token): 1 for token in range(65)}),
        ("seed", "x\n" * 50_000),
        ("stop", {"x": "y\n" * 50_000}),
        ("messages", [{"role": "user", "content": ""}] * 256),
        ("messages", [{"role": "user", "content": ""}] * 5000),
    ],
)
def test_a_refusal_is_a_short_line_with_its_param(served: Served, name: str, value: Any) -> None:
    _, answer = post(served, body_of(0) | {name: value})
    assert answer["error"]["param"] == name
    assert len(answer["error"]["message"]) < 200
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize("name", ["cache_salt", "guided_json", "seed", "stop", "suffix"])
def test_json_of_many_levels_is_refused_wherever_it_is(served: Served, name: str) -> None:
    """JSON of many levels is answered or refused with a status wherever it is, also by a reader
    that needs more of Python's stack than the reader of JSON.
    """
    for levels in range(940, 1020):
        value = b'{"a":' * levels + b"1" + b"}" * levels
        body = b'{"prompt": "Hi", "max_tokens": 1, "%s": %s}' % (name.encode(), value)
        assert post(served, body, path="completions")[0] in (200, 400), levels


@pytest.mark.parametrize(
    ("letters", "words"),
    [(300, "prompt tokens: 3"), (600, "prompt"), (40_000, "far over 256 tokens")],
)
def test_a_prompt_that_is_too_long_has_a_code(served: Served, letters: int, words: str) -> None:
    """A prompt that is too long has a code: over the batch's 256 tokens, over the model's 512, and
    before it is encoded.
    """
    body = body_of(0) | {"messages": [{"role": "user", "content": "x" * letters}]}
    status, answer = post(served, body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert words in answer["error"]["message"]


def test_a_trace_tells_the_place_in_the_queue(served: Served) -> None:
    """A trace tells the place in the queue: four of six answers wait until a row of two is free."""
    body: Any = body_of(0) | {"n": 6, "max_tokens": NEW, "stop": None}
    stream = served.client.chat.completions.create(
        model=MODEL, stream=True, extra_body={"trace": True}, **body
    )
    places = [chunk.jaxspec["waiting"] for chunk in stream if not chunk.choices]
    assert 2 in places
    assert places[-1] == 0


def test_many_prompts_are_refused_before_they_are_read(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "completion", None)
    status, answer = post(served, {"prompt": [""] * 9}, path="completions")
    assert (status, answer["error"]["message"]) == (400, "prompt: 9 prompts; give 1 to 8")


def test_a_completion_and_its_pieces_have_the_spaces_of_the_text(served: Served) -> None:
    _, space, _ = served.engine.encoder.ids("a b")[-3:]
    body = {"prompt": "Once", "max_tokens": 2, "logit_bias": {str(space): 100}, "logprobs": 2}
    (choice,) = post(served, body, path="completions")[1]["choices"]
    assert choice["text"] == "  "
    assert choice["logprobs"]["tokens"] == [" ", " "]
    scores = [*choice["logprobs"]["top_logprobs"][0].values()]
    assert scores == sorted(scores)  # of alternatives with one text the likeliest stays


def test_answers_have_the_form_that_is_asked_for(served: Served) -> None:
    """Answers have the form that is asked for, also of several requests at once, as if alone; a
    form compiles loops, but no prefill.
    """
    forms = [
        {"guided_choice": ["yes", "no", "perhaps"]},
        {"response_format": {"type": "json_schema",
                             "json_schema": {"name": "x", "schema": {"enum": [[1], {"a": 2}]}}}},
        {},
        {"structured_outputs": {"regex": "[ab]{3}c"}},
    ]  # fmt: skip
    space, line = served.engine.encoder.tokenizer.convert_tokens_to_ids([" ", "\n"])
    bodies = [body_of(8 + i) | {"stop": None, "max_tokens": NEW} | forms[i % 4] for i in range(8)]
    for body in bodies[1::4]:
        body["logit_bias"] = {str(space): -1e9, str(line): -1e9}

    def ask(body: dict[str, Any]) -> str:
        status, answer = post(served, body)
        assert status == 200, answer
        return answer["choices"][0]["message"]["content"]

    def prefills() -> int:
        return sum(step is run_prefill for step, *_ in compile_cache.EXECUTABLES)

    before = prefills()
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, bodies))
    assert prefills() == before
    assert {texts[0], texts[4]} <= {"yes", "no", "perhaps"}
    assert all(json.loads(text) in ([1], {"a": 2}) for text in texts[1::4])
    assert all(set(text[:3]) <= {*"ab"} and text[3:] == "c" for text in texts[3::4])
    assert texts[2::4] == [alone(served, body).text for body in bodies[2::4]]
    programs = len(compile_cache.EXECUTABLES)
    assert [ask(body) for body in bodies] == texts
    assert len(compile_cache.EXECUTABLES) == programs
    refused = bodies[0] | {"guided_choice": None, "guided_regex": "((("}
    status, answer = post(served, refused)
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert "\n" not in answer["error"]["message"]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_over_the_servers_is_the_servers(served: Served, name: str) -> None:
    body = body_of(0) | {"max_tokens": None, "stop": None, "min_tokens": NEW, name: 10 * NEW}
    answer = post(served, body)[1]
    assert answer["usage"]["completion_tokens"] == NEW
    assert answer["choices"][0]["finish_reason"] == "length"


def test_fields_of_no_effect_are_taken(served: Served) -> None:
    neutral = {
        "frequency_penalty": 0.0, "suffix": "", "best_of": 1.0, "logit_bias": {}, "tools": [],
        "user": "me", "response_format": {"type": "text"}, "top_k": -1, "logprobs": False,
    }  # fmt: skip
    assert post(served, body_of(0) | neutral)[0] == 200


def test_limits_of_bodies_and_of_the_queue(served: Served) -> None:
    assert post(served, shown(*["data:image/png;base64,"] * 2))[0] == 400
    assert post(served, b"[" * 100_000)[0] == 400
    assert post(served, b" " * (BODY + 1))[0] == 413
    assert post(served, b"{}", {"Content-Type": "text/plain"})[0] == 415
    with raw(served) as connection:  # more chunks than the limit, of no length that was told
        connection.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%s\r\n" % (50_000, b" " * 50_000)
        for _ in range(5):
            connection.sendall(chunk)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    long = body_of(0) | {"n": 4, "max_tokens": NEW, "stop": None}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda _: post(served, long), range(24)))
    idle(served)
    refused = [answer for status, answer in answers if status == 429]
    assert {status for status, _ in answers} == {200, 429}
    assert len(answers) - len(refused) >= QUEUE // 4
    assert all(answer["error"]["type"] == "rate_limit_error" for answer in refused)


def test_a_client_that_goes_away_frees_its_row(served: Served) -> None:
    """A client that goes away frees its row, streamed or not, and while it sends its body."""
    body = json.dumps(body_of(1) | {"n": 4, "max_tokens": NEW, "stop": None}).encode()
    for stream in (b"", b', "stream": true'):
        with raw(served) as connection:
            sent = body[:-1] + stream + b"}"
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent))
            if stream:
                connection.recv(100)
    with raw(served) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
    idle(served)


def test_hostile_requests_are_refused_and_leave_nothing(served: Served) -> None:
    rng = np.random.default_rng(0)
    statuses = [post(served, *mutated(rng, body_of(i % 8)))[0] for i in range(100)]
    idle(served)
    assert set(statuses) <= {200, 400, 404, 413, 415}
    assert statuses.count(400) > 50
    assert post(served, body_of(0))[0] == 200


@pytest.mark.parametrize("block_ms", [0.5, 5.0, 30.0, 80.0])
def test_a_run_takes_a_block_or_up_to_fifty_milliseconds(block_ms: float) -> None:
    """A run of blocks of two tokens takes one block, or up to fifty milliseconds. An answer that
    ends early says nothing of a run's length.
    """
    stride, ms = 1, 0.0
    for _ in range(20):
        blocks = math.ceil(stride / 2)
        ms = blocks * block_ms
        stride = next_stride(stride, 2 * blocks, ms)
    assert 25 <= ms <= 50 or ms == block_ms == 80
    assert next_stride(stride, stride - 1, 1.0) == stride


def test_a_worker_that_fails_leaves_nobody_waiting(served: Served, loop: Any) -> None:
    """A worker that fails ends the tickets that are just joining, and those in the queue."""
    worker = worker_of(served, QUEUE)
    worker.start()
    assert worker.ready.wait(600)
    del worker.batch.states  # what makes the rows that they join
    request = worker.read(Request("Hi"), 4)
    tickets = [ticket(request, loop) for _ in range(worker.batch.rows + 1)]
    worker.submit(tickets)
    worker.join(60)
    assert worker.failure is not None
    assert [type(ticket.error) for ticket in tickets] == [Unready] * len(tickets)
    with pytest.raises(Unready):
        worker.submit(tickets)


@pytest.mark.parametrize("before", [1, 2])
def test_a_ticket_that_is_over_is_not_prefilled_and_not_lost(
    served: Served, loop: Any, before: int
) -> None:
    """A ticket whose deadline passes, or whose client leaves, before it is taken or after, is not
    prefilled and not lost.
    """
    looks = itertools.chain([False] * before, itertools.repeat(True))

    class Passing(Ticket):
        @property
        def over(self) -> bool:
            return next(looks)

    worker = worker_of(served, QUEUE)
    passing = ticket(worker.read(Request("Hi"), 4), loop, Passing)
    worker.waiting.append(passing)
    worker._advance()
    assert [*worker.tickets.values()] == [passing] * (before == 2)
    worker._advance()
    assert not [*worker.tickets, *worker.waiting]
    assert isinstance(passing.error, Late)


def test_prompts_join_one_by_one_between_two_blocks(served: Served, loop: Any) -> None:
    """Prompts join one by one: a running answer gains tokens between two joins, and each first
    token is published alone.
    """
    events: list[tuple[int, int]] = []

    class Logged(Ticket):
        def publish(self, result: Result | None, error: Exception | None = None) -> None:
            if result is not None:  # otherwise its place in the queue has changed
                events.append((tickets.index(self), len(result.tokens)))
            super().publish(result, error)

    worker = worker_of(served, QUEUE)
    tickets = [
        ticket(worker.read(Request("Hi", min_new_tokens=NEW), NEW), loop, Logged)
        for _ in range(worker.batch.rows)
    ]
    worker.waiting.extend(tickets)
    while worker.waiting:
        before = len(events)
        worker._advance()
        newest = len(worker.tickets) - 1
        (first, count), *block = events[before:]
        assert (first, count) == (newest, 1)  # nothing is published twice
        assert [index for index, _ in block] == [*range(newest + 1)]
    for i in range(len(tickets)):
        counts = [count for index, count in events if index == i]
        assert counts == sorted(set(counts))


def test_a_long_prompt_keeps_nobody_waiting(served: Served, loop: Any) -> None:
    """While a long prompt is read, a running answer gains a token after each piece; whoever leaves
    between two is not read on, and the next one is.
    """
    worker = worker_of(served, QUEUE)
    lane = worker.batch
    assert lane.reader is not None
    lane.reader.ready |= {*lane.reader.piece_sizes}
    running, gone, other = (
        ticket(worker.read(request, NEW), loop)
        for request in (
            Request("Hi", min_new_tokens=NEW),
            *map(Request, ("So. " * 40, "Oh. " * 36)),
        )
    )
    worker.waiting.extend([running])
    worker._advance()
    worker.waiting.extend([gone, other])

    def turn() -> int:
        assert running.result is not None
        before, lane.run_ms = len(running.result.tokens), 0.0  # as of a fast loop
        worker.strides["drafted"] = 1
        worker._advance()
        return len(running.result.tokens) - before

    assert turn() >= 1
    assert (gone.waiting, gone.result, other.waiting) == (0, None, 1)
    worker.abandon([gone])
    while other.result is None:
        assert turn() >= 1
    assert gone.result is None
    assert [*worker.tickets.values()] == [running, other]
    alone = served.engine.generate(replace(other.request, max_new_tokens=1))
    assert other.result.tokens[:1] == alone.tokens


def test_a_conversation_reads_only_what_is_new(served: Served) -> None:
    """A conversation reads only what is new, and its answers are as if alone; another key or salt
    shares nothing with it.
    """
    body = body_of(3) | {"stop": None, "temperature": 0.0, "max_tokens": 8}
    body["messages"][0]["content"][1]["text"] = QUESTIONS[2] * 2
    said = {"role": "assistant", "content": "So."}
    longer = body | {"messages": [*body["messages"], said, {"role": "user", "content": "Why?"}]}

    def ask(body: dict[str, Any], key: str) -> tuple[str, int]:
        headers = {"Authorization": f"Bearer {key}"}
        answer = post(served, body, headers)[1]
        usage = answer["usage"]
        return answer["choices"][0]["message"]["content"], *usage["prompt_tokens_details"].values()

    def hits() -> float:
        page = get(served, "/metrics")[1].decode()
        return float(re.findall(r"^vllm:prefix_cache_hits_total.* (\S+)$", page, re.M)[0])

    first, cached = ask(body, "mine")
    assert cached == 0
    before = hits()
    again, cached = ask(longer, "mine")
    assert cached > 8
    assert hits() == before + cached
    assert (first, again) == tuple(alone(served, each).text for each in (body, longer))
    assert ask(longer, "yours") == (again, 0)
    assert ask(longer | {"cache_salt": "x"}, "mine") == (again, 0)


def test_short_prompts_compile_when_first_needed_where_time_is_short(served: Served) -> None:
    """Where time is short, programs of short prompts compile when first needed, and the rest once
    nobody has asked for a while.
    """
    ready: list[bool] = []

    def progress() -> None:
        ready.append(worker.ready.is_set())
        if ready[-1]:
            worker.end()

    worker = worker_of(served, progress=progress, patience=0)
    worker.start()
    worker.join(600)
    warmed = worker.warmed
    left = worker.programs[warmed:]
    assert ready == [False] * warmed + [True]
    assert any(step.length == 64 for step in left)
    assert all(step.rank for step in left)
    assert not any(step.rank for step in worker.programs[:warmed])
    worker.ending = False
    assert worker.rest == 0
    assert worker._advance()
    assert worker.warmed == warmed + 1
    worker._ended, worker._longest = time.monotonic(), 600.0
    assert worker.rest is not None
    assert worker.rest > 500


@pytest.mark.parametrize(
    ("limit", "value"),
    [("jaxspec.engine.compile_cache.CROWDED", 0.0), ("jaxspec.serve.worker.SPARE", 1.0)],
)
def test_the_warmup_ends_where_more_programs_have_no_room(
    served: Served, limit: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def progress() -> None:
        if worker.warmed == 3:
            monkeypatch.setattr(limit, value)
        if worker.ready.is_set():
            worker.end()

    worker = worker_of(served, progress=progress)
    worker.start()
    worker.join(600)
    assert worker.warmed == len(worker.programs) == 4
    assert worker.rest is None


def test_a_full_server_says_when_to_come_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full server says when to come again, before it reads the body, and where the answers have
    no room in the queue.
    """
    monkeypatch.setattr(served.worker, "_seconds", 41.5)
    headers, body = {"Content-Type": "application/json"}, json.dumps(body_of(0))
    for name, holder, value in (("open", served.server, 999), ("queue", served.worker, -9)):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, value)
            connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body, headers)
            answer = connection.getresponse()
            connection.close()
        assert (answer.status, answer.headers["Retry-After"]) == (429, "42")


def test_a_busy_lane_leaves_the_other_its_queue(
    served: Served, loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Engine(served.engine.target, config=EngineConfig(batch_size=1))
    worker = worker_of(served, 2, plain)
    worker.ready.set()
    request = worker.read(Request("Hi"), 4)
    for lane in worker.lanes:
        tickets = [ticket(request, loop, lane=lane) for _ in range(worker.batch.rows + 2)]
        rows = worker.lanes[lane].rows
        worker.submit(tickets[: rows + 2])
        with pytest.raises(Full):
            worker.submit(tickets[:1])
        places = [ticket.waiting for ticket in worker.waiting if ticket.lane == lane]
        assert places == [*range(1, rows + 3)]
    monkeypatch.setattr(served.server, "open", served.worker.batch.rows + QUEUE)
    assert post(served, body_of(0))[0] == 200


def test_slow_clients_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow clients are closed: with half a header, with a body that is refused and goes on, and
    after an answer.
    """
    monkeypatch.setattr(app, "UPLOAD", 0.3)
    monkeypatch.setattr(connections, "UPLOAD", 0.3)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n7fffffff\r\n"
    answered = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent, status in ((b"GET / HTTP/1.1\r\n", b""), (chunked, b"408"), (answered, b"200")):
        with raw(served) as connection:
            connection.settimeout(20)
            connection.sendall(sent)
            answer = connection.recv(9)
            assert answer == b"HTTP/1.1 " * bool(status)
            while piece := connection.recv(10_000):
                answer += piece
                connection.sendall(b"x")
            assert answer[9:12] == status
    idle(served)


def test_a_client_that_reads_nothing_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads nothing is closed once answers fill the buffers of both sides."""
    monkeypatch.setattr(connections, "UPLOAD", 0.3)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.connect(("127.0.0.1", served.port))
        connection.settimeout(20)
        with pytest.raises(ConnectionError):
            connection.sendall(b"GET /page.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000)


def test_connections_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 0)
    with raw(served) as connection:
        connection.settimeout(20)
        assert connection.recv(100) == b""


def test_a_second_signal_ends_at_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    """A second signal ends a server at once, without waiting for a body that is half sent, and
    without a traceback.
    """
    listener, web = socket.create_server(("127.0.0.1", 0)), app.web_server(served.server)
    address = listener.getsockname()
    running = threading.Thread(target=web.run, args=([listener],), daemon=True)
    running.start()
    with socket.create_connection(address) as connection:
        connection.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        while not served.server.open:
            threading.Event().wait(0.01)
        web.handle_exit(signal.SIGTERM, None)
        running.join(0.5)
        assert running.is_alive()
        web.handle_exit(signal.SIGTERM, None)
        running.join(20)
    assert not running.is_alive()
    assert not caplog.records


def test_metrics_have_the_names_of_vllms(served: Served) -> None:
    post(served, body_of(0))
    page = get(served, "/metrics")[1].decode()
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total", "vllm:request_success_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
        "vllm:time_to_first_token_seconds_bucket", "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    ):  # fmt: skip
        assert f"{name}{{" in page
    assert get(served, "/health")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_counts_its_drafts_as_vllms_does(served: Served, stream: bool) -> None:
    """An answer counts its drafts as vLLM does, also of several choices, and where the last block
    is cut.
    """
    body = body_of(3) | {"stop": None, "max_tokens": NEW, "n": 2}
    result = alone(served, body_of(3) | {"stop": None, "max_tokens": NEW})
    if stream:
        *_, answer = served.client.chat.completions.create(
            model=MODEL, stream=True, stream_options={"include_usage": True}, **body
        )
    else:
        answer = served.client.chat.completions.create(model=MODEL, **body)
    drafts = answer.model_extra["metrics"]["speculative_decoding"]
    steps, drafted, accepted = (
        2 * int(np.sum(getattr(result.stats, name)))
        for name in ("steps", "drafted_at", "accepted_at")
    )
    assert drafts == {
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [2 * int(n) for n in result.stats.histogram],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": 3,
    }
    assert answer.usage.completion_tokens_details is None  # of predictions, which are not drafts
    plain = post(served, body | {"draft": False})[1]
    assert "metrics" not in plain


def test_a_prompt_of_several_choices_is_cached_if_the_first_found_it_so(served: Served) -> None:
    """A prompt of several choices counts as cached only if the first choice found it so; a later
    one may find what the first has kept.
    """
    result = served.alone.generate(Request("Hi", 2))
    request = SimpleNamespace(prompt=object(), rows=[range(20)])
    tickets: Any = [
        SimpleNamespace(request=request, result=replace(result, cached=count)) for count in (0, 19)
    ]
    usage = counts(tickets)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert usage["total_tokens"] == 20 + 2 * len(result.tokens)


def test_the_page_names_no_other_address(served: Served) -> None:
    for path in ("/", "/page.js", "/style.css"):
        status, content, headers = get(served, path)
        assert status == 200
        assert b"//" not in content.replace(b"// ", b"").replace(b"http://www.w3.org", b"")
        assert "default-src 'self'" in headers["content-security-policy"]
    assert get(served, "/../app.py")[0] == 404


def test_other_paths_and_hosts_are_refused_with_the_mend(served: Served) -> None:
    for path in ("/nothing", "/v1/nothing"):
        status, content, _ = get(served, path)
        assert status == 404
        assert b"/v1/chat/completions and /v1/completions are served" in content
    assert post(served, b"{}", path="responses")[0] == 404
    status, content, headers = get(served, "/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert b"method: GET is not served here; give POST" in content
    assert post(served, b"{}", path="models")[0] == 405
    status, answer = post(served, b"{}", {"Host": "Elsewhere.example:80"})
    assert status == 400
    assert "'elsewhere.example' is not allowed; start it" in answer["error"]["message"]
    for host in ("[::1]:80", "LOCALHOST"):
        assert post(served, b"{}", {"Host": host, "Content-Type": "text/plain"})[0] == 415


def test_a_key_is_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = served.server.settings
    secret = settings.__class__(settings.limits, key="s3cret")
    monkeypatch.setattr(served.server, "settings", secret)
    with pytest.raises(openai.AuthenticationError):
        served.client.models.list()
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="s3cret", max_retries=0)
    assert client.models.list().data[0].id == MODEL
    assert post(served, body_of(0))[0] == 401
    settings = replace(settings, key="clé")
    monkeypatch.setattr(served.server, "settings", settings)
    for key, status in (("clé", 200), ("cle", 401)):
        with raw(served) as connection:
            head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}"
            connection.sendall(head.encode() + b"\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 %d" % status)
    with raw(served) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"\r\nwww-authenticate: bearer\r\n" in connection.recv(1000).lower()


def tested(served: Served, **settings: Any) -> TestClient:
    """Return a client of the server with other settings."""
    changed = replace(served.server.settings, **settings)
    return TestClient(app.Server(served.worker, changed, served.server.metrics).app())


def test_a_request_has_an_id_and_a_line_of_the_log(served: Served) -> None:
    """A request has an id, its client's unless it would break the line, and a line of the log; a
    stream's comes at the end.
    """
    lines: list[str] = []
    client = tested(served, log=lines.append)
    body = body_of(0) | {"max_tokens": 2, "stream": True}
    for name, path in (("mine-1", "chat/completions"), ("it is\tnot", "a%0Ac")):
        headers = {"Host": "localhost", "X-Request-Id": name}
        answer = client.post(f"/v1/{path}", json=body, headers=headers)
        names = [answer.headers["x-request-id"], lines[-1].rpartition(" ")[2]]
        assert names[0] == names[1]
        assert (names[0] == name) == (name == "mine-1")
        assert "\n" not in lines[-1]
        assert f" {answer.status_code} " in lines[-1]
    assert len(lines) == 2
    first = client.post(
        "/v1/completions", json={"prompt": "Hi", "max_tokens": 1}, headers={"Host": "localhost"}
    )
    assert first.json()["id"] == f"cmpl-{first.headers['x-request-id']}"


@pytest.mark.parametrize("origins", [("https://chat.example",), ("*",), ()])
def test_pages_of_allowed_origins_may_ask(served: Served, origins: tuple[str, ...]) -> None:
    client = tested(served, origins=origins)
    for origin in ("https://chat.example", "https://other.example"):
        headers = {"Host": "localhost", "Origin": origin, "Access-Control-Request-Method": "POST"}
        headers["Access-Control-Request-Headers"] = "authorization, content-type"
        answers = (
            client.options("/v1/chat/completions", headers=headers),
            client.get("/health", headers=headers),
        )
        for answer in answers:
            allowed = answer.headers.get("access-control-allow-origin")
            assert (allowed in ("*", origin)) == (origins == ("*",) or origin in origins)


HEAD = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@contextmanager
def raw(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        yield connection


def post(
    served: Served,
    body: bytes | dict[str, Any],
    headers: dict[str, str] | None = None,
    path: str = "chat/completions",
) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=300)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    types = {"Content-Type": "application/json"} | (headers or {})
    try:
        connection.request("POST", f"/v1/{path}", body, types)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    streamed = answer.headers.get_content_type() == "text/event-stream"
    try:
        return answer.status, None if streamed else json.loads(content)
    except ValueError:
        return answer.status, content


def get(served: Served, path: str) -> tuple[int, bytes, Any]:
    connection = HTTPConnection("127.0.0.1", served.port, timeout=60)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()
