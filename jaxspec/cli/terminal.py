"""What commands say on standard error while they work."""

from __future__ import annotations

import sys


def progress(words: str) -> None:
    """On terminals only: words that the next ones overwrite, so that a failure leaves only its own line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{words} ...", end="", file=sys.stderr, flush=True)


def say(words: object) -> None:
    """A line that stays."""
    clear = "\r\033[K" if sys.stderr.isatty() else ""
    print(f"{clear}{words}", file=sys.stderr)
