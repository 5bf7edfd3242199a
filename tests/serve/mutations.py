"""Make requests as somebody hostile or careless may send them."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -0.0, "", "x", "\x00", "\ud800",
    "💥" * 50, "<image>", "</s>", "data:image/png;base64,", "file:///etc/passwd",
    "http://127.0.0.1/", [], [[]], {}, {"a": {}}, [None], ["x"] * 300, {"type": "image_url"},
    {"type": "text"},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}},
]  # fmt: skip
FIELDS = [
    "messages", "prompt", "model", "n", "stream", "stream_options", "temperature", "top_p", "top_k",
    "seed", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "draft",
    "trace", "tools", "logit_bias", "user", "echo", "best_of", "response_format", "__proto__",
]  # fmt: skip


def mutated(rng: np.random.Generator, body: dict[str, Any]) -> tuple[bytes, dict[str, str], str]:
    """Return a body with one to three changes, its headers, and its path."""
    body = copy.deepcopy(body)
    for _ in range(int(rng.integers(1, 4))):
        holder, key = _somewhere(rng, body)
        if rng.random() < 0.2 and isinstance(holder, dict) and key in holder:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
    raw = json.dumps(body).encode()
    if rng.random() < 0.2:  # bytes that are no JSON
        data = bytearray(raw)
        for _ in range(int(rng.integers(1, 5))):
            data[rng.integers(len(data))] = rng.integers(256)
        raw = bytes(data[: rng.integers(len(data) + 1)])
    path = "completions" if rng.random() < 0.2 else "chat/completions"
    kinds = ["application/json", "application/json; charset=utf-7", "text/plain", ""]
    kind = kinds[rng.choice(4, p=[0.9, 0.04, 0.03, 0.03])]
    return raw, {"Content-Type": kind}, path


def _somewhere(rng: np.random.Generator, body: Any) -> tuple[Any, Any]:
    """Return a place in a body: a dict with a key, or a list with an index."""
    holder = body
    while True:
        inner = holder.values() if isinstance(holder, dict) else holder
        deeper = [value for value in inner if isinstance(value, dict | list) and value]
        if not deeper or rng.random() < 0.4:
            break
        holder = deeper[rng.integers(len(deeper))]
    if isinstance(holder, list):
        return holder, int(rng.integers(len(holder)))
    keys = [*holder, *FIELDS]
    return holder, keys[rng.integers(len(keys))]
