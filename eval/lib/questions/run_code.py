"""Run a model's program in a process with limits, to see whether its tests pass.

The limits stop a program that loops or fills the memory. They are no sandbox: the program runs as
the user and may read and remove the user's files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory


@dataclass(frozen=True)
class RunsCode:
    """The option of a script that runs programs."""

    run_code: bool = False
    """Run the models' HumanEval programs against the tests. Nobody has read this code: it gets 5
    seconds, a gigabyte and, on Linux where possible, no network, but otherwise your rights. Run it
    in a container."""


SECONDS = 5.0
MEGABYTES = 1024
_PASSED = 85
"""Exit code of a program that reaches its end; one that calls `exit` has another."""

_CHILD = f"""
import ctypes, os, resource, sys
try:
    ctypes.CDLL(None).unshare(0x50000000)  # CLONE_NEWUSER, CLONE_NEWNET: an empty network
except (AttributeError, OSError):
    pass
sys.modules["_socket"] = sys.modules["socket"] = None
seconds, size = int(sys.argv[1]), {MEGABYTES} << 20
limits = dict(RLIMIT_AS=size, RLIMIT_DATA=size, RLIMIT_CPU=seconds)
limits |= dict(RLIMIT_FSIZE=1 << 20, RLIMIT_CORE=0, RLIMIT_NPROC=0)
for name, most in limits.items():
    try:
        resource.setrlimit(getattr(resource, name), (most, most))
    except (AttributeError, OSError, ValueError):
        pass
exec(compile(sys.stdin.buffer.read(), "answer", "exec"), {{"__name__": "answer"}})
os._exit({_PASSED})
"""


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Return whether a program ends without an error, within so many seconds and a gigabyte.

    It runs in an empty folder of its own, without a network. If the system grants no network
    namespace, only the module `socket` is missing.
    """
    with TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD, str(int(seconds) + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"OPENBLAS_NUM_THREADS": "1"},  # numpy may start no threads
            start_new_session=True,
        )
        try:
            child.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and its children
            child.wait()
        return child.returncode == _PASSED
