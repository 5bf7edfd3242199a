"""The Python of the pages runs from top to bottom, against twins of the models that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.hub.pages import lay_out

PAGES = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("python.md", "inference.md", "drafting.md")}


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(
    page: str,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One block after the other, as a reader would."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL))
    for shipped, twin in {"target": pair[0], "draft": pair[1], "kv_head": pair[0].parent / "head"}.items():
        program = program.replace(f"jaxspec/assets/mini/{shipped}", str(twin))
    exec(program, {})
    assert len(capsys.readouterr().out.splitlines()) >= program.count("print(")
