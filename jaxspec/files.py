"""Files and directories that are there whole or not at all, whenever the program that writes them ends."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import os
import re
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxspec.errors import InputError

ASSETS = Path(__file__).resolve().parent / "assets"
"""What ships with the package: a page to ask about, and models, each pair in a folder of its own."""
TRIALS = Path("runs", "debug")
"""Where trials (`--debug`) keep what they write."""


def trial_of(place: Path) -> Path:
    """Return where a trial keeps what its run would keep at `place`, so that it never stands in that run's way.

    >>> trial_of(Path("runs/train/mini")).as_posix(), trial_of(Path("/data/mix")).as_posix()
    ('runs/debug/train/mini', 'runs/debug/data/mix')
    """
    whole, here = Path(os.path.abspath(place)), Path.cwd()
    roots = (here / TRIALS, here / "runs", here, Path(whole.anchor))
    return TRIALS / whole.relative_to(next(root for root in roots if whole.is_relative_to(root)))


def is_trial(place: Path) -> bool:
    """Return whether trials alone write there."""
    return Path(os.path.abspath(place)).is_relative_to(os.path.abspath(TRIALS))


def forget_trial(place: Path) -> None:
    """Remove what an earlier trial left at `place`, and beside it under that name; never anything but a trial's."""
    if not is_trial(place):
        return
    with writing(place):
        for left in (place, *place.parent.glob(f"{glob.escape(place.name)}.*")):
            if left.is_dir():
                shutil.rmtree(left)
            elif left.suffix != ".lock":
                left.unlink(missing_ok=True)


def _said_by_system(error: BaseException) -> str | None:
    """Return what the operating system said, if that is the cause, through TensorStore or safetensors or directly."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(
        r"os[ _]error(?:_code=')?\D?(\d+)|\b(?:open|write|close|fsync)\(\) failed: ([^;]+)",
        str(error),
    )
    return found and (found[2] or os.strerror(int(found[1])))


class WriteError(InputError):
    """What `writing` raises."""


@contextmanager
def writing(path: Path | str, then: str | Callable[[], str] = "try again") -> Iterator[None]:
    """Turn what keeps `path` from being written, such as a full disk, into a WriteError; `then` is how to go on."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = _said_by_system(error)
        if reason is None:
            raise
        told = then if isinstance(then, str) else then()
        raise WriteError(f"{path}: cannot be written: {reason}; mend that, and {told}") from error


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within, so that files are cleaned up; handled ones stay as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    plain = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in plain:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in plain:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a file to write, beside `path`, that becomes it when the block ends well, and is removed otherwise.

    Its folder is made. Raises InputError where it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path), signals_raise():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield fresh
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write the whole text, in UTF-8, or nothing."""
    with whole(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


@contextmanager
def whole_directory(path: Path, replaced: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a directory to fill, beside `path`, that becomes it when the block ends well, and is removed otherwise.

    Where there is a directory already, its entries stay, but for those whose names are `replaced` or are there anew.
    At every moment `path` is the one before or the new one. What killed programs have left beside it is removed.

    Raises InputError where it cannot be written.
    """
    with writing(path), signals_raise():
        check_directory(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.iterdir():
            if re.fullmatch(rf"\.{re.escape(path.name)}\.\d+\.tmp", left.name) and left.is_dir():
                with _locked(left) as free:
                    if free:
                        shutil.rmtree(left, ignore_errors=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        fresh.mkdir()
        try:
            with _locked(fresh):
                yield fresh
                if path.is_dir() and any(path.iterdir()):
                    for entry in path.iterdir():
                        if not replaced(entry.name) and not os.path.lexists(fresh / entry.name):
                            _link(entry, fresh / entry.name)
                    shutil.copymode(path, fresh)
                    _exchange(fresh, path)
                else:
                    fresh.rename(path)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)


def check_directory(path: Path) -> None:
    """Raise InputError where no directory can take this one's place."""
    if str(path) != str(path).encode(errors="replace").decode():
        raise InputError(f"{path}: is no UTF-8, which tokenisers cannot open; give another name")
    with writing(path):
        if path.is_symlink():
            raise InputError(
                f"{path}: is a symbolic link; give the directory that it is to lead to"
            )
        file = next(
            (place for place in (path, *path.parents) if place.exists() and not place.is_dir()),
            None,
        )
        if file is not None:
            raise InputError(
                f"{path}: {'' if file == path else f'{file} '}is a file; give a directory"
            )
        if os.path.ismount(path):
            raise InputError(f"{path}: is a mount point; give a directory in it")
        if path.resolve() in (here := Path.cwd().resolve(), *here.parents):
            raise InputError(
                f"{path}: holds the working directory; give another, or start from elsewhere"
            )


@contextmanager
def sole(path: Path) -> Iterator[None]:
    """Hold a lock file, which names this process and host, while the block runs; then it is removed.

    The operating system lets go of it when the process ends, whatever ends it: what a killed one left is told, and
    taken. Where a file system knows no locks all is taken.

    Raises InputError while another holds it.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file, holder = _hold(path)
    try:
        if holder:
            print(f"{path}: left by {holder}, which is gone; taken", file=sys.stderr)
        yield
    finally:
        if _is_at(file, path):
            path.unlink()
        os.close(file)


def _hold(path: Path) -> tuple[int, str]:
    """Return the open lock file, which is ours now, and who held it before."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            told = "wait until that ends, or give another place"
            raise InputError(f"{path}: held by {holder or 'another process'}; {told}") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
        if _is_at(file, path):  # and was not removed by its holder in between
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return file, holder
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Yield whether no other program holds the folder; while the block runs, this one does. A kill ends the hold."""
    place = os.open(folder, os.O_RDONLY)
    try:
        free = False
        with suppress(OSError):  # held; or a file system without locks, where left-overs stay
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        yield free
    finally:
        os.close(place)


def _link(entry: Path, to: Path) -> None:
    """Give the same files a second place, so that either may be removed."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.copytree(entry, to, symlinks=True, copy_function=os.link)
    else:
        os.link(entry, to, follow_symlinks=False)


def _exchange(one: Path, other: Path) -> None:
    """Swap two directories in one step, which neither `os` nor `shutil` can."""
    system, swap = ctypes.CDLL(None, use_errno=True), 2
    a, b = os.fsencode(one), os.fsencode(other)
    try:
        at = -100  # relative to the working directory
        mac = sys.platform == "darwin"
        failed = system.renamex_np(a, b, swap) if mac else system.renameat2(at, a, at, b, swap)
        code = ctypes.get_errno() if failed else 0
    except AttributeError:
        code = errno.ENOSYS
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise InputError(
            f"{other}: this file system replaces no directory in one step; give a path where nothing is"
        )
    if code:
        raise OSError(code, os.strerror(code))
