"""What every command sets up before it computes, and how it ends on bad input."""

from __future__ import annotations

import atexit
import errno
import os
import re
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn, TextIO

import jax
import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.errors import InputError, nearest, printable

DTYPES = ("float32", "bfloat16", "float16")
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EAGAIN)


def setup_runtime() -> None:
    """Keep compiled programs on disk, unless the process keeps them elsewhere, and silence transformers' notices."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
    if jax.config.jax_compilation_cache_dir is None:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))


def parse_dtype(name: str) -> jnp.dtype:
    """The dtype of this name. Raises InputError where it is none that models compute in or are stored as."""
    if name not in DTYPES:
        raise InputError(f"dtype: {name!r} is none of models; {nearest(name, DTYPES)}")
    return jnp.dtype(name)


def capped_gamma(option: str, gamma: int, max_new_tokens: int) -> int:
    """The draft length, or the most tokens that an answer may have where that is less; a line says so then."""
    if not 1 <= max_new_tokens < gamma:
        return gamma
    print(
        f"{option}: {gamma} is over the {max_new_tokens} new tokens; drafting {max_new_tokens} a block", file=sys.stderr
    )
    return max_new_tokens


def join_cluster(place: str) -> None:
    """Makes this process one of several that compute together; to be called before anything touches a device.

    Args:
      place: empty, it is alone; `auto`, TPU slices, SLURM and Open MPI say who belongs together; else
        `HOST:PORT,COUNT,INDEX`, where process 0 can be reached, how many there are, and which one this is.

    Raises InputError for another form, or where `auto` finds nothing.
    """
    if not place:
        return
    if place == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            raise InputError("cluster: auto finds no TPU, SLURM or Open MPI job; give HOST:PORT,COUNT,INDEX") from error
        return
    found = re.fullmatch(r"(\S+:\d+),(\d+),(\d+)", place)
    if found is None or int(found[3]) >= int(found[2]):
        raise InputError(f"cluster: {place!r}; give auto, or HOST:PORT,COUNT,INDEX with INDEX from 0 to COUNT - 1")
    jax.distributed.initialize(found[1], int(found[2]), int(found[3]))


def cache_directory() -> Path:
    """Where jaxspec keeps what it can make again: `$XDG_CACHE_HOME/jaxspec`, else `~/.cache/jaxspec`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


class PeakMemory:
    """Watches, as a context manager, by how many bytes this process's memory grows.

    Where there is /proc, resident memory is sampled; elsewhere growth past the process's earlier peak is counted.
    """

    growth: int = 0

    def __enter__(self) -> PeakMemory:
        self._start = self._now()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self.growth = max(self.growth, self._now() - self._start)

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.growth = max(self.growth, self._now() - self._start)

    @staticmethod
    def _now() -> int:
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def human_bytes(size: float) -> str:
    """A number of bytes for people, such as 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def script_name() -> str:
    """The name of the script that this process runs, as `python -m` has it: `train.recipe`."""
    path = Path(sys.argv[0]).with_suffix("")
    return f"{path.parent.name}.{path.name}"


def run_script(main: Callable[..., object], description: str | None = None) -> None:
    """Run a script under `train/` or `eval/` on the words of the command line, which are parameters of `main`.

    Args:
      description: what --help begins with; by default the docstring of `main`.
    """
    import tyro  # what only imports this module does without

    name = script_name()
    with input_errors(name):
        tyro.cli(main, prog=f"python -m {name}", description=description)


@contextmanager
def input_errors(program: str) -> Iterator[None]:
    """Turns what a user can mend, or has done, into one line on standard error; all else passes.

    Exit codes: 2 for an `InputError`, or where there is no room for what is written; 130 for Ctrl-C; and 141, without
    a line, where nobody reads what is printed any more, as after `| head`.
    """
    before, sys.unraisablehook = sys.unraisablehook, _interrupt_again
    try:
        try:
            yield
        finally:
            sys.unraisablehook = before
            print(end="", flush=True)  # what is not written yet fails here, where it can be told
    except InputError as error:
        _end(f"{program}: error: {printable(' '.join(str(error).split()))}", 2)
    except KeyboardInterrupt:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # once more, and it ends without a word
        atexit.register(os._exit, 130)  # at once: XLA crashes where it is taken down while a program runs
        _end(f"{program}: interrupted", 130)
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO) and silence_unread():
            sys.exit(141)
        if error.errno not in _NO_ROOM:
            raise
        where = printable(str(error.filename or "output"))
        _end(f"{program}: error: {where}: cannot be written: {error.strerror}", 2)


def _interrupt_again(dropped: sys.UnraisableHookArgs) -> None:
    """Sends Ctrl-C once more where it came in a callback, such as jax's of the collector, and Python dropped it."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(dropped)


def silence_unread() -> bool:
    """Sends output that nobody reads any more, a closed pipe's or terminal's, to nowhere; whether there was any."""
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
        for bar in list(tqdm._instances):  # type: ignore[attr-defined]  # each that is open ends its line
            bar.leave = True
            bar.close()
        clear = "\r\033[K" if sys.stderr.isatty() else ""  # of a progress word that stands there
        print(f"{clear}{line}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", file=stream, flush=True)
        except OSError:  # or it would be tried again at exit, and told
            _silence(stream)
    sys.exit(code)
