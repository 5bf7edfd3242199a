"""What commands say on standard error while they work, and answers on standard output while they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from jaxspec.decoding.requests import Result


@dataclass(frozen=True, kw_only=True)
class Compiles:
    """The option of all commands that compile."""

    cache: bool = True
    """Keep compiled programs on disk, in the user's cache directory or in JAX_COMPILATION_CACHE_DIR."""


def progress(words: str) -> None:
    """Show words on terminals only that the next ones overwrite, so that a failure leaves only its own line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words} ...", end="", file=sys.stderr, flush=True)


def clear() -> None:
    """Clear such words on terminals, before something else is printed there."""
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)


def say(words: object) -> None:
    """Print a line that stays."""
    clear()
    print(words, file=sys.stderr)


def show(answer: Iterator[Result]) -> Result:
    """Print an answer while it is written; return the whole."""
    shown, result = 0, None
    for result in answer:
        if not shown:
            clear()
        print(end=result.text[shown:], flush=True)
        shown = len(result.text)
    print()
    assert result is not None
    return result
