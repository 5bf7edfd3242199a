"""Start and end commands: presets, Ctrl-C during imports, bad input, closed pipes."""

from __future__ import annotations

import atexit
import errno
import os
import pkgutil
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxspec.errors import InputError, nearest, printable

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def script_name() -> str:
    """Return the name of this process's script in the form of `python -m`: `train.recipe`."""
    path = Path(sys.argv[0]).with_suffix("")
    return f"{path.parent.name}.{path.name}"


def run_script(main: Callable[..., object], description: str | None = None) -> None:
    """Run a script under `train/` or `eval/`; its options are the parameters of `main`.

    Args:
      description: Beginning of --help; by default the docstring of `main`.
    """
    import tyro  # here, because this module is imported by more than scripts

    name = script_name()
    with input_errors(name):
        tyro.cli(main, prog=f"python -m {name}", description=description)


def expect_interrupt(program: str) -> None:
    """Let Ctrl-C end the process with one line during imports, until `input_errors` takes over.

    Imports take seconds, and jaxlib's modules do not survive an exception. This also keeps the
    hub's progress bars out of pipes and files.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def leave(*_: object) -> None:
        os.write(sys.stderr.fileno(), f"{program}: interrupted\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
        _expected.append(leave)


_expected: list[object] = []


@contextmanager
def input_errors(program: str) -> Iterator[None]:
    """Report user errors and Ctrl-C in one line on standard error; other exceptions pass.

    Exit codes: 2 for an `InputError` or a full disk; 130 for Ctrl-C; 141, without a line, for a
    closed pipe, as after `| head`.
    """
    if signal.getsignal(signal.SIGINT) in _expected:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            yield
        finally:
            print(end="", flush=True)  # a failing write raises here, not at exit
    except InputError as error:
        _end(f"{program}: error: {printable(' '.join(str(error).split()))}", 2)
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends it silently
        atexit.register(os._exit, 130)  # XLA crashes if it is taken down while a program runs
        _end(f"{program}: interrupted", 130)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and silence_unread():
            sys.exit(141)
        if error.errno not in _NO_ROOM:
            raise
        where = printable(str(error.filename or "output"))
        _end(f"{program}: error: {where}: cannot be written: {error.strerror}", 2)


def silence_unread() -> bool:
    """Redirect closed pipes and terminals to os.devnull; return whether there were any."""
    unread = [stream for stream in (sys.stdout, sys.stderr) if _unread(stream)]
    for stream in unread:
        _silence(stream)
    return bool(unread)


def _unread(stream: TextIO) -> bool:
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no file of the system's
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _silence(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _end(line: str, code: int) -> NoReturn:
    with suppress(OSError):
        if "tqdm" in sys.modules:
            for bar in list(sys.modules["tqdm"].tqdm._instances):  # so that each bar ends its line
                bar.leave = True
                bar.close()
        clear = "\r\033[K" if sys.stderr.isatty() else ""  # clears a progress line
        print(f"{clear}{line}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:  # or Python would retry at exit and report it
            _silence(stream)
    sys.exit(code)


def load_preset(kind: str, name: str) -> Any:
    """Return the attribute `config` of `configs/<kind>/<name>.py`, where `configs` is importable.

    Raises InputError for an unknown name, with the nearest one.
    """
    known = preset_names(kind)
    if name not in known:
        folder = f"configs/{kind.replace('.', '/')}"
        raise InputError(f"preset {name!r}: no such file under {folder}; {nearest(name, known)}")
    return import_module(f"configs.{kind}.{name}").config


def preset_names(kind: str) -> list[str]:
    """Return the names of all presets of a kind."""
    package = f"configs.{kind}"
    spec = find_spec(package) if find_spec("configs") else None
    if spec is None or spec.submodule_search_locations is None:
        raise InputError(f"presets: {package} is not importable; run in a checkout of the project")
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
