"""Programs compiled once, ahead of time, for each program, shapes, dtypes and placement; and their
times without it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxspec.sharding import on_mesh


@dataclass(frozen=True, eq=False)
class Held:
    """What the calls of one program share, and its kind, found once: parameters have hundreds of
    leaves."""

    program: Any
    mesh: Mesh | None
    params: Any
    """Or what else the program reads first."""

    @cached_property
    def kind(self) -> object:
        """One object for one program on one mesh and all parameters of the same names, shapes,
        dtypes and places."""
        places = tuple([getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(self.params)])
        # Not a count of those known: two threads would count alike.
        return _KINDS.setdefault((self.program, self.mesh, _shapes(self.params), places), object())


def timed(step: Callable[..., Any], held: Held, *args: Any, static: tuple[Any, ...] = ()) -> Any:
    """(what the jitted step(program, params, *args, *static) gives, its milliseconds), without
    those of compiling."""
    run = executable(step, held, *args, *static)
    begun = time.perf_counter()
    found = jax.block_until_ready(run(held.params, *args))
    return found, 1e3 * (time.perf_counter() - begun)


MAPPINGS = 50_000
"""Memory mappings from which on programs are given up: Linux ends a process that asks for more than
65,530, and on a CPU a program takes some hundreds."""

EXECUTABLES: dict[Any, Any] = {}
"""Compiled programs by key, those used last at the end."""

_KINDS: dict[Any, object] = {}

_SPENT = [0.0]


def compiled_ms() -> float:
    """Return the milliseconds that this process has spent on compiling, or on reading what it
    compiled before."""
    return _SPENT[0]


def executable(step: Any, held: Held, *args: Any) -> Any:
    """Return `step` compiled for what is held, these shapes and JAX's settings; ahead of time, so
    that no timing contains it."""
    key = (step, held.kind, _shapes(args), *jax.config.values.values())
    found = EXECUTABLES.pop(key, None)
    if found is None:
        if _mappings() > MAPPINGS:
            for oldest in list(EXECUTABLES)[: len(EXECUTABLES) // 2]:
                del EXECUTABLES[oldest]
            jax.clear_caches()  # which hold them too
            gc.collect()
        # In 32 bits whatever the process computes in: ids, counts and distributions are no wider.
        begun = time.perf_counter()
        with on_mesh(held.mesh), jax.enable_x64(False):
            found = step.lower(held.program, held.params, *args).compile()
        _SPENT[0] += 1e3 * (time.perf_counter() - begun)
    EXECUTABLES[key] = found
    return found


def _shapes(args: Any) -> tuple[Any, ...]:
    """Return what a program is compiled for: structure, shapes and dtypes, and values that are no
    arrays."""
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple([(x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves])


def _mappings() -> int:
    """Return the mappings of this process; 0 where the system does not tell."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0
