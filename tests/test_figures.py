"""Every figure of a page is in the results that its sentence or its section names, so that no page can grow stale.

A figure is a number with a decimal point. It is looked up in the tables of the folders of `results/` that its list item,
its paragraph or its table's row names; where that names none, in those that the section names. Two hidden comments in
the same place help:

    <!-- derived: 1.8 = 1.98 / 1.09 -->    follows from figures of these tables
    <!-- cited: 1.25 1.5 -->               is no measurement of ours
"""

from __future__ import annotations

import ast
import json
import operator
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

RESULTS = ROOT / "results"
OTHERS = (
    "families.md",
    "picturebook.md",
    "slices.md",
    "tables.md",
    "tpu.md",
)  # sizes, versions and what the papers print
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name not in OTHERS]
FIGURE = re.compile(r"(?<![\w.-])(?<!Python )(?<!jax )(?<!transformers )(?<!` )(?<!arXiv )\d+\.\d+(?![\w.]*\d|-)")
COMMENT = re.compile(r"<!-- (derived|cited): (.*?) -->")
SIGNS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@cache
def measured(folder: str) -> frozenset[float]:
    """Return the numbers of a folder's tables, and the speed-ups of its rows."""
    place = RESULTS / folder
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted(place.rglob("*"))
        if path.suffix in (".md", ".csv", ".jsonl")
    )
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", text)}
    for path in place.rglob("results.json"):
        rows = json.loads(path.read_text(encoding="utf-8")).get("rows", [])
        numbers |= {row["speedup_measured"] for row in rows if row.get("speedup_measured")}
    return frozenset(numbers)


def folders(text: str) -> list[str]:
    """Return the folders of results that a text names, as `results/NAME`, `NAME/` or, after one, `_SUFFIX/`."""
    found: list[str] = []
    for name in re.findall(r"results/(\w+)|`(\w+)/`", text):
        (name,) = filter(None, name)
        if name.startswith("_") and found:  # `a_gamma3/`, `_gamma7/` is a_gamma7
            ends = (found[-1][:end] + name for end in range(len(found[-1]), 0, -1))
            name = next((whole for whole in ends if (RESULTS / whole).is_dir()), name)
        if (RESULTS / name).is_dir():
            found.append(name)
    return found


def is_known(figure: str, numbers: frozenset[float]) -> bool:
    """Return whether a number rounds to the figure."""
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
    return any(abs(number - float(figure)) <= half * (1 + 1e-9) for number in numbers)


def value(formula: str) -> float:
    """Return what a formula of numbers, + - * / and brackets gives."""

    def of(node: ast.expr) -> float:
        match node:
            case ast.Constant(float() | int() as number):
                return number
            case ast.BinOp(left, sign, right):
                return SIGNS[type(sign)](of(left), of(right))
        raise AssertionError(f"{formula}: give numbers and + - * /")

    return of(ast.parse(formula, mode="eval").body)


def unknown(page: str) -> list[str]:
    """Return the figures of a page's text that no result has, each with the line that it is in."""
    bad = []
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        for unit in re.split(r"\n\s*\n|\n(?=[-|] )", section):
            places = folders(unit) or folders(section)
            numbers = frozenset().union(*map(measured, places))
            explained: set[str] = set()
            for kind, told in COMMENT.findall(unit):
                if kind == "cited":
                    explained |= set(told.split())
                    continue
                for figure, _, formula in (part.strip().partition(" = ") for part in told.split("; ")):
                    assert is_known(figure, frozenset({value(formula)})), f"{figure} = {formula}"
                    bad += [f"{used} in {formula}" for used in FIGURE.findall(formula) if not is_known(used, numbers)]
                    explained.add(figure)
            shown = re.sub(r"`[^`]*`|\]\(\S*\)", "`x`", COMMENT.sub("", unit))
            for figure in FIGURE.findall(shown):
                if figure not in explained and not is_known(figure, numbers):
                    bad.append(f"{figure} in {unit.strip()[:60]!r}, of {places}")
    return bad


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_of_a_page_is_in_the_results_that_it_names(page: Path) -> None:
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_a_stale_figure_is_found() -> None:
    """By its own name, its section's, and a formula whose figures are gone."""
    page = "# A\nIt is 1.24 (`smollm2_gamma3/`).\n\n| a |\n|---|\n| 1.85 |\n| 1.86 |\n\n# B\n\n- LLaVA-1.5: 1.24\n"
    assert [line[:4] for line in unknown(page)] == ["1.86", "1.24"]
    told = "It is {} (`smollm2_gamma3/`) <!-- derived: {} = {} -->"
    assert unknown(told.format("0.05", "0.05", "1.24 - 1.19")) == []
    assert len(unknown(told.format("0.04", "0.04", "1.23 - 1.19"))) == 1
    with pytest.raises(AssertionError):
        unknown(told.format("0.06", "0.06", "1.24 - 1.19"))
    assert unknown("`smollm2_gamma3/` to `_gamma7/`: 0.89") == []
