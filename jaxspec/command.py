"""Start and end commands: presets, Ctrl-C during imports, bad input, closed pipes."""

from __future__ import annotations

import atexit
import errno
import io
import os
import pkgutil
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NoReturn, TextIO

from jaxspec.errors import InputError, first_line, nearest, printable, reading

_NARROWEST = 40
"""Minimum columns of a terminal."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def script_name() -> str:
    """Return the name of this process's script in the form of `python -m`: `train.recipe`."""
    path = Path(sys.argv[0]).with_suffix("")
    return f"{path.parent.name}.{path.name}"


def start(program: str) -> None:
    """Prepare a command's process, and let Ctrl-C end its imports with one line.

    Imports take seconds, and jaxlib's modules do not survive an exception; `input_errors` takes
    over. This also keeps the hub's progress bars out of pipes and files.
    """
    _prepare_console()
    try:
        os.getcwd()
    except FileNotFoundError:
        _end(f"{program}: error: working directory: it was removed; change to one that exists", 2)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def leave(*_: object) -> None:
        os.write(sys.stderr.fileno(), f"{program}: interrupted\n".encode())
        os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
        _expected.append(leave)


def _prepare_console() -> None:
    """Make the console take all that a command writes.

    Closed streams become os.devnull: no file that is opened later gets their numbers, which
    libraries write to. Characters that the encoding lacks are written as escapes, as standard
    error's are. Terminals have a least width.
    """
    while (nowhere := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(nowhere)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # tyro's loop that fits --help to the terminal does not end at three columns or fewer.
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)


_expected: list[object] = []


@contextmanager
def input_errors(program: str) -> Iterator[None]:
    """Report user errors and Ctrl-C in one line on standard error; other exceptions pass.

    Exit codes: 2 for an `InputError`, a full disk, or no device of `JAX_PLATFORMS`; 130 for
    Ctrl-C; 141, without a line, for a closed pipe, as after `| head`.
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
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EPIPE, errno.EIO) and silence_unread():
            sys.exit(141)
        line = _no_room(error) if number in _NO_ROOM else _no_device()
        if line is None:
            raise
        _end(f"{program}: error: {printable(line)}", 2)


def _no_room(error: Any) -> str:
    return f"{error.filename or 'output'}: cannot be written: {error.strerror}"


def _no_device() -> str | None:
    """Return the line for `JAX_PLATFORMS` without a device; None where JAX has devices."""
    if "jax" not in sys.modules:
        return None
    try:
        sys.modules["jax"].devices()
    except Exception as error:  # JAX's own assertions too
        reason = first_line(error).partition(" (set JAX_")[0]
        platforms = os.environ.get("JAX_PLATFORMS", "")
        return f"JAX_PLATFORMS: no device of {platforms!r} ({reason}); unset it, or give cpu"
    return None


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
    """End the process with a last line on stderr; a closed or full stream changes nothing."""
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

    name: Or the path of another file, which ends in .py.

    Raises InputError for an unknown name, with the nearest one, and for a file without `config`.
    """
    if name.endswith(".py"):
        return _module(Path(name)).config
    names = preset_names(kind)
    if name not in names:
        folder = f"configs/{kind.replace('.', '/')}"
        raise InputError(f"preset {name!r}: no such file under {folder}; {nearest(name, names)}")
    return import_module(f"configs.{kind}.{name}").config


def _module(path: Path) -> Any:
    """Return a file of Python that defines `config`, as a module."""
    if not path.is_file():
        raise InputError(f"preset {str(path)!r}: no such file; give a path that ends in .py")
    spec = spec_from_file_location(f"preset {path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # where dataclasses look it up
    with reading(f"preset {str(path)!r}", "mend the file"):
        spec.loader.exec_module(module)
    if not hasattr(module, "config"):
        raise InputError(f"preset {str(path)!r}: has no `config`; give it one, as configs/ have")
    return module


def preset_texts(kind: str) -> dict[str, str | None]:
    """Return the docstrings of all presets of a kind, by name."""
    return {name: import_module(f"configs.{kind}.{name}").__doc__ for name in preset_names(kind)}


def preset_names(kind: str) -> list[str]:
    """Return the names of all presets of a kind."""
    package = f"configs.{kind}"
    spec = find_spec(package) if find_spec("configs") else None
    if spec is None or spec.submodule_search_locations is None:
        raise InputError(f"presets: {package} is not importable; run in a checkout of the project")
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))
