"""The Python of the pages runs from top to bottom, against twins of the models that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.hub.pages import lay_out

NAMES = ("collaborative", "drafting", "inference", "picturebook", "python")
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}


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
    twins = pair[0].parent
    program = program.replace("jaxspec/assets/mini/kv_head", str(twins / "head"))
    exec(program.replace("jaxspec/assets/mini/", f"{twins}/"), {})
    assert len(capsys.readouterr().out.splitlines()) >= program.count("print(")
