"""Feed batches to the devices: threads make them ahead of their steps.

A batch is any pytree of arrays whose first axis is its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import InputError
from jaxspec.sharding import MESH_AXES

Made = TypeVar("Made")
Batches = Callable[[int], Any]
"""Makes this process's rows of a step's batch; called from one thread, with one step after the
other. All processes make arrays of the same shapes."""
ON_MESH = 3
"""Maximum batches on the mesh after the one that is asked for."""


def own_rows(batches: Batches, mesh: Mesh) -> Batches:
    """Return this process's rows of batches that a function makes whole."""
    part, parts = process_share(mesh)
    return lambda step: jax.tree.map(lambda x: np.array_split(x, parts)[part], batches(step))


def made_ahead(
    make: Callable[[int], Made], steps: range, ahead: int, threads: int = 1
) -> Generator[Made, None, None]:
    """Yield what a function makes for each step, in order.

    Threads make the results of up to `ahead` steps after the one that is asked for.
    """
    pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")
    try:
        made = deque(pool.submit(make, step) for step in steps[:ahead])
        for step in steps:
            if step + ahead in steps:
                made.append(pool.submit(make, step + ahead))
            yield made.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def read_ahead(batches: Batches, steps: range, mesh: Mesh) -> Generator[Any, None, None]:
    """Yield the batches of the steps on the mesh, which a thread puts there ahead."""
    rows = rows_sharding(mesh)

    def put(step: int) -> Any:
        batch = batches(step)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), batch)

    return made_ahead(put, steps, ON_MESH)


def check_rows(batch: Any, most: int) -> None:
    """Raise InputError where each of several processes makes whole batches, not its own rows."""
    rows = len(jax.tree.leaves(batch)[0])
    if jax.process_count() > 1 and rows > most:
        raise InputError(
            f"batches: {jax.process_count()} processes make {rows} rows for a batch of {most}; "
            "let each make its own rows, as own_rows does"
        )


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
    if sum(map(len, parts)) > len(rows):
        raise InputError(
            f"mesh: model {mesh.shape['model']} neither divides the devices of a process nor is a "
            "multiple of them; give one that does"
        )
    return parts.index(row_sets[jax.process_index() if process is None else process]), len(parts)
