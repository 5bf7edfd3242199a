"""Training state on disk: Orbax, the newest steps kept, each written to a temporary name and renamed.

A step holds the state, whose arrays each process writes its part of, and the place in the data of every process.
`CheckpointManager` rather than Orbax v1, whose import path and function names still differ between the releases
that the supported Python versions install.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import LatestN

from jaxspec.errors import InputError
from jaxspec.files import write_error

State = TypeVar("State")

# Orbax's threads print a traceback for every failed write; here it becomes the one line of an InputError.
logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())


class _WriteError(InputError):
    """What `Checkpoints` raises where the directory cannot be written."""


class Checkpoints:
    """Saves and restores (state, place in the data) by step; a context manager, leaving waits for pending writes.

    Args:
      directory: a folder that all processes see, or an address such as `gs://bucket/run`.
      keep: how many of the newest steps are kept. An older one goes only after a newer one is whole.

    Raises InputError where the directory cannot be written, at once or when a pending write is waited for.
    """

    def __init__(self, directory: Path | str, keep: int = 2) -> None:
        path = epath.Path(directory)
        self._directory = path if "://" in str(directory) else path.absolute()
        options = ocp.CheckpointManagerOptions(preservation_policy=LatestN(keep), cleanup_tmp_directories=True)
        with self._told_in_one_line():
            self._manager = ocp.CheckpointManager(self._directory, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, _WriteError):
            return  # closing waits for the write that failed, and raises anew
        with self._told_in_one_line():
            self._manager.wait_until_finished()
            self._manager.close()

    def latest_step(self) -> int | None:
        """The newest step that is whole."""
        return self._manager.latest_step()

    def save(self, step: int, state: object, place: Any, *, wait: bool = False) -> None:
        """Writes in the background, unless it is to `wait`; the arrays are copied first, so they may be donated.

        Args:
          place: this process's place in the data, for JSON.
        """
        with self._told_in_one_line():
            if self._manager.latest_step() != step:
                parts = {"state": ocp.args.StandardSave(state), "data": ocp.args.JsonSave(_gather(place))}
                self._manager.save(step, args=ocp.args.Composite(**parts), force=True)
            if wait:
                self._manager.wait_until_finished()

    def restore(self, state: State) -> tuple[State, Any]:
        """The newest saved state, shaped and placed like `state`, and this process's place in the data.

        The devices may be others than those that saved it, and so may the number of processes where they all
        were at the same place. (`state` itself, None) when nothing is saved.
        """
        step = self._manager.latest_step()
        if step is None:
            return state, None
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        parts = {"state": ocp.args.StandardRestore(abstract), "data": ocp.args.JsonRestore()}
        restored: Any = self._manager.restore(step, args=ocp.args.Composite(**parts))
        return restored["state"], self._own(step, restored["data"]["processes"])

    def _own(self, step: int, places: list[Any]) -> Any:
        if len(places) == jax.process_count():
            return places[jax.process_index()]
        if any(place != places[0] for place in places):
            raise InputError(
                f"{self._directory}: step {step} was saved by {len(places)} processes at different places in their "
                f"data, and now there are {jax.process_count()}; go on with {len(places)}"
            )
        return places[0]

    @contextmanager
    def _told_in_one_line(self) -> Iterator[None]:
        """Turns what the file system says, through Orbax and TensorStore, into an InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = write_error(error)
            if reason is None:
                raise
            manager = getattr(self, "_manager", None)
            last = None if manager is None else max(manager.all_steps(read=True), default=None)
            left = "nothing was saved before" if last is None else f"step {last} is whole and a new start goes on there"
            raise _WriteError(f"checkpoints: cannot write {self._directory}: {reason}; mend that, {left}") from error


def _gather(place: Any) -> dict[str, list[Any]]:
    """The places of all processes, in their order."""
    if jax.process_count() == 1:
        return {"processes": [place]}
    own = np.frombuffer(json.dumps(place).encode(), np.uint8)
    longest = int(np.max(multihost_utils.process_allgather(np.int32(len(own)))))
    padded = np.pad(own, (0, longest - len(own)), constant_values=ord(" "))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return {"processes": [json.loads(row.tobytes()) for row in rows]}
