"""Notice that a run is to end, by the machine or at the keyboard, and the exit that follows it."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxspec.command import silence_unread


class Preempted(SystemExit):
    """A run was told to end (SIGTERM, Ctrl-C, SIGHUP) and has saved all; the same command goes on.

    Exits with 128 and the signal's number, as shells have it: 143, 130, 129.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)


class Preemption:
    """Watches, as a context manager, for signals to end: to this process or, with several, to any of them.

    With several, JAX's coordination service agrees on the step after which all of them save; it knows SIGTERM only,
    and other signals are handed on as that. Ignored ones stay so: `nohup` asks for it.
    """

    def __enter__(self) -> Preemption:
        self.number = int(signal.SIGTERM)
        self._told = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (
            signal.SIGINT,
            signal.SIGHUP,
            *[signal.SIGTERM] * (jax.process_count() == 1),
        ):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        silence_unread()  # the terminal may be gone, and saving is not to fail for a word about it
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            signal.signal(number, self._before[number] or signal.SIG_DFL)
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)
        else:
            self._told, self.number = True, number

    def reached(self, step: int) -> bool:
        """Return whether to save and leave after this step; every process asks after every step."""
        return (
            multihost_utils.reached_preemption_sync_point(step)
            if jax.process_count() > 1
            else self._told
        )
