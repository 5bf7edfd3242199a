"""Compile each program once, ahead of time, and time its runs without compilation."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.runtime import usual_settings
from jaxspec.sharding import on_mesh


@dataclass(frozen=True, eq=False)
class Held:
    """Hold a program with its parameters, and find their key once for all calls.

    Parameters have hundreds of leaves, which take too long to hash in every call.
    """

    program: Any
    mesh: Mesh | None
    params: Any
    """Parameters, or another first argument of the step."""

    @cached_property
    def kind(self) -> object:
        """Return one object for each program, mesh, and names, shapes, dtypes and shardings."""
        shardings = tuple(
            [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self.params)]
        )
        # An object, since a counter could race between threads.
        return _KINDS.setdefault(
            (self.program, self.mesh, _shapes(self.params), shardings), object()
        )


def timed(step: Callable[..., Any], held: Held, *args: Any, static: tuple[Any, ...] = ()) -> Any:
    """Run the jitted `step(program, params, *args, *static)` and return its result and its ms.

    The milliseconds do not include compilation.
    """
    run = executable(step, held, *args, *static)
    start = time.perf_counter()
    output = jax.block_until_ready(run(held.params, *args))
    return output, 1e3 * (time.perf_counter() - start)


CROWDED = 0.9
"""Share of the memory mappings that Linux allows from which on old programs are dropped. A compiled
program takes some hundreds on a CPU, and a process may have 65,530 where nobody has raised it."""

EXECUTABLES: dict[Any, Any] = {}
"""Compiled programs by key, the most recently used last."""

_KINDS: dict[Any, object] = {}

_SPENT = [0.0]

_TURNS: dict[Any, threading.Lock] = {}
"""Locks of the programs that are being compiled."""

_LOCK = threading.Lock()  # another thread must not miss a program while it becomes the newest


def compiled_ms() -> float:
    """Return the milliseconds that this process has spent on compiling or loading programs."""
    return _SPENT[0]


def executable(step: Any, held: Held, *args: Any) -> Any:
    """Return `step` compiled for these arguments' shapes and JAX's settings, once for each.

    Threads that need one program wait for the first of them to compile it.
    """
    key = (step, held.kind, _shapes(args), *jax.config.values.values())
    if (compiled := _used(key)) is not None:
        return compiled
    with _LOCK:
        turn = _TURNS.setdefault(key, threading.Lock())
    with turn:
        if (compiled := _used(key)) is None:
            try:
                compiled = _compile(key, step, held, args)
            finally:
                _TURNS.pop(key, None)
    return compiled


def _used(key: Any) -> Any:
    """Return a compiled program, now the newest; None for one that is not there."""
    with _LOCK:
        if (compiled := EXECUTABLES.pop(key, None)) is not None:
            EXECUTABLES[key] = compiled
        return compiled


def _compile(key: Any, step: Any, held: Held, args: tuple[Any, ...]) -> Any:
    """Compile `step` and store it under the key; first make room if memory mappings run out."""
    if crowded():
        with _LOCK:
            for oldest in list(EXECUTABLES)[: math.ceil(len(EXECUTABLES) / 4)]:
                del EXECUTABLES[oldest]
        jax.clear_caches()  # they hold the programs too
        gc.collect()
    start, options = time.perf_counter(), getattr(held.program, "compiler_options", None)
    with on_mesh(held.mesh), usual_settings():
        lowered = step.lower(held.program, held.params, *args)
        compiled = lowered.compile(compiler_options=options)
    with _LOCK:
        _SPENT[0] += 1e3 * (time.perf_counter() - start)
        EXECUTABLES[key] = compiled
    return compiled


def _shapes(args: Any) -> tuple[Any, ...]:
    """Return structure, shapes and dtypes of the arrays, and the values of other leaves."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple([(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves])


def crowded() -> bool:
    """Return whether the next program takes the place of old ones, as far as the system says."""
    try:
        most = int(Path("/proc/sys/vm/max_map_count").read_bytes())
        return Path("/proc/self/maps").read_bytes().count(b"\n") > CROWDED * most
    except OSError:
        return False
