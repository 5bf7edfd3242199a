"""Notice that the machine is about to be taken away, and the exit that follows it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils


class Preempted(SystemExit):
    """A run was told to end (SIGTERM) and has saved all; the same command goes on. Exits with code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Preemption:
    """Watches, as a context manager, for SIGTERM: to this process or, with several, to any of them.

    With several, JAX's coordination service agrees on the step after which all of them save.
    """

    def __enter__(self) -> Preemption:
        self._told = False
        self._before: Any = None
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._tell)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        self._told = True

    def reached(self, step: int) -> bool:
        """Whether to save and leave after this step; every process asks after every step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._told
