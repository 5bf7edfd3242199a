"""Set up JAX and transformers before a command computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.errors import InputError, nearest

DTYPES = ("float32", "bfloat16", "float16")
PROGRAM_BYTES = 2**30
"""Maximum bytes that compiled programs take on disk."""


def setup_runtime() -> None:
    """Keep compiled programs on disk, compile them faster, and silence transformers.

    A compilation cache that the process has set up stays as it is. Otherwise programs are kept in
    the user's cache directory, up to `PROGRAM_BYTES`; those used last stay.
    """
    if "JAX_TRACEBACK_IN_LOCATIONS_LIMIT" not in os.environ:
        # Ten frames for each operation, as is usual, take a seventh of a compilation.
        jax.config.update("jax_traceback_in_locations_limit", 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        directory = cache_directory() / "programs"
        with suppress(OSError):
            # Where a killed process left a program without this file, jax keeps no more programs.
            for program in directory.glob("*-cache"):
                program.with_name(program.name.replace("-cache", "-atime")).touch()
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_compilation_cache_max_size", PROGRAM_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def clear() -> None:
    """Clear a line of progress, which has no end, from a terminal."""
    if sys.stderr.isatty():
        print(end="\r\033[K", file=sys.stderr, flush=True)


def say(line: object) -> None:
    """Print a line to stderr, in place of a line of progress."""
    clear()
    print(line, file=sys.stderr)


@contextmanager
def usual_settings() -> Iterator[None]:
    """Trace under the settings of JAX that programs are written for, whatever the process sets.

    32 bits even under x64: ids, counts and distributions need no more.
    """
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        jax.default_prng_impl("threefry2x32"),
    ):
        yield


def parse_dtype(dtype: Any) -> jnp.dtype:
    """Return the dtype of this name or type; InputError for one that models do not use."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; {nearest(name, DTYPES)}")
    return jnp.dtype(name)


def cache_directory() -> Path:
    """Return the cache's directory: `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


def human_bytes(size: float) -> str:
    """Return a number of bytes for people, such as 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
