"""Training state on disk: Orbax, newest two steps kept, each written to a temporary name and renamed.

`CheckpointManager` rather than Orbax v1, whose import path and function names still differ between the releases
that the supported Python versions install.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")


class Checkpoints:
    """Saves and restores one pytree by step; use it as a context manager, leaving waits for pending writes."""

    def __init__(self, directory: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manager.wait_until_finished()
        self._manager.close()

    def save(self, step: int, state: object) -> None:
        """Writes `state` in the background; its arrays are copied first, so the caller may donate them."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, state: State) -> State:
        """The newest saved state, shaped and placed like `state`; `state` itself when there is none."""
        step = self._manager.latest_step()
        if step is None:
            return state
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        restored: Any = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return restored
