"""End a run on signals from the machine or the keyboard, once its state is saved."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxspec.command import silence_unread

_POINTS = itertools.count(1)
"""Numbers of the points at which this process asks whether to save and exit."""


class Preempted(SystemExit):
    """Report that a signal (SIGTERM, Ctrl-C, SIGHUP) ended a run, which has saved everything.

    The exit code is 128 plus the signal's number, as in shells: 143, 130, 129.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(128 + number)


class Preemption:
    """Watch for signals, to any process of a run, that end it; a context manager.

    Several processes agree through JAX's coordination service on the step that all of them save. It
    knows only SIGTERM, so other signals are sent on as that. Ignored signals stay ignored, as
    `nohup` wants.
    """

    def __enter__(self) -> Preemption:
        self.number = int(signal.SIGTERM)
        self._came = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self
        alone = [signal.SIGTERM] * (jax.process_count() == 1)
        for number in (signal.SIGINT, signal.SIGHUP, *alone):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        silence_unread()  # if the terminal is gone, printing must not keep the run from saving
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for the step
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            print("\nsaving after this step; a second Ctrl-C stops at once", file=sys.stderr)
        if jax.process_count() > 1:
            signal.raise_signal(signal.SIGTERM)
        else:
            self._came, self.number = True, number

    def reached(self) -> bool:
        """Return whether to save and exit at this point of the run.

        Every process asks at the same points. They are numbered without a gap from the start of the
        process, not of the run or stage: at the point after the largest that any process had
        reached when the signal came, all save.
        """
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(next(_POINTS))
        return self._came
