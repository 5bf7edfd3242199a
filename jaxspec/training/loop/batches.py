"""Feed batches to the devices: a thread reads ahead, and the position can be saved.

A batch is any pytree of arrays whose first axis is its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import InputError
from jaxspec.sharding import MESH_AXES

Batch = TypeVar("Batch")
Made = TypeVar("Made", covariant=True)
DEPTH = 4
"""Batches on the mesh that are read ahead."""


class BatchIterator(Protocol[Made]):
    """Iterate over this process's rows of each batch, with a position in the stream, as Grain does.

    The position is JSON and the same in all processes (a count of batches, say), so a run may go on
    with another number of processes. All processes give arrays of the same shapes.
    """

    def __next__(self) -> Made: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


@dataclass
class StepBatches(Generic[Batch]):
    """Iterate over a function of the step that makes whole batches. The position is the step."""

    batch_fn: Callable[[int], Batch]
    share: tuple[int, int] = (0, 1)
    """(i, n): this process takes the i-th of n equal parts of the rows."""
    step: int = 0

    def __next__(self) -> Batch:
        part, parts = self.share
        batch = self.batch_fn(self.step)
        self.step += 1
        return jax.tree.map(lambda values: np.array_split(values, parts)[part], batch)

    def get_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def as_iterator(
    batches: BatchIterator[Batch] | Callable[[int], Batch], mesh: Mesh
) -> BatchIterator[Batch]:
    """Return an iterator as it is, or the iterator over a function of the step."""
    if callable(batches):
        return StepBatches(batches, process_share(mesh))
    return batches


def read_ahead(
    batches: BatchIterator[Batch], count: int, mesh: Mesh
) -> Generator[tuple[Batch, Any], None, None]:
    """Yield the next `count` batches on the mesh, each with the iterator's position after it.

    A thread reads up to `DEPTH` batches ahead; each position belongs to the batch next to it.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        ahead = deque(pool.submit(_read, batches, mesh) for _ in range(min(DEPTH, count)))
        for number in range(count):
            yield ahead.popleft().result()
            if number + DEPTH < count:
                ahead.append(pool.submit(_read, batches, mesh))
    finally:
        pool.shutdown(cancel_futures=True)


def _read(batches: BatchIterator[Batch], mesh: Mesh) -> tuple[Batch, Any]:
    try:
        batch = next(batches)  # pyright: ignore[reportArgumentType, reportCallIssue]
    except StopIteration:
        raise InputError("data: ended before the last step; train fewer steps") from None
    rows = rows_sharding(mesh)
    placed = jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)
    return placed, batches.get_state()


def rows_sharding(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a batch's arrays: the first axis over the data and fsdp devices."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))


def process_share(mesh: Mesh, process: int | None = None) -> tuple[int, int]:
    """Return (i, n): a process, by default this one, feeds the i-th of n equal parts of each batch.

    Processes that share a `model` axis feed the same part, so n may be less than their number.
    """
    rows = mesh.devices.reshape(-1, mesh.shape["model"])
    row_sets = {
        process: tuple(
            i for i, row in enumerate(rows) if process in {device.process_index for device in row}
        )
        for process in {device.process_index for device in mesh.devices.flat}
    }
    parts = sorted(set(row_sets.values()))
    return parts.index(row_sets[jax.process_index() if process is None else process]), len(parts)
