"""Ask a server many questions at once, and time its answers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from jaxspec.errors import reading


class Timing(NamedTuple):
    """Hold the times of one streamed answer."""

    first: float
    """Seconds from the request to the first token."""
    whole: float
    """Seconds from the request to the last token."""
    tokens: int


def ask(url: str, body: dict[str, Any]) -> Timing:
    """Stream an answer; raise InputError for a refusal."""
    address = urlsplit(url)
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json"}
    start, first, tokens = time.perf_counter(), 0.0, 0
    with (
        reading(f"url {url}: gives no answer", "start the server, or ask for what it has"),
        closing(kind(address.netloc, timeout=600)) as connection,
    ):
        path = f"{address.path.rstrip('/')}/v1/chat/completions"
        connection.request("POST", path, json.dumps(streamed), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"status {answer.status}: {answer.read()[:200]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            if any(choice["delta"].get("content") for choice in part["choices"]):
                first = first or time.perf_counter() - start
            tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
    whole = time.perf_counter() - start
    return Timing(first or whole, whole, tokens)


def ask_all(url: str, bodies: Sequence[dict[str, Any]], clients: int) -> tuple[float, list[Timing]]:
    """Let some clients ask all questions, one after another; return the seconds and the times."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        timings = list(pool.map(partial(ask, url), bodies))
    return time.perf_counter() - start, timings
