"""Files that are there whole or not at all, whenever the program that writes them ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file to write, beside `path`, that becomes it when the block ends well, and is removed otherwise."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes the whole text, in UTF-8, or nothing."""
    with whole(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
