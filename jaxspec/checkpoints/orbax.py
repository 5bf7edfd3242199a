"""Save training state with Orbax, which keeps the newest steps and renames each once it is whole.

A step holds the state, of which each process writes its part, and what decides the run. It also
holds checksums: Orbax does not notice a flipped bit.
Orbax v1 is not used, since its names still differ between the releases that the supported Python
versions install.
"""

from __future__ import annotations

import gc
import itertools
import json
import logging
import sys
import time
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import LatestN

from jaxspec.cluster import in_all
from jaxspec.errors import InputError
from jaxspec.files import WriteError, writing
from jaxspec.typing import Array

State = TypeVar("State")
SHOWN = 60.0
"""Seconds after which a network file system shows a new folder to all machines."""

# Orbax's threads print a traceback of every error that they raise, and lines for files that it does
# not need; here one InputError says it.
logging.getLogger("absl").addFilter(
    lambda record: (
        not (record.exc_info and "orbax" in record.pathname)
        and "Failed to json parse Metadata file" not in record.getMessage()
    )
)


@cache
def _silence_closed_loops() -> None:
    """Let the process not print calls into an event loop that is closed.

    Orbax closes its loop at the first write that fails. For each of the others TensorStore then
    prints a traceback, from its own threads, so this lasts.
    """
    usual = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            usual(unraisable)

    sys.unraisablehook = report


class Checkpoints:
    """Keep the state by step; leaving the context waits for pending writes.

    Args:
      directory: Folder that all processes see, or an address such as `gs://bucket/run`.
      keep: Number of newest steps to keep; an older one is removed after a newer one is whole.
      run: Everything that decides the result, for JSON; it is saved with every step.

    Raises WriteError where the directory cannot be written, at once or at the end of a write, and
    InputError where a process does not see it.
    """

    def __init__(self, directory: Path | str, keep: int = 2, run: Any = None) -> None:
        path = epath.Path(directory)
        self._directory = path if "://" in str(directory) else path.absolute()
        self._run = run
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(keep), cleanup_tmp_directories=True
        )
        _silence_closed_loops()
        with self._writing():
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        self._check_shared()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, WriteError):
            return  # closing waits for the write that failed, and raises anew
        with self._writing():
            self._manager.wait_until_finished()
            self._manager.close()

    def newest(self) -> tuple[int, Any] | None:
        """Return the newest readable step and its `run`; None when nothing is saved."""
        for step in self._steps():
            parts, _ = self._read(step, data=ocp.args.JsonRestore())
            if parts is not None:
                return step, parts["data"].get("run")
        return None

    def save(self, step: int, state: object, *, wait: bool = False) -> None:
        """Save a step in the background. Its arrays are copied first, so that they may be donated.

        wait: Return after the step is written.
        """
        with self._writing():
            if self._manager.latest_step() != step:
                saved = {"run": self._run, "state": int(_checksum(state))}
                data = ocp.args.JsonSave(saved | {"sum": _json_checksum(saved)})
                parts = {"state": ocp.args.StandardSave(state), "data": data}
                self._manager.save(step, args=ocp.args.Composite(**parts), force=True)
            if wait:
                self._manager.wait_until_finished()

    def restore(self, state: State) -> State:
        """Return the newest saved state, shaped and sharded like `state`, or else `state` itself.

        Other devices and processes may have saved it. Damaged steps are named, and renamed if an
        older one is whole.

        Raises InputError where all are damaged.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        damaged: dict[int, str] = {}
        for step in self._steps():
            parts, reason = self._read(
                step, state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
            )
            if parts is not None:
                self._set_aside(damaged, step)
                return parts["state"]
            damaged[step] = reason
        for step, reason in damaged.items():
            why = f"step {step} cannot be read ({reason}), nor any before it"
            raise InputError(f"{self._directory}: {why}; train in another directory")
        return state

    def _check_shared(self) -> None:
        """Raise InputError where a process does not see the folder that the first has made.

        Each would write its part into a folder of its own, and no checkpoint could be read. All see
        the same bucket, in which an empty folder does not exist.
        """
        if jax.process_count() == 1 or "://" in str(self._directory):
            return

        def sees() -> bool:
            end = time.monotonic() + SHOWN
            while not (exists := self._directory.exists()) and time.monotonic() < end:
                time.sleep(1)
            return exists

        for number, exists in enumerate(in_all(sees)):
            if not exists:
                raise InputError(
                    f"{self._directory}: process {number} does not see this folder; give all "
                    "processes one folder, or an address such as gs://bucket/run, as checkpoints"
                )

    def _steps(self) -> list[int]:
        """Return all steps that have a folder, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def _read(self, step: int, **parts: Any) -> tuple[Any, str]:
        """Return these parts of a step, or None and the reason; the same in every process."""
        contents, reason = None, ""
        try:
            with _raised_once():
                contents = self._manager.restore(step, args=ocp.args.Composite(**parts))
                _check_sums(contents)
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # Orbax and TensorStore raise anything of files that are damaged
            contents, reason = None, f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
        is_read = np.bool_(contents is not None)
        if jax.process_count() > 1 and not multihost_utils.process_allgather(is_read).all():
            contents, reason = None, reason or "another process cannot"
        return contents, reason

    def _set_aside(self, damaged: dict[int, str], whole: int) -> None:
        """Rename the folders of damaged steps, so that a run may save these steps anew."""
        for step, reason in damaged.items():
            if jax.process_index() == 0:
                names = (f"{step}.damaged{number or ''}" for number in itertools.count())
                aside = next(name for name in names if not (self._directory / name).exists())
                with self._writing():
                    (self._directory / str(step)).rename(self._directory / aside)
                line = f"step {step} is damaged ({reason}), now {aside}; step {whole} is whole"
                print(f"{self._directory}: {line}", file=sys.stderr)
        if damaged:
            multihost_utils.sync_global_devices("damaged steps")
            self._manager.reload()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with writing(str(self._directory), self._advice), _raised_once():
            yield

    def _advice(self) -> str:
        manager = getattr(self, "_manager", None)
        if manager is not None:
            manager.reload()
        last = None if manager is None else max(manager.all_steps(), default=None)
        advice = "nothing was saved before" if last is None else f"step {last} is whole"
        return f"start again ({advice})"


