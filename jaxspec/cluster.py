"""Processes that compute together: how they find each other, share work, and fail alike."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxspec.errors import InputError, first_line

Item = TypeVar("Item")
Made = TypeVar("Made")


def join_cluster(place: str) -> None:
    """Make this process one of several that compute together; to be called before anything touches a device.

    Args:
      place: empty, it is alone; `auto`, TPU slices, SLURM and Open MPI say who belongs together; else
        `HOST:PORT,COUNT,INDEX`, where process 0 can be reached, how many there are, and which one this is.

    Raises InputError for another form, or where `auto` finds nothing.
    """
    if not place:
        return
    if place == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise InputError(
                "cluster: auto finds no TPU, SLURM or Open MPI job; give HOST:PORT,COUNT,INDEX"
            ) from error
        return
    found = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", place)
    if found is None or int(found[3]) >= int(found[2]):
        raise InputError(
            f"cluster: {place!r}; give auto, or HOST:PORT,COUNT,INDEX with INDEX from 0 to COUNT - 1"
        )
    jax.distributed.initialize(found[1], int(found[2]), int(found[3]))


def process() -> tuple[int, int]:
    """Return (i, n): this is the i-th of n processes that compute together. Alone it looks at no device."""
    return (
        (jax.process_index(), jax.process_count()) if jax.distributed.is_initialized() else (0, 1)
    )


def in_all(work: Callable[[], Made]) -> list[Made]:
    """Return what the work gives in each process, in their order; where it raises in one of them, raise in all.

    All must call it at the same place, and what it gives must pickle.
    """
    if process()[1] == 1:
        return [work()]
    made, error = None, None
    try:
        made = work()
    except Exception as raised:
        error = raised
    told = error and (
        type(error) if isinstance(error, InputError) else RuntimeError,
        first_line(error),
    )
    own = np.frombuffer(pickle.dumps((made, told)), np.uint8)
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
    """Do the work in the first process alone and return what it gives in all, as `in_all`."""
    first = process()[0] == 0
    return in_all(lambda: work() if first else None)[0]  # type: ignore[return-value]


def spread(work: Callable[[Sequence[Item]], Sequence[Made]], items: Sequence[Item]) -> list[Made]:
    """Do the work on a share of the items in each process, and return in all what it gives of all, in their order."""
    index, count = process()
    shares = in_all(lambda: list(work(items[index::count])))
    return [shares[i % count][i // count] for i in range(len(items))]
