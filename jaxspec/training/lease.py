"""One run at a time in a place: a lock file on this machine's disks, a lease in a bucket."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from etils import epath

from jaxspec.cluster import on_first
from jaxspec.errors import InputError
from jaxspec.files import sole, write_text, writing

RENEWED = 20.0
"""Seconds between two renewals of a lease."""
PATIENCE = 90.0
"""Seconds without a renewal after which a lease counts as left behind."""


def in_bucket(place: object) -> bool:
    """Return whether a place is an address such as gs://bucket/run."""
    return "://" in str(place)


def write_whole(path: epath.Path, text: str) -> None:
    """Write a text that readers see whole or not at all, as an object in a bucket is."""
    if not in_bucket(path):
        return write_text(Path(path), text)
    with writing(str(path)):
        path.write_text(text)


class Lease:
    """Keeps other runs out of a place; a context manager.

    On a disk it is a lock file (`sole`). In a bucket it is an object that a thread renews. A run
    that finds one watches it for `PATIENCE` seconds: if it changes, another run holds it; if not,
    a slice that is gone left it.

    Raises InputError while another run holds the place.
    """

    def __init__(self, place: str | Path | epath.Path) -> None:
        self._path = epath.Path(place)
        self._own = f"process {os.getpid()} on {socket.gethostname()}, run {uuid.uuid4().hex[:8]}"
        self._ended, self._lost = threading.Event(), threading.Event()
        self._stack = ExitStack()

    def __enter__(self) -> Lease:
        if not in_bucket(self._path):
            self._stack.enter_context(sole(Path(self._path)))
            return self
        with writing(str(self._path)):
            if found := self._found():
                wait = f"waiting {PATIENCE:.0f} s to see whether it still runs"
                print(f"{self._path}: held by {found['holder']}; {wait}", file=sys.stderr)
                time.sleep(PATIENCE)
                if self._found() not in ({}, found):
                    self._refuse(found["holder"])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write()
        self._renewals = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewals.start()
        self._stack.callback(self._release)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Raise InputError once another run holds the lease."""
        if self._lost.is_set():
            self._refuse("another run now")

    def _refuse(self, holder: str) -> None:
        raise InputError(f"{self._path}: held by {holder}; end that run, or give another place")

    def _found(self) -> dict[str, Any]:
        try:
            return json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}

    def _write(self) -> None:
        self._path.write_text(json.dumps({"holder": self._own, "time": time.time()}))

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED):
            with suppress(Exception):  # a network that fails once; the next renewal tries again
                if self._found().get("holder") != self._own:
                    return self._lost.set()
                self._write()

    def _release(self) -> None:
        self._ended.set()
        self._renewals.join()
        with suppress(Exception):
            if self._found().get("holder") == self._own:
                self._path.unlink()


@contextmanager
def on_first_alone(*leases: Lease) -> Iterator[Callable[[], None]]:
    """Hold leases in the first of several processes. Yields a function that checks them.

    Raises InputError in all processes where one cannot be had.
    """
    with ExitStack() as held:
        on_first(lambda: [held.enter_context(lease) for lease in leases] and None)

        def check() -> None:
            for lease in leases:
                lease.check()

        yield check
