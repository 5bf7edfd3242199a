"""The README's Python runs and prints what it shows, and its commands are such as there are."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tyro

from configs.eval.mini import ASSETS
from jaxspec.cli.generate import Generate
from jaxspec.decoding.captioners import check_captioner
from jaxspec.decoding.engine import EngineConfig
from tests.conftest import ROOT
from tests.end_to_end.test_tutorial import STEPS

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))]
SHIPPED = {f"jaxspec/assets/mini/{path.name}" for path in ASSETS.iterdir()}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The words of every command line of a page's shell blocks, without comments."""
    lines = "".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_readme_s_python_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (program,) = blocks(README, "python")
    exec(program, {})
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] in README
    assert shown[1].removesuffix(" tokens per target pass") in README


def generated(words: list[str]) -> None:
    options = tyro.cli(Generate, args=words)
    for name in (options.target, options.draft):
        assert name in SHIPPED or re.fullmatch(r"[\w-]+/[\w.-]+", name or ""), name
    EngineConfig(tuple((options.views or "M").split(",")), None, options.weighting, options.gamma, options.tree)
    assert options.captioner is None or check_captioner(options.captioner)


def installed(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = re.findall(r"\[(.*)\]", words[-1])
    assert set(",".join(asked).split(",")) - {""} <= set(extras)


def made(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)


COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "pip": installed,
    "make": made,
    "generate": generated,
    "export": lambda words: STEPS["jaxspec"](["export", *words]),
    **{script: step for script, step in STEPS.items() if script.startswith("train/")},
}


def test_the_readme_s_commands_are_such_as_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = set()
    for words in commands(README):
        command, *rest = words[1:] if words[0] in ("python", "jaxspec") else words
        if command == "-c":
            monkeypatch.chdir(tmp_path)
            exec(rest[0], {})
            assert (tmp_path / "page.png").is_file()
            continue
        COMMANDS[command](rest)
        walked.add(command)
    assert {"pip", "make", "generate", "export", "train/recipe.py"} <= walked
    assert ["make", "test"] in commands(README)  # what continuous integration runs
    assert ["make", "demo"] in commands(README)


def test_python_of_all_pages_imports_what_there_is() -> None:
    found = [line for page in PAGES for block in blocks(page, "python") for line in block.splitlines()]
    for line in found:
        if line.startswith(("from jaxspec", "import jaxspec")):
            exec(line, {})
