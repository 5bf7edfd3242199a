"""The pictures of the pages are drawn from the results, whole, with titles, for any renderer."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from jaxspec_demo.command import _table
from jaxspec_demo.race import draw
from tests.conftest import ROOT

RACE: dict[str, Any] = json.loads((ROOT / "results" / "race.json").read_text(encoding="utf-8"))
SVG = [*(ROOT / "docs").glob("*.svg"), *(ROOT / "results").rglob("*.svg")]


def texts(path: Path) -> list[str]:
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_race_of_the_pages_is_the_recorded_one() -> None:
    assert (ROOT / "docs" / "race.svg").read_text(encoding="utf-8") == draw(RACE)


def test_the_race_has_the_whole_answer_and_the_figures_of_the_printout() -> None:
    row, shown = RACE["rows"][0], texts(ROOT / "docs" / "race.svg")
    lanes = " ".join(shown).partition("plain decoding")[2].split("with a draft")
    for lane, passes, ms in zip(lanes, row["passes"], row["decode_ms"], strict=True):
        written = "".join(lane.split())
        assert "".join(row["answer"].split()) in written
        assert f"{passes} passes" in lane
        assert f"{ms:.1f} ms" in lane
        assert str(passes) in _table(row)
        assert f"{ms:.1f}" in _table(row)
    for figure in (f"{row['tokens_per_pass']:.2f} tokens per pass", f"{row['speedup']:.2f} times"):
        assert any(figure in text for text in shown)
        assert figure in _table(row)


@pytest.mark.parametrize("path", SVG, ids=lambda path: path.name)
def test_pictures_need_no_variables_and_have_a_title(path: Path) -> None:
    svg = path.read_text(encoding="utf-8")
    assert "var(" not in svg
    assert "prefers-color-scheme:dark" in svg
    assert re.search(r"<title[^>]*>[^<]{20,}</title>", svg)
    # Wider ones have letters that a phone, 360 pixels wide, makes too small to read.
    width = int(re.findall(r'<svg[^>]* width="(\d+)"', svg)[0])
    assert width <= 600


def test_bars_show_their_unit() -> None:
    shown = texts(ROOT / "results" / "mmspec_recorded" / "bars.svg")
    assert shown[0] == "Tokens per pass of LLaVA-1.5-7B on MMSpec"
    assert shown[-1] == "1: plain decoding"


def test_every_picture_is_on_a_page() -> None:
    places = ROOT / "docs", ROOT / "results"
    pictures = [
        file for place in places for kind in ("png", "svg") for file in place.rglob(f"*.{kind}")
    ]
    pages = [ROOT / "README.md", *(page for place in places for page in place.rglob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [str(file) for file in pictures if file.name not in text] == []
