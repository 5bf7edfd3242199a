"""The Python of the pages runs from top to bottom: README's with the shipped models, others with
tiny twins of theirs.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxspec.data.prepared import Prepared
from tests.conftest import PAGES, ROOT, page_name
from tests.hub import pages
from train import prepare

PROGRAMS = {
    page_name(page): program
    for page in PAGES
    if (
        program := "\n".join(
            re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        )
    )
}
README, ASK = PROGRAMS.pop("README.md"), PROGRAMS.pop("docs/training.md")
del PROGRAMS["docs/serving.md"]  # asks a server, with which tests/serve runs it


def test_readmes_python_prints_what_its_comments_say(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    exec(README, {})
    told = re.findall(r"^print\(.*\) *# (.+)$", README, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == told


@pytest.mark.full
def test_the_notebook_runs_from_top_to_bottom(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "docs")  # where a notebook starts
    cells = json.loads((ROOT / "docs" / "how.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    for line in ("6 tokens in 2 passes", "together [0.5 0.3 0.2]", "drawn    [0.5 0.3 0.2]"):
        assert line in out
    assert "identical: True" in out
    assert "1.74 times as fast" in out


@pytest.mark.parametrize("page", PROGRAMS)
def test_no_loop_of_a_page_takes_a_name_that_is_used_after_it(page: str) -> None:
    """No loop of a page takes a name that is used after it: a reader who takes one line would score
    another answer than the page means.
    """
    statements = ast.parse(PROGRAMS[page]).body
    bound = {name: node.lineno for node in statements for name in _names(node, ast.Store)}
    for node in statements:
        ends = node.end_lineno or node.lineno
        for name in _names(node.target, ast.Store) if isinstance(node, ast.For) else ():
            later = [
                after.lineno
                for after in statements
                if after.lineno > ends and name in _names(after, ast.Load)
            ]
            assert not later or ends < bound[name] <= later[0], (
                f"{name} of line {node.lineno} in line {later[0]}"
            )


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {
        name.id
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and isinstance(name.ctx, context)
    }


@pytest.mark.full
@pytest.mark.parametrize("page", PROGRAMS)
def test_the_python_of_a_page_runs(
    page: str,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Python of a page runs block after block, as a reader would run it."""
    pages.lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    twins = pair[0].parent
    program = PROGRAMS[page].replace("jaxspec_demo/mini/kv_head", str(twins / "head"))
    exec(program.replace("jaxspec_demo/mini/", f"{twins}/"), {})
    assert len(capsys.readouterr().out.splitlines()) >= program.count("print(")


def test_the_tutorials_photographs_are_learned_or_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ask.py` and the first commands of docs/training.md learn or hold out 20 photographs of any
    names.
    """
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 9, 3), np.uint8)
    for i, photo in enumerate(pixels):
        Image.fromarray(photo).save(
            tmp_path / "photos" / f"it's {i:02d}.{('png', 'jpg', 'JPEG')[i % 3]}"
        )
    (tmp_path / "photos" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    exec(ASK, {})
    prepared, measured = (
        next(
            command
            for command in pages.commands()
            if (command.page, command.script) == ("docs/training.md", script)
        )
        for script in ("train.prepare", "eval.block_efficiency")
    )
    words = [
        str(ROOT / word) if word.startswith("jaxspec_demo/") else word for word in prepared.options
    ]
    rows = Prepared(prepare.main(pages.PARSERS["train.prepare"](words)))
    assert "bucket  rows that teach" in capsys.readouterr().out
    held_out = pages.PARSERS["eval.block_efficiency"](measured.options)[1].samples("photos")
    seen = {row.images[0].content for row in rows}
    assert (len(rows), len(seen), len(held_out)) == (90, 18, 2)
    assert not seen & {sample.images[0].content for sample in held_out}
    assert {sample.turns[0][0] for sample in held_out} < {row.turns[0][0] for row in rows}
