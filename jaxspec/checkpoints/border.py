"""Where files of strangers are read: which may be, and whatever other libraries raise of them as one line."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxspec.errors import InputError

_READ = (".json", ".safetensors", ".model", ".txt", ".jinja")
_LARGEST = 256 << 20
"""Bytes of any such file but of weights; the largest tokenisers have 40 million."""
_LONGEST = 200
"""Characters of another library's message that are passed on."""


def check_files(path: Path) -> None:
    """Refuses a checkpoint's directory in which a file that may be read is none, or lies elsewhere.

    Pipes block for ever who reads them. Links may lead within the directory, and to the blobs of a hub cache. What
    the error says of any other link does not depend on whether there is a file at its end.
    """
    home = Path(os.path.realpath(path))
    homes = [home]
    if home.parent.name == "snapshots":  # of a model in a hub cache; its blobs may be links to those of all models
        homes += [Path(os.path.realpath(folder / "blobs")) for folder in home.parents[1:3]]
    for file in (*path.glob("*"), *path.glob("additional_chat_templates/*")):
        if file.suffix not in _READ:
            continue
        there = Path(os.path.realpath(file))
        if not any(there.is_relative_to(home) for home in homes):
            raise InputError(f"{file}: a link that leads out of the directory; put the file itself there")
        found = there.stat() if there.exists() else None
        if found and not stat.S_ISREG(found.st_mode):
            raise InputError(f"{file}: no regular file; remove it")
        if found and file.suffix != ".safetensors" and found.st_size > _LARGEST:
            raise InputError(f"{file}: {found.st_size} bytes, and at most {_LARGEST} are read; fetch it again")


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
