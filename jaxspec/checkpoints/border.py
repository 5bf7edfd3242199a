"""Where files of strangers are read by others' code: whatever that raises becomes one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from jaxspec.errors import InputError

_LONGEST = 200
"""Characters of another library's message that are passed on."""


@contextmanager
def reading(what: str, mend: str = "save it again with save_pretrained") -> Iterator[None]:
    """Raises InputError for whatever is raised within: "`what` (the error's first line); `mend`"."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of tokenizers is no Exception
        if "trust_remote_code" in str(error):
            mend = "a checkpoint's own code is never run: use a class that transformers has"
        raise InputError(f"{what} ({first_line(error)}); {mend}") from error


def first_line(error: BaseException) -> str:
    """An error's first line, cut and printable; its type's name where it says nothing."""
    line = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in line[:_LONGEST])
