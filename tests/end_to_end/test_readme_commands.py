"""The README's Python runs and prints what its comments say, and its commands are such as there are."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable

import pytest
import tyro

from configs.eval.mini import ASSETS
from jaxspec.cli.demo import Demo
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
    told = re.findall(r"^print\(.*\) *# (.+)$", program, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == told


def generated(words: list[str]) -> None:
    options = tyro.cli(Generate, args=words)
    for name in (options.target, options.draft):
        assert name in SHIPPED or re.fullmatch(r"[\w-]+/[\w.-]+", name or ""), name
    assert all((ROOT / image).is_file() for image in options.image if options.target in SHIPPED)
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
    "demo": lambda words: tyro.cli(Demo, args=words),
    "generate": generated,
    "export": lambda words: STEPS["jaxspec"](["export", *words]),
    **{script: step for script, step in STEPS.items() if script.startswith("train.")},
}


def test_the_readme_s_commands_are_such_as_there_are() -> None:
    walked = set()
    for words in commands(README):
        command, *rest = [word for word in words if word not in ("python", "-m", "jaxspec")]
        COMMANDS[command](rest)
        walked.add(command)
    assert {"pip", "make", "demo", "generate", "export", "train.recipe"} <= walked
    assert ["make", "test"] in commands(README)  # what continuous integration runs
    assert ["make", "demo"] in commands(README)


def test_python_of_all_pages_imports_what_there_is() -> None:
    found = [line for page in PAGES for block in blocks(page, "python") for line in block.splitlines()]
    for line in found:
        if line.startswith(("from jaxspec", "import jaxspec")):
            exec(line, {})
