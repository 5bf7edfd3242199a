"""Let processes compute together: they find each other, share work, and fail together."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.errors import InputError, first_line
from jaxspec.files import sole

Item = TypeVar("Item")
Made = TypeVar("Made")


def join_cluster(place: str) -> None:
    """Join this process to others that compute together; call it before using a device.

    Args:
      place: Empty for a single process; `auto` on TPU slices, under SLURM and Open MPI; otherwise
        `HOST:PORT,COUNT,INDEX`: address of process 0, number of processes, index of this one.

    Raises InputError for another form, or if `auto` finds nothing.
    """
    if not place:
        return
    if place == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise InputError("cluster: auto finds no job; give HOST:PORT,COUNT,INDEX") from error
        return
    found = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", place)
    if found is None or int(found[3]) >= int(found[2]):
        raise InputError(f"cluster: {place!r}; give auto, or HOST:PORT,COUNT,INDEX (from 0)")
    jax.distributed.initialize(found[1], int(found[2]), int(found[3]))


def process() -> tuple[int, int]:
    """Return (i, n): this is process i of n. For a single process no device is touched."""
    return (
        (jax.process_index(), jax.process_count()) if jax.distributed.is_initialized() else (0, 1)
    )


def in_all(work: Callable[[], Made]) -> list[Made]:
    """Do the work in every process and return all results, in the order of the processes.

    If one process raises, all raise. All processes must call this at the same place, and results
    must pickle.
    """
    if process()[1] == 1:
        return [work()]
    made, error = None, None
    try:
        made = work()
    except Exception as raised:
        error = raised
    failure = error and (
        type(error) if isinstance(error, InputError) else RuntimeError,
        first_line(error),
    )
    own = np.frombuffer(pickle.dumps((made, failure)), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(own.size))
    wide = multihost_utils.process_allgather(np.pad(own, (0, int(sizes.max()) - own.size)))
    found = [pickle.loads(row[:size].tobytes()) for row, size in zip(np.asarray(wide), sizes)]
    if error is not None:
        raise error
    for number, (_, other) in enumerate(found):
        if other is not None:
            raise other[0](f"process {number}: {other[1]}")
    return [made for made, _ in found]


def on_first(work: Callable[[], Made]) -> Made:
    """Do the work in the first process and return its result in all; errors are as in `in_all`."""
    first = process()[0] == 0
    return in_all(lambda: work() if first else None)[0]  # type: ignore[return-value]


@contextmanager
def sole_on_first(*places: str | Path) -> Iterator[None]:
    """Hold lock files in the first process while the block runs; buckets have no locks.

    Raises InputError in all processes while another run holds one.
    """
    files = [Path(place) for place in places if "://" not in str(place)]
    with ExitStack() as held:
        on_first(lambda: [held.enter_context(sole(file)) for file in files] and None)
        yield


def map_over_processes(
    work: Callable[[Sequence[Item]], Sequence[Made]], items: Sequence[Item]
) -> list[Made]:
    """Return the work's results for all items, in their order; each process takes a share."""
    index, count = process()
    shares = in_all(lambda: list(work(items[index::count])))
    return [shares[i % count][i // count] for i in range(len(items))]
