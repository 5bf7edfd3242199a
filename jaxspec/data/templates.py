"""Chat templates are programs of strangers: transformers runs them in a sandbox, and here they end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jaxspec.errors import InputError

SECONDS = 5.0
"""What one rendering may take. The templates that models have take a thousandth of it."""
_LARGEST = 1_000_000
"""The largest number written in a template, such as how often a text is repeated."""
_MOST_ADDED = 100_000
"""Letters that a template may add to what is said."""


def render(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    """The tokeniser's template over messages, ready for the assistant.

    Raises InputError for a template that takes too long, and whatever the template raises. The time is asked before
    every line of the template; a single line is bounded by the sandbox's own limit on ranges, and by `_check`.
    """
    end = time.monotonic() + SECONDS

    def line(frame: Any, event: str, _: Any) -> Any:
        if time.monotonic() > end:
            raise InputError(f"chat template: takes over {SECONDS:g} s; mend the tokeniser's")
        return line

    def call(frame: Any, event: str, _: Any) -> Any:
        return line if frame.f_code.co_filename == "<template>" else None

    if isinstance(tokenizer.chat_template, str):
        _check(tokenizer.chat_template)
    before = sys.gettrace()
    sys.settrace(call)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    finally:
        sys.settrace(before)
    if len(text) > _MOST_ADDED + 4 * len(str(messages)):
        raise InputError(f"chat template: makes {len(text)} letters of a short prompt; mend the tokeniser's")
    return text


@lru_cache(16)
def _check(template: str) -> None:
    """Refuses what takes an hour or all memory in a single line: powers, and numbers over a million."""
    import jinja2

    for _, kind, word in jinja2.Environment().lex(template):
        if (kind == "operator" and word == "**") or (kind == "integer" and int(word, 0) > _LARGEST):
            raise InputError(f"chat template: computes with {word[:40]}, as no chat needs to; mend the tokeniser's")
