"""A part of what eval/accelerator.py runs works in miniature, from start to a table on a page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tyro

from eval import accelerator, latency
from eval.lib.output.tables import markdown
from jaxspec.command import preset_names
from tests.conftest import ROOT

pytestmark = pytest.mark.full

PAGE = "# A page\n\n<!-- accelerator: made -->\nof before\n<!-- /accelerator -->\n\nThe rest.\n"


@pytest.mark.parametrize("name", accelerator.PARTS)
def test_parts_are_commands_of_their_scripts(name: str) -> None:
    script, *options = accelerator.PARTS[name].split()
    assert script == "eval.latency"
    # exits where an option is unknown
    tyro.extras.get_parser(latency.main).parse_args([*options, "--out", "runs"])
    assert options[0] in preset_names("latency")


@pytest.mark.parametrize("name", ["accelerator", "accelerator_h100"])
def test_estimates_are_shown_where_there_are_some(name: str, tmp_path: Path) -> None:
    folder = ROOT / "results" / name
    table = (folder / "table.md").read_text(encoding="utf-8")
    assert markdown(accelerator.summary(folder)) == table
    assert "stimated" not in table
    out = shutil.copytree(folder, tmp_path / name)
    estimates = out / "estimated" / "llava7b_68m" / "results.json"
    estimates.parent.mkdir(parents=True)
    row = {"program": "chain", "batch": 1, "least_ms": 4.54, "fits": True}
    estimates.write_text(json.dumps({"run": {}, "rows": [row]}), encoding="utf-8")
    table = markdown(accelerator.summary(out))
    assert "| measured | estimated ms |" in table
    assert "| 4.54 |" in table
    assert "Estimated by the compiler" in table


def test_a_part_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    accelerator.main(page=page, debug=True, minutes=60, parts=("llava7b_passes",))
    assert (
        tmp_path / "runs" / "debug" / "accelerator" / "llava7b_passes" / "results.json"
    ).is_file()
    text = page.read_text(encoding="utf-8")
    assert text.startswith(
        "# A page\n\n<!-- accelerator: made -->\n\n| pair | what | measured |\n"
    ), "a column of estimates only where the compiler made some"
    assert "Estimated" not in text
    assert text.endswith("<!-- /accelerator -->\n\nThe rest.\n")
    assert "a pass, B=1, 15 slots" in text
    assert "of before" not in text
    assert "llava" not in text, "a trial's figures stand under its own pair's name"
