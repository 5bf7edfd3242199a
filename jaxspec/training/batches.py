"""Where batches come from: an iterator whose place is saved beside the parameters, read ahead by a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from jaxspec.errors import InputError

Batch = dict[str, np.ndarray]
Placed = TypeVar("Placed")


class BatchIterator(Protocol):
    """This process's rows of each batch, and a place in the stream; Grain's iterators are such.

    The place is anything that JSON holds. Where it is the same in all processes (it counts batches, say), a run
    may go on with another number of them. All processes must give arrays of the same shapes.
    """

    def __next__(self) -> Batch: ...
    def get_state(self) -> Any: ...
    def set_state(self, state: Any) -> None: ...


@dataclass
class StepBatches:
    """The iterator of a pure function of the step that makes the whole batch: its place is the step."""

    batch_fn: Callable[[int], Batch]
    share: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal parts of the rows are this process's."""
    step: int = 0

    def __next__(self) -> Batch:
        part, parts = self.share
        batch = self.batch_fn(self.step)
        self.step += 1
        if parts == 1:
            return batch
        return {name: np.array_split(value, parts)[part] for name, value in batch.items()}

    def get_state(self) -> dict[str, int]:
        return {"step": self.step}

    def set_state(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def read_ahead(
    batches: BatchIterator, count: int, put: Callable[[Batch], Placed], depth: int = 4
) -> Generator[tuple[Placed, Any], None, None]:
    """The next `count` batches, each put on the devices, with the iterator's place after it; up to `depth` ahead.

    The place belongs to the batch that is handed out, however far the thread has read on.
    """

    def read() -> tuple[Placed, Any]:
        try:
            batch = next(batches)  # pyright: ignore[reportArgumentType, reportCallIssue]
        except StopIteration:
            raise InputError("data: ended before the last step; repeat it, or train fewer steps") from None
        return put(batch), batches.get_state()

    pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        ahead = deque(pool.submit(read) for _ in range(min(depth, count)))
        for place in range(count):
            yield ahead.popleft().result()
            if place + depth < count:
                ahead.append(pool.submit(read))
    finally:
        pool.shutdown(cancel_futures=True)
