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


def join_cluster(address: str) -> None:
    """Join this process to others that compute together; call it before using a device.

    Args:
      address: Empty for a single process; `auto` on TPU slices, under SLURM and Open MPI; otherwise
        `HOST:PORT,COUNT,INDEX`: address of process 0, number of processes, index of this one.

    Raises InputError for another form, or if `auto` finds nothing.
    """
    if not address:
        return
    if address == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise InputError("cluster: auto finds no job; give HOST:PORT,COUNT,INDEX") from error
        return
    match = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", address)
    if match is None or int(match[3]) >= int(match[2]):
        raise InputError(f"cluster: {address!r}; give auto, or HOST:PORT,COUNT,INDEX (from 0)")
    jax.distributed.initialize(match[1], int(match[2]), int(match[3]))


def process() -> tuple[int, int]:
    """Return (i, n): this is process i of n. For a single process no device is touched."""
    return (
        (jax.process_index(), jax.process_count()) if jax.distributed.is_initialized() else (0, 1)
    )


def in_all(work: Callable[[], Made]) -> list[Made]:
    """Do the work in every process and return all results, in the order of the processes.

    If one process raises, all raise. All processes must make this call, and results must pickle.
    """
    if process()[1] == 1:
        return [work()]
    result = error = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    failure = None
    if error is not None:  # an InputError's line is ours, and ends with the mend
        is_input = isinstance(error, InputError)
        failure = (type(error), str(error)) if is_input else (RuntimeError, first_line(error))
    payload = np.frombuffer(pickle.dumps((result, failure)), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(payload.size))
    wide = multihost_utils.process_allgather(np.pad(payload, (0, int(sizes.max()) - payload.size)))
    outcomes = [pickle.loads(row[:size].tobytes()) for row, size in zip(np.asarray(wide), sizes)]
    if error is not None:
        raise error
    for number, (_, other) in enumerate(outcomes):
        if other is not None:
            raise other[0](f"process {number}: {other[1]}")
    return [result for result, _ in outcomes]


def on_first(work: Callable[[], Made]) -> Made:
    """Do the work in the first process and return its result in all; errors are as in `in_all`."""
    first = process()[0] == 0
    return in_all(lambda: work() if first else None)[0]  # type: ignore[return-value]


@contextmanager
def sole_on_first(*places: str | Path) -> Iterator[None]:
    """Hold lock files in the first process while the block runs; buckets have no locks.

    Raises InputError in all processes while another run holds one.
    """
    files = [Path(path) for path in places if "://" not in str(path)]
    with ExitStack() as locks:
        on_first(lambda: [locks.enter_context(sole(file)) for file in files] and None)
        yield


def map_over_processes(
    work: Callable[[Sequence[Item]], Sequence[Made]], items: Sequence[Item]
) -> list[Made]:
    """Return the work's results for all items, in their order; each process takes a share."""
    index, count = process()
    shares = in_all(lambda: list(work(items[index::count])))
    return [shares[i % count][i // count] for i in range(len(items))]
