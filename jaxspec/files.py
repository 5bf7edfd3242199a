"""Write files and directories whole or not at all, whenever the program ends."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jaxspec.errors import InputError

TRIALS = Path("runs", "debug")
"""Folder for the output of trials (`--debug`)."""
_BESIDE = (".answers", ".skipped.jsonl", ".unfinished")
"""Ends of the names of files and folders that commands write next to their output."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of file systems without locks."""
_NUMBERED = re.compile(r"(.*)-\d+-of-(\d+)(\..*)")
"""The name of one of several files: its beginning, the number of files, its end."""


def local_path(name: str | Path) -> Path:
    """Return the path of a name, its `~` expanded; InputError for an address such as https://."""
    if "://" in str(name):  # Path would drop one of its slashes
        raise InputError(f"{str(name)!r}: a web address; fetch it, and give the file or directory")
    return Path(os.path.expanduser(name))


def logged(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a log of JSON lines, without half a line that a kill may have left;
    [] without a file.
    """
    objects: list[dict[str, Any]] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            objects.append(json.loads(line))
    return objects


def trial_of(path: Path) -> Path:
    """Return the path of a trial's output, apart from the output of the real run at `path`.

    >>> trial_of(Path("runs/train/mini")).as_posix(), trial_of(Path("/data/mix")).as_posix()
    ('runs/debug/train/mini', 'runs/debug/data/mix')
    """
    whole, here = Path(os.path.abspath(path)), Path.cwd()
    roots = (here / TRIALS, here / "runs", here, Path(whole.anchor))
    return TRIALS / whole.relative_to(next(root for root in roots if whole.is_relative_to(root)))


def is_trial(path: Path) -> bool:
    """Return whether the path is in the folder of trials."""
    return Path(os.path.abspath(path)).is_relative_to(os.path.abspath(TRIALS))


def forget_trial(path: Path) -> None:
    """Remove an earlier trial's output: `path`, and what commands write next to it."""
    if not is_trial(path):
        return
    with writing(path):
        for end in ("", *_BESIDE):
            leftover = path.with_name(path.name + end)
            while leftover.is_dir():
                with suppress(FileNotFoundError):  # other processes of a trial remove it too
                    shutil.rmtree(leftover)
            leftover.unlink(missing_ok=True)


def lacking_files(files: Iterable[Path]) -> str:
    """Return how many files of a numbered set are there, if not all; else "".

    `train-00000-of-00002.parquet` alone gives "1 of the 2 files train-*-of-00002.parquet".
    """
    matches = [(file.parent, _NUMBERED.fullmatch(file.name)) for file in files]
    sets = Counter((folder, *match.groups()) for folder, match in matches if match)
    for (_, name, of, end), count in sets.items():
        if count != int(of):
            return f"{count} of the {int(of)} files {name}-*-of-{of}{end}"
    return ""


def _said_by_system(error: BaseException) -> str | None:
    """Return the operating system's message if it caused the error, also through TensorStore."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    match = re.search(
        r"os[ _]error(?:_code=')?\D?(\d+)|\b(?:open|write|close|fsync)\(\) failed: ([^;]+)",
        str(error),
    )
    return match and (match[2] or os.strerror(int(match[1])))


class WriteError(InputError):
    """Report a file that cannot be written."""


@contextmanager
def writing(path: Path | str, then: str | Callable[[], str] = "try again") -> Iterator[None]:
    """Raise a WriteError for a system error within, such as a full disk.

    Args:
      path: File or directory that is written.
      then: Advice for the time after the cause is mended.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = _said_by_system(error)
        if reason is None:
            raise
        mend = then if isinstance(then, str) else then()
        raise WriteError(f"{path}: cannot be written: {reason}; mend that, and {mend}") from error


@contextmanager
def signals_raise() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit within, so that the block can clean up its files."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    plain = [s for s in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is signal.SIG_DFL]
    for number in plain:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in plain:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a new file next to `path`, which replaces it if the block succeeds.

    Folders are made as needed. Raises InputError if the file cannot be written.
    """
    writer = str(os.getpid())
    if threading.current_thread() is not threading.main_thread():
        writer += f"-{threading.get_ident()}"  # another thread may write the same file
    fresh = path.with_name(f".{path.name}.{writer}.tmp")
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
    """Yield a new directory next to `path`, which replaces it if the block succeeds.

    Entries of an existing directory are kept, unless the block writes them anew or `replaced` names
    them. `path` always holds the old or the new directory, except between two renames. A program
    that is killed there leaves the old directory as `.NAME.old`, and the next call restores it.
    Later calls also remove half-written directories of killed programs.

    Raises InputError if the directory cannot be written, or if another process writes it.
    """
    with writing(path), signals_raise():
        check_directory(path)
        fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with sole(_lock_of(path)):
            old = _restore(path)
            half = re.compile(rf"\.{re.escape(path.name)}\.\d+\.tmp")
            for entry in path.parent.iterdir():
                if half.fullmatch(entry.name):  # not `.NAME.v2.123.tmp`, which a neighbour writes
                    shutil.rmtree(entry)
            if old.exists():  # a program was killed after the second rename: `path` is the new one
                old.rename(fresh)
                shutil.rmtree(fresh)
            fresh.mkdir()
            number = os.open(fresh, os.O_RDONLY)  # no other directory can get its inode
            try:
                yield fresh
                if not (fresh.is_dir() and os.path.samestat(os.fstat(number), fresh.stat())):
                    raise InputError(f"{fresh}: was removed while {path} was written; try again")
                if path.is_dir() and any(path.iterdir()):
                    for entry in path.iterdir():
                        if not replaced(entry.name) and not os.path.lexists(fresh / entry.name):
                            _link(entry, fresh / entry.name)
                    shutil.copymode(path, fresh)
                    path.rename(old)
                    fresh.rename(path)
                    old.rename(fresh)  # so that `old` is whole whenever it exists
                else:
                    fresh.rename(path)
            finally:
                os.close(number)
                _restore(path)
                shutil.rmtree(fresh, ignore_errors=True)


def check_directory(path: Path) -> None:
    """Raise InputError if no directory can be written here; restore one that a kill moved aside."""
    with writing(path):
        if path.is_symlink():
            raise InputError(f"{path}: is a symbolic link; give the directory that it leads to")
        above = (path, *path.parents)
        file = next((entry for entry in above if entry.exists() and not entry.is_dir()), None)
        if file is not None:
            where = "" if file == path else f"{file} "
            raise InputError(f"{path}: {where}is a file; give a directory")
        if os.path.ismount(path):
            raise InputError(f"{path}: is a mount point; give a directory in it")
        if path.resolve() in (here := Path.cwd().resolve(), *here.parents):
            raise InputError(f"{path}: holds the working directory; give another path")
        if not path.exists() and path.with_name(f".{path.name}.old").exists():
            with sole(_lock_of(path)):
                _restore(path)


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _restore(path: Path) -> Path:
    """Restore the directory that a killed program moved aside but did not replace.

    Returns the path of a directory that is moved aside, `.NAME.old`.
    """
    old = path.with_name(f".{path.name}.old")
    if not path.exists() and old.exists():
        old.rename(path)
    return old


@contextmanager
def sole(path: Path) -> Iterator[None]:
    """Hold a lock file, which names this process and host, while the block runs.

    The operating system releases the lock when the process ends, however it ends. On file systems
    without locks the block runs unguarded.

    Raises InputError while another process holds the lock.
    """
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire()
        except Timeout:
            holder = path.read_text(errors="replace").strip() or "another process"
            raise InputError(f"{path}: held by {holder}; wait, or give another place") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while held, so that a waiting process makes a new file
        lock.release()


def _link(entry: Path, to: Path) -> None:
    """Give an entry a second path by hard links, so that either path can be removed."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.copytree(entry, to, symlinks=True, copy_function=os.link)
    else:
        os.link(entry, to, follow_symlinks=False)
