"""Run two processes of one cluster, side by side."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.conftest import ROOT


def free_address() -> str:
    """Return an address of this machine at which nothing listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def run_pair(code: str, words: Callable[[str, int], Sequence[object]]) -> list[tuple[str, str]]:
    """Run Python code in two processes; return the standard output and error of each.

    Args:
      words: (the cluster's address, a process's number) -> its arguments.
    """
    address, environment = free_address(), os.environ | {"PYTHONPATH": str(ROOT)}
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words(address, number))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for number in range(2)
    ]  # fmt: skip
    said = [one.communicate(timeout=900) for one in pair]
    assert [one.returncode for one in pair] == [0, 0], said
    return said
