"""--help of all commands is wrapped once at any width, and its examples parse."""

from __future__ import annotations

import io
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from itertools import pairwise
from typing import Any

import pytest

from jaxspec.cli import commands, main, mistyped
from jaxspec.cli.options import parse_subcommand
from tests.conftest import ROOT
from tests.hub.pages import Command, parse

KINDS: dict[str, Any] = {name: kind for name, (kind, _) in commands().items()}
SCRIPTS = [
    f"{path.parent.name}.{path.stem}"
    for folder in ("train", "eval")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
PAGES = [
    "jaxspec",
    *(f"jaxspec {name}" for name in KINDS),
    *SCRIPTS,
    *("train.recipe mini_text", "train.recipe kv_mini", "eval.mmspec recorded"),
    *(f"train.prepare {name}" for name in ("llava", "text")),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # scripts run as modules


def printed(page: str, columns: int, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """Return what a command or a script prints on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    name, *words = page.split()
    monkeypatch.setattr(sys, "argv", [name, *words, *options])
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with redirect_stdout(terminal), suppress(SystemExit):
        if name == "jaxspec":
            main(sys.argv[1:])
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    terminal.seek(0)
    return terminal.read()


def continued(page: str, columns: int) -> Iterator[tuple[str, str, int]]:
    """Yield pairs of lines of which the second continues the first, and the width of both."""
    for line, after in pairwise(page.splitlines()):
        if line.startswith("│") and after.startswith("│     "):
            first, second = (part[2:-2].rstrip() for part in (line, after))
            column = len(second) - len(second.lstrip())
            if second and first[column - 2 : column] == "  " and first[column:]:
                yield first, second.lstrip(), len(line) - 4
        elif re.match(r"[A-Za-z]", line) and re.match(r"[A-Za-z]", after):
            yield line, after, min(columns, 100)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("page", PAGES)
def test_help_is_wrapped_once(page: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(page, columns, monkeypatch, "--help")
    for line, after, width in continued(text, columns):
        word = re.split(r"(?<=,)| ", after)[0]
        assert len(f"{line} {word}") > width, f"{line!r} has room for {word!r}"
    # Scripts have longer examples; tyro does not wrap a usage.
    lines = [line for line in text.splitlines() if not line.startswith(("usage", "    python -m"))]
    assert max(map(len, lines)) <= columns or not page.startswith("jaxspec")
    assert str(ROOT) not in text
    assert not re.search(r"default: (None|False|tyro)", text)
    positionals = text.partition("positional arguments")[2].partition("╰")[0]
    assert not re.search(r"^│ \[?(STR|INT|\{)", positionals, re.MULTILINE)
    assert "None" not in text or not page.startswith("jaxspec")


@pytest.mark.parametrize(
    "page", [*(f"jaxspec {name}" for name in KINDS), *SCRIPTS, "train.recipe kv_mini"]
)
def test_help_has_examples_that_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(page, 80, monkeypatch, "--help").replace("\\\n", " ")
    examples = re.findall(r"^    (jaxspec .*|python -m .*)$", text, re.MULTILINE)
    assert any(page in example for example in examples)
    own = str(ROOT / "configs" / "train" / "recipes" / "kv_mini.py")  # in the place of a reader's
    for example in examples:
        parse(Command(page, example.replace("./mine.py", own)))


def test_options_are_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("jaxspec generate", 80, monkeypatch, "--help")
    assert len(list(continued(text, 80))) > 40
    groups = ["options", "model", "drafting", "question", "sampling", "scores", "output"]
    assert re.findall(r"^╭─ (\w+)", text, re.MULTILINE) == groups
    model = text.partition("model options")[2].partition("╰")[0]
    assert re.findall(r"^│ (--[\w-]+)", model, re.MULTILINE)[0] == "--target"


def test_arguments_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed("jaxspec export", 80, monkeypatch, "--help")
    assert "usage: jaxspec export [-h] [OPTIONS] SOURCE [DESTINATION]" in text


@pytest.mark.parametrize("name", mistyped.CLASSES)
def test_the_options_of_the_source_are_those_of_the_help(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick check knows all options of the help: it refuses none of them, and suggests no
    other.
    """
    text = printed(f"jaxspec {name}", 120, monkeypatch, "--help")
    lines = {
        name
        for line in re.findall(r"^│ (--.*?)(?:  |$)", text, re.MULTILINE)
        for name in re.findall(r"--[\w-]+", line)
    }
    assert {*mistyped.options(name)} == lines | {"--help"}


@pytest.mark.parametrize("words", ["", " plan"])
def test_help_is_a_command(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(f"jaxspec{words}", 80, monkeypatch, "--help")
    assert printed(f"jaxspec help{words}", 80, monkeypatch) == text != ""


def test_no_command_is_help(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "usage: jaxspec COMMAND" in printed("jaxspec", 80, monkeypatch)


def test_the_overview_has_a_line_of_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    overview = printed("jaxspec", 80, monkeypatch, "--help")
    for name, kind in KINDS.items():
        (line,) = re.findall(rf"^  {name} +(.*)$", overview, re.MULTILINE)
        assert line in " ".join(kind.__doc__.split())


def test_a_flag_has_the_form_that_changes_it() -> None:
    words = shlex.split("generate --target x --prompt y --no-stream")
    assert parse_subcommand(KINDS, words, "jaxspec", None).ask.output.stream is False


def test_the_mutants_have_help_and_names() -> None:
    command = [sys.executable, "-m", "tests.mutants"]
    page, unknown = (
        subprocess.run([*command, word], cwd=ROOT, capture_output=True, text=True)
        for word in ("--help", "no such mutant")
    )
    assert (page.returncode, page.stderr) == (0, "")
    assert "python -m tests.mutants residual" in page.stdout
    assert unknown.returncode == 1
    assert unknown.stderr == "mutants: no name holds 'no such mutant'; see tests/mutants.txt\n"
