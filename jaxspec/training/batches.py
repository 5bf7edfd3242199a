"""Batches on their way to the devices: an iterator whose place is saved beside the parameters, read ahead by a thread.

A batch is any pytree of arrays whose first axis is its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import InputError
from jaxspec.sharding import MESH_AXES


class BatchIterator(Protocol):
    """This process's rows of each batch, and a place in the stream; Grain's iterators are such.

    The place is anything that JSON holds, and the same in all processes (it counts batches, say), so that a run may go
    on with another number of them. All processes must give arrays of the same shapes.
    """

    def __next__(self) -> Any: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


@dataclass
class StepBatches:
    """The iterator of a pure function of the step that makes the whole batch: its place is the step."""

    batch_fn: Callable[[int], Any]
    share: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal parts of the rows are this process's."""
    step: int = 0

    def __next__(self) -> Any:
        part, parts = self.share
        batch = self.batch_fn(self.step)
        self.step += 1
        return jax.tree.map(lambda values: np.array_split(values, parts)[part], batch)

    def get_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def read_ahead(
    batches: BatchIterator, count: int, mesh: Mesh, depth: int = 4
) -> Generator[tuple[Any, Any], None, None]:
    """Yield the next `count` batches, each on the mesh, with the iterator's place after it; up to `depth` are ahead.

    The place belongs to the batch that is handed out, however far the thread has read on.
    """
    put = partial(jax.make_array_from_process_local_data, rows_sharding(mesh))

    def read() -> tuple[Any, Any]:
        try:
            batch = next(batches)  # pyright: ignore[reportArgumentType, reportCallIssue]
        except StopIteration:
            raise InputError(
                "data: ended before the last step; repeat it, or train fewer steps"
            ) from None
        return jax.tree.map(put, batch), batches.get_state()

    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        ahead = deque(pool.submit(read) for _ in range(min(depth, count)))
        for place in range(count):
            yield ahead.popleft().result()
            if place + depth < count:
                ahead.append(pool.submit(read))
    finally:
        pool.shutdown(cancel_futures=True)


def rows_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of every array of a batch: its first axis over the mesh's data and fsdp devices."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))


def process_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """(i, n): this process (or another) feeds the i-th of n equal parts of each batch.

    Processes that the `model` axis spans together feed the same part, so n may be less than their number.
    """
    rows = mesh.devices.reshape(-1, mesh.shape["model"])
    fed = {
        process: tuple(
            i for i, row in enumerate(rows) if process in {device.process_index for device in row}
        )
        for process in {device.process_index for device in mesh.devices.flat}
    }
    parts = sorted(set(fed.values()))
    return parts.index(fed[jax.process_index() if process is None else process]), len(parts)