@contextmanager
def _raised_once() -> Iterator[None]:
    """Keep coroutines and tasks that a failing block leaves from printing its error again."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # coroutines
    tasks = logging.getLogger("asyncio")
    before, tasks.disabled = tasks.disabled, True
    try:
        yield
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # which hold them
        gc.collect()
        raise
    finally:
        sys.unraisablehook = hook
        tasks.disabled = before


def forget(directory: str) -> None:
    """Remove a directory with everything in it; WriteError where that fails."""
    with writing(directory):
        epath.Path(directory).rmtree(missing_ok=True)


def _check_sums(parts: Any) -> None:
    """Raise ValueError unless the checksums of what was written match."""
    data = dict(parts["data"])
    if "sum" in data and data.pop("sum") != _json_checksum(data):
        raise ValueError("what it says of its run is not what was saved")
    if "state" in parts and data.get("state") not in (None, int(_checksum(parts["state"]))):
        raise ValueError("its arrays are not those that were saved")


def _json_checksum(values: Any) -> int:
    read = json.loads(json.dumps(values))  # numbers that are keys become text, and sort differently
    return zlib.crc32(json.dumps(read, sort_keys=True).encode())


@jax.jit
def _checksum(state: Any) -> Array:
    """Return a checksum of the state's bits, wherever its arrays are placed; they are not moved."""
    total = jnp.uint32(0)
    for leaf in map(jnp.asarray, jax.tree.leaves(state)):
        unsigned = jnp.dtype(f"u{min(leaf.dtype.itemsize, 4)}")
        bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
        axes = (jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) for axis in range(bits.ndim))
        index = sum((number * (2 * axis + 7) for axis, number in enumerate(axes)), jnp.uint32(0))
        total = 31 * total + jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
    return total
