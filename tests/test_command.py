"""How commands end: in one line, whatever ends them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxspec.command import input_errors
from jaxspec.errors import InputError

from tests.conftest import ROOT

BEGIN = "import sys\nfrom jaxspec.command import input_errors\nwith input_errors('it'):\n    "
LINE, LINES = "print('line')", "print('line\\n' * 99999)"  # held until the end, and more than is held


def start(body: str, stdout: int, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + body], stdout=stdout, stderr=stderr, text=True, env=environment
    )


@pytest.fixture(scope="module")
def ends() -> dict[str, tuple[int, str]]:
    """(exit code, what was said) of programs that run side by side."""
    children = {}
    read, write = os.pipe()
    os.close(read)
    for name, body in {"lines": LINES, "help": "sys.exit(print(1))"}.items():
        children[name] = start(body, write)
    os.close(write)
    with open("/dev/full", "w") as full:
        children["full"] = start(LINES, full.fileno())
        children["all full"] = start(LINE, full.fileno(), full.fileno())
    found = {name: (child.wait(timeout=60), child.communicate()[1]) for name, child in children.items()}
    return found


@pytest.mark.parametrize("name", ["lines", "help"])
def test_output_that_nobody_reads_ends_a_program_silently(ends: dict[str, tuple[int, str]], name: str) -> None:
    assert ends[name] == (141, "")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("full", "No space left on device"),
    ],
)
def test_output_without_room_is_one_line(ends: dict[str, tuple[int, str]], name: str, why: str) -> None:
    assert ends[name] == (2, f"it: error: output: cannot be written: {why}\n")


def test_nowhere_to_tell_it(ends: dict[str, tuple[int, str]]) -> None:
    assert ends["all full"][0] == 2


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C is an exception, wherever the tests run, and they go on after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    atexit.unregister(os._exit)


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, input_errors("it"):
        signal.raise_signal(signal.SIGINT)
    assert stop.value.code == 130
    assert capsys.readouterr().err == "it: interrupted\n"


def test_no_terminal_obeys_what_an_error_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), input_errors("it"):
        raise InputError("\x1b[2J.weight\nand caf\u00e9\udce9\u202e: are no names")
    assert capsys.readouterr().err == "it: error: \\x1b[2J.weight and caf\u00e9\\udce9\\u202e: are no names\n"


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(SystemExit) as stop, input_errors("it"):
        (tmp_path / "full").write_text("much")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "it: error: output: cannot be written: No space left on device\n"


def test_other_errors_pass() -> None:
    with pytest.raises(FileNotFoundError), input_errors("it"):
        Path("nowhere").read_text()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("jaxspec", "from jaxspec.cli import main\nmain(['--help'])"),
        ("eval", "import runpy\nsys.argv = ['-m']\nrunpy.run_module('eval.latency', run_name='__main__')"),
    ],
)
def test_ctrl_c_while_modules_are_read_is_one_line(program: str, words: str) -> None:
    """An exception there makes jaxlib fail, or crash."""
    code = f"""
import signal, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "jax":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
{words}
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: interrupted\n")
