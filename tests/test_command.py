"""Commands end in one line, whatever ends them."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec.command import input_errors, load_preset
from jaxspec.errors import InputError, install_command
from tests.conftest import ROOT

BEGIN = (
    "import sys\nfrom jaxspec.command import input_errors, start\nstart('it')\n"
    "with input_errors('it'):\n    "
)
# held until the end, and more than is held
LINE, LINES = "print('line')", "print('line\\n' * 99999)"


def start(body: str, stdout: int, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + body],
        stdout=stdout,
        stderr=stderr,
        text=True,
        env=environment,
    )


def test_output_that_nobody_reads_ends_a_program_silently_and_one_without_room_in_a_line() -> None:
    """Output that nobody reads ends a program silently, and output without room ends it in a line,
    unless that has no room either. The programs run side by side.
    """
    children = {}
    read, write = os.pipe()
    os.close(read)
    for name, body in {"lines": LINES, "help": "sys.exit(print(1))"}.items():
        children[name] = start(body, write)
    os.close(write)
    with open("/dev/full", "w") as full:
        children["full"] = start(LINES, full.fileno())
        children["all full"] = start(LINE, full.fileno(), full.fileno())
    ends = {
        name: (child.wait(timeout=60), child.communicate()[1]) for name, child in children.items()
    }
    assert ends["lines"] == ends["help"] == (141, "")
    line = "it: error: output: cannot be written: No space left on device\n"
    assert ends["full"] == (2, line)
    assert ends["all full"][0] == 2


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Make Ctrl-C an exception, wherever the tests run, after which they go on."""
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
    line = "it: error: \\x1b[2J.weight and caf\u00e9\\udce9\\u202e: are no names\n"
    assert capsys.readouterr().err == line


def test_a_full_disk_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(SystemExit) as stop, input_errors("it"):
        (tmp_path / "full").write_text("much")
    assert stop.value.code == 2
    line = "it: error: output: cannot be written: No space left on device\n"
    assert capsys.readouterr().err == line


def test_other_errors_pass() -> None:
    with pytest.raises(FileNotFoundError), input_errors("it"):
        Path("nowhere").read_text()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("jaxspec", "from jaxspec.cli import main\nmain(['--help'])"),
        (
            "eval",
            "import runpy\nsys.argv = ['-m']\n"
            "runpy.run_module('eval.latency', run_name='__main__')",
        ),
    ],
)
def test_ctrl_c_while_modules_are_read_is_one_line(program: str, words: str) -> None:
    """Ctrl-C while modules are read ends in one line, where an exception would make jaxlib fail, or
    crash.
    """
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
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{program}: interrupted\n")


def ended(body: str, shell: str = 'exec "$0" -c "$1"', **more: str) -> tuple[int, str, str]:
    """Return (exit code, output, errors) of a program that a line of the shell begins."""
    words = ["sh", "-c", shell, sys.executable, BEGIN + body]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | more
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    return done.returncode, done.stdout, done.stderr


def test_streams_may_be_closed(tmp_path: Path) -> None:
    """Streams may be closed, and a file that is opened later is not what libraries write to."""
    write = (
        f"file = open({str(tmp_path / 'file')!r}, 'w'); import os; os.write(1, b'x'); "
        "os.write(2, b'x'); print('y')"
    )
    assert ended(write, 'exec "$0" -c "$1" >&-') == (0, "", "x")
    assert (tmp_path / "file").read_text() == ""
    assert ended(write, 'exec "$0" -c "$1" 2>&-') == (0, "xy\n", "")
    assert (tmp_path / "file").read_text() == ""


def test_characters_that_the_console_lacks_are_escapes() -> None:
    said = ended("print('caf\\u00e9 \\u2580')", PYTHONIOENCODING="ascii")
    assert said == (0, "caf\\xe9 \\u2580\n", "")


def test_a_removed_working_directory_is_one_line(tmp_path: Path) -> None:
    line = "it: error: working directory: it was removed; change to one that exists\n"
    gone = tmp_path / "gone"
    gone.mkdir()
    assert ended("pass", f'cd {gone} && rmdir {gone} && exec "$0" -c "$1"') == (2, "", line)


@pytest.mark.parametrize("platform", ["cuda", "nothing,cpu"])
def test_a_platform_without_devices_is_one_line(platform: str) -> None:
    code, out, err = ended("import jax; jax.numpy.zeros(3)", JAX_PLATFORMS=platform)
    assert (code, out) == (2, "")
    assert re.fullmatch(
        f"it: error: JAX_PLATFORMS: no device of '{platform}' [(].+[)]; unset it, or give cpu\n",
        err,
    )


def test_a_presets_file_may_define_dataclasses(tmp_path: Path) -> None:
    lines = "from __future__ import annotations", "from dataclasses import dataclass"
    body = "@dataclass\nclass Mine:\n    steps: int = 7\n\nconfig = Mine()\n"
    (tmp_path / "mine.py").write_text("\n".join([*lines, body]))
    assert load_preset("eval", str(tmp_path / "mine.py")).steps == 7


def test_help_fits_any_terminal() -> None:
    body = (
        "from jaxspec.cli.options import parse_options\n"
        "    parse_options(lambda: None, ['-h'], 'it', description='why')"
    )
    code, out, err = ended(body, COLUMNS="1")
    assert (code, err) == (0, "")
    assert "why" in out


def test_one_function_reads_all_command_lines() -> None:
    sources = [
        path for folder in ("jaxspec", "eval", "train") for path in (ROOT / folder).rglob("*.py")
    ]
    calls = [
        path
        for path in sources
        if re.search(r"tyro\.cli\(|subcommand_cli_from", path.read_text(encoding="utf-8"))
    ]
    assert calls == [ROOT / "jaxspec" / "cli" / "options.py"]


def test_an_installed_wheel_is_told_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_command("gguf") == "pip install -e '.[gguf]'"
    monkeypatch.setattr("jaxspec.errors.CLONE", tmp_path)
    assert re.fullmatch(r"pip install 'gguf[<>=.,\d]+'", install_command("gguf"))
