"""The pages docs/tables-NAME.md have every table and figure of the papers, and their commands
exist.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from configs.tables import PAPERS, commands, list_of_tables
from eval.lib.output.tables import put_between
from jaxspec.errors import InputError
from tests.conftest import ROOT

COUNTS = {"TABED": (22, 9), "IbED": (13, 11), "AASD": (2, 4), "CoS": (10, 8)}
"""Tables and figures of each paper."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
    "optional-dependencies"
].keys()


@pytest.mark.parametrize("paper", PAPERS)
def test_a_page_holds_the_list_of_its_paper(paper: str, tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / f"tables-{paper.lower()}.md", tmp_path / "page.md"
    text = page.read_text(encoding="utf-8")
    copy.write_text(text, encoding="utf-8")
    put_between(copy, "tables", list_of_tables(paper))
    assert copy.read_text(encoding="utf-8") == text, "run: python -m configs.tables docs"
    copy.write_text("# a page\n", encoding="utf-8")
    with pytest.raises(InputError, match="0 pairs of markers"):
        put_between(copy, "tables", "a list")


@pytest.mark.parametrize("paper", COUNTS)
def test_every_table_and_figure_has_one_line(paper: str) -> None:
    assert PAPERS.keys() == COUNTS.keys()
    for numbers, count in zip(("tables", "figures"), COUNTS[paper]):
        told = sorted(number for line in PAPERS[paper] for number in getattr(line, numbers))
        assert told == list(range(1, count + 1))
    for line in PAPERS[paper]:
        assert bool(line.command) == bool(line.needs), line.where
        extras, _, gigabytes = line.needs.partition("; ")
        assert set(filter(None, extras.split(", "))) <= EXTRAS, line.where
        assert not line.needs or re.match(r"\d+ GB", gigabytes), line.where


def test_every_command_writes_to_a_place_of_its_own() -> None:
    """Every command writes to a place of its own, so that all run one after the other: where
    results of other options lie, a command is refused.
    """
    places: dict[tuple[str, str], str] = {}
    for command in commands():
        _, _, script, *words = shlex.split(command)
        option = {"train.recipe": "--runs", "train.distill_data": "--name"}.get(script, "--out")
        out = words[words.index(option) + 1] if option in words else words[0]
        assert places.setdefault((script, out), command) == command
