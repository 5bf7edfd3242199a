"""What every command sets up before it computes, and how it ends on bad input."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxspec.errors import InputError


def setup_runtime(dtype: str | None = None) -> None:
    """Keeps compiled programs on disk, makes float32 exact, and silences transformers' notices.

    Args:
      dtype: what the models compute in; None, as their files say. TPUs and GPUs multiply float32 matrices in
        fewer bits unless told otherwise, and then a block of tokens does not score as its tokens one by one.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))
    if dtype in (None, "float32"):
        jax.config.update("jax_default_matmul_precision", "highest")


def cache_directory() -> Path:
    """Where jaxspec keeps what it can make again: `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


@contextmanager
def input_errors(program: str) -> Iterator[None]:
    """Turns an `InputError` into one line on standard error and exit code 2; all else passes."""
    try:
        yield
    except InputError as error:
        clear = "\r\033[K" if sys.stderr.isatty() else ""  # of a progress word that stands there
        print(f"{clear}{program}: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
