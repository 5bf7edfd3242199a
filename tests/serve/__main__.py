"""Send a running server hostile requests, or clients that come, go and fail:

    python -m tests.serve hostile http://127.0.0.1:8000 2000
    python -m tests.serve soak http://127.0.0.1:8000 1800

The first takes a number of requests, the second seconds. Both end with a line of counts by status;
exit code 1 says that there was a 500, that an answer was lost, or that a row is stuck.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.serve.mutations import mutated

WORDS = ("Hi", "What is it?", "Tell me all that you see.", "Why?")


def body_of(rng: np.random.Generator) -> dict[str, Any]:
    text = WORDS[rng.integers(len(WORDS))]
    options = {"max_tokens": int(rng.integers(1, 33)), "temperature": float(rng.integers(2))}
    return {
        "messages": [{"role": "user", "content": text}],
        **options,
        "n": int(rng.integers(1, 3)),
    }


def post(url: str, body: bytes, headers: dict[str, str], path: str, gone: bool = False) -> int:
    """Return the status of an answer; 0 where the client went away before it."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=300)
    try:
        connection.request("POST", f"/v1/{path}", body, headers)
        if gone:
            return 0
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def hostile(url: str, count: int) -> Counter[int]:
    rng = np.random.default_rng(1)
    return Counter(post(url, *mutated(rng, body_of(rng))) for _ in range(count))


def soak(url: str, seconds: float) -> Counter[int]:
    counts: Counter[int] = Counter()
    end = time.monotonic() + seconds

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        types = {"Content-Type": "application/json"}
        while time.monotonic() < end:
            body = body_of(rng) | {"stream": bool(rng.integers(2))}
            counts[
                post(url, json.dumps(body).encode(), types, "chat/completions", rng.random() < 0.2)
            ] += 1

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def main(kind: str, url: str, amount: str) -> int:
    counts = {"hostile": hostile, "soak": soak}[kind](url, int(amount))
    time.sleep(5)
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    stuck = [line for line in page.splitlines() if line.startswith("vllm:num_requests_")]
    print(dict(sorted(counts.items())), *stuck)
    held = any(float(line.split()[-1]) for line in stuck)
    return int(any(status >= 500 for status in counts) or held)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
