"""The README's Python runs and prints what its comments say, and that of the pages imports what there is."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [README, *(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_readme_s_python_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (program,) = blocks(README, "python")
    exec(program, {})
    told = re.findall(r"^print\(.*\) *# (.+)$", program, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == told


def test_python_of_all_pages_imports_what_there_is() -> None:
    found = [line for page in PAGES for block in blocks(page, "python") for line in block.splitlines()]
    for line in found:
        if line.startswith(("from jaxspec", "import jaxspec")):
            exec(line, {})
