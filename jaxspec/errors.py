"""Report input that users can mend, in one line."""

from __future__ import annotations

import difflib
import logging
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import requires
from numbers import Integral, Real
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]
_LONGEST = 200
"""Maximum characters that are kept of another library's message."""


class InputError(ValueError):
    """Say in one line what is wrong with an input, where, its value, and how to mend it.

    Example: `gamma: 0; give a whole number, 1 or more`. Commands print the message to standard
    error and exit with code 2. Programs catch it as a ValueError.
    """


class Diverged(InputError):
    """Report a loss, gradient or parameter of a training run that is not finite."""


def is_number(value: object) -> bool:
    """Return whether a value is a real number, of Python or numpy, and no boolean."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_counts(**counts: object) -> None:
    """Raise InputError, with the name, for the first count that is not a whole number from 1 on."""
    for name, count in counts.items():
        if not isinstance(count, Integral) or isinstance(count, bool) or count < 1:
            raise InputError(f"{name}: {count!r:.60}; give a whole number, 1 or more")


def check_all_counts(**lists: Sequence[object]) -> None:
    """Raise InputError, with a list's name, for its first entry that `check_counts` refuses."""
    for name, counts in lists.items():
        for count in counts:
            check_counts(**{name: count})


def check_seed(seed: object) -> None:
    """Raise InputError for a seed that is not a whole number of 32 bits."""
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= int(seed) < 2**32:
        raise InputError(f"seed: {seed!r:.60}; give a whole number from 0 to {2**32 - 1}")


def check_numbers(least: float = 0.0, most: float = 3.4e38, **numbers: object) -> None:
    """Raise InputError, with the name, for the first value that is no number in a range.

    By default the range is float32's, from 0 on.
    """
    for name, number in numbers.items():
        if not is_number(number) or not least <= number <= most:  # type: ignore[operator]
            raise InputError(f"{name}: {number!r:.60}; give a number from {least:g} to {most:g}")


def check_path(name: str, path: object) -> None:
    """Raise InputError, with the name, for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{name}: {path!r:.60}; give a directory's name")


@cache
def warn_once(line: str) -> None:
    """Log a warning, the first time in a process; "" logs nothing."""
    if line:
        logging.getLogger("jaxspec").warning(line)


def nearest(name: str, names: Sequence[str], otherwise: str = "") -> str:
    """Return advice for an unknown name: the most similar known name, or all known names.

    otherwise: Advice in place of all known names.
    """
    if near := difflib.get_close_matches(name, names, 1):
        return f"did you mean {near[0]!r}?"
    return otherwise or f"use one of {', '.join(names) or 'none'}"


def printable(text: str) -> str:
    """Return the text with escapes for control characters and characters without an encoding."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut and printable; if empty, its type's name."""
    line = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    return "".join(letter if letter.isprintable() else "?" for letter in line[:_LONGEST])


@contextmanager
def reading(what: str, mend: str = "save it again with save_pretrained") -> Iterator[None]:
    """Raise InputError for any error within: "`what` (the error's first line); `mend`"."""
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # tokenizers' panics are no `Exception`
        if "trust_remote_code" in str(error):
            mend = "a checkpoint's own code is never run: use a class that transformers has"
        raise InputError(f"{what} ({first_line(error)}); {mend}") from error


def install_command(extra: str) -> str:
    """Return the pip command for an extra: in a clone by its name, else by its requirements."""
    if (CLONE / "pyproject.toml").is_file():
        return f"pip install -e '.[{extra}]'"
    # The package index has another project of this name, so an installed wheel has no extras.
    lines = [re.split(" *; *", line) for line in requires("jaxspec") or ()]
    names = [name for name, *marks in lines if re.search(f"extra == .{extra}.", "".join(marks))]
    return f"pip install {shlex.join(names)}"


@contextmanager
def needing(what: str, extra: str) -> Iterator[None]:
    """Raise InputError for a failing import within; name what needs it and the extra to install."""
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"{what}: {error.name} is not installed; {install_command(extra)}"
        ) from error


@contextmanager
def located(origin: object) -> Iterator[None]:
    """Prefix an InputError's line with its origin, unless that is "" or the line names it."""
    try:
        yield
    except InputError as error:
        if str(origin) in str(error):
            raise
        raise InputError(f"{origin}: {error}") from error


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Append an InputError's line to `problems` instead of raising it."""
    try:
        yield
    except InputError as error:
        problems.append(str(error))
