"""Every figure of a page is in the results that its sentence or its section names, so that no page
can grow stale.

A figure is a number with a decimal point. It is looked up in the tables of the folders of
`results/` that its list item, its paragraph or its table's row names; where that names none, in
those that the section names. Two hidden comments in the same place help:

    <!-- derived: 1.8 = 1.98 / 1.09 -->    follows from figures of these tables
    <!-- cited: 1.25 1.5 -->               is no measurement of ours

A line of a table of claims ends in a verdict, which follows from cells of the folders' tables:

    <!-- claim: {views100: T / avg} > {views100: M / avg}; some {views100: T} > {views100: M} -->

`holds` means that all of its parts are true, `fails` that none is, `partly` the rest. A cell names
its folder, the labels of its line, and its column; `some` and `every` go over the columns of sets.
Its figures are of these cells.
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

from tests import conftest
from tests.conftest import ROOT, page_name

RESULTS = ROOT / "results"
OTHERS = (
    "CONTRIBUTING.md",
    "docs/families.md",
    "docs/tables.md",
    "docs/tpu.md",
    "picturebook/README.md",
)  # sizes, versions and what the papers print
PAGES = [page for page in conftest.PAGES if page_name(page) not in OTHERS]
FIGURE = re.compile(
    r"(?<![\w.-])(?<!Python )(?<!jax )(?<!transformers )(?<!` )(?<!arXiv )(?<!§)(?<!Corollary )\d+\.\d+(?![\w.]*\d|-)"
)
COMMENT = re.compile(r"<!-- (derived|cited): (.*?) -->")
CLAIM = re.compile(r"<!-- claim: (.*?) -->")
CELL = re.compile(r"\{(\w+): ([^}]*)\}")
NO_SETS = {"views", "turn", "avg", "speed-up", "whole calls", "predicted", "identical"}
SPEEDS = {"speedup_measured": "speed-up", "speedup_call": "whole calls"}
"""Fields of results, and the columns of their means over sets."""
COMPARED: dict[str, Any] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
SIGNS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@cache
def measured(folder: str) -> frozenset[float]:
    """Return the numbers of a folder's tables, and the speed-ups of its rows: of decoding, of calls."""
    place = RESULTS / folder
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted(place.rglob("*"))
        if path.suffix in (".md", ".csv", ".jsonl") and path.name != "README.md"
    )
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", text)}
    for path in place.rglob("results.json"):
        rows = json.loads(path.read_text(encoding="utf-8")).get("rows", [])
        numbers |= {row[name] for row in rows for name in SPEEDS if row.get(name)}
    return frozenset(numbers)


def folders(text: str) -> list[str]:
    """Return the folders of results that a text names, as `results/NAME`, `NAME/` or, after one,
    `_SUFFIX/`.
    """
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
    """Return what a formula of numbers, + - * /, max, min and brackets gives."""

    def of(node: ast.expr) -> float:
        match node:
            case ast.Constant(float() | int() as number):
                return number
            case ast.BinOp(left, sign, right):
                return SIGNS[type(sign)](of(left), of(right))
            case ast.Call(ast.Name("max" | "min" as name), arguments):
                parts = [
                    one
                    for part in arguments
                    for one in (part.elts if isinstance(part, ast.Tuple) else [part])
                ]
                return (max if name == "max" else min)(map(of, parts))
        raise AssertionError(f"{formula}: give numbers and + - * /")

    return of(ast.parse(formula, mode="eval").body)


def unknown(page: str, own: tuple[str, ...] = ()) -> list[str]:
    """Return the figures of a page's text that no result has, each with the line that it is in; a
    page in a folder of results is of that folder.
    """
    bad = []
    text = re.sub(r"^```.*?^```", "", CLAIM.sub("", page), flags=re.DOTALL | re.MULTILINE)
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        for unit in re.split(r"\n\s*\n|\n(?=[-|] )", section):
            places = folders(unit) or folders(section) or own
            numbers = frozenset().union(*map(measured, places))
            explained: set[str] = set()
            for kind, told in COMMENT.findall(unit):
                if kind == "cited":
                    explained |= set(told.split())
                    continue
                for figure, _, formula in (
                    part.strip().partition(" = ") for part in told.split("; ")
                ):
                    assert is_known(figure, frozenset({value(formula)})), f"{figure} = {formula}"
                    bad += [
                        f"{used} in {formula}"
                        for used in FIGURE.findall(formula)
                        if not is_known(used, numbers)
                    ]
                    explained.add(figure)
            shown = re.sub(r"`[^`]*`|\]\(\S*\)", "`x`", COMMENT.sub("", unit))
            for figure in FIGURE.findall(shown):
                if figure not in explained and not is_known(figure, numbers):
                    bad.append(f"{figure} in {unit.strip()[:60]!r}, of {places}")
    return bad


@cache
def lines(folder: str) -> list[dict[str, str]]:
    """Return the lines of a folder's tables, each by column."""
    found: list[dict[str, str]] = []
    header: list[str] = []
    for line in (RESULTS / folder / "table.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells
        elif not line.startswith("|-"):
            found.append(dict(zip(header, cells, strict=True)))
    return found


def looked_up(folder: str, labels: list[str], column: str) -> str:
    """Return a cell, a number or a list of numbers in brackets; exactly one line has all labels."""
    (line,) = (one for one in lines(folder) if set(labels) <= set(one.values()) and column in one)
    return f"({line[column]})"


def judged(claim: str) -> tuple[str, frozenset[float]]:
    """Return the verdict of a claim, and the numbers that it is of: its cells and the sides of its
    comparisons.
    """
    used: set[float] = set()

    def true(part: str, column: str | None) -> bool:
        def cell(match: re.Match[str]) -> str:
            labels = match[2].split(" / ") + ([column] if column else [])
            text = looked_up(match[1], labels[:-1], labels[-1])
            used.update(map(float, text.strip("()").split(", ")))
            return text

        left, sign, right = re.split(r" (>=|<=|>|<) ", CELL.sub(cell, part))
        sides = value(left), value(right)
        used.update(sides)
        return COMPARED[sign](*sides)

    def holds(part: str) -> bool:
        quantifier, _, rest = part.partition(" ")
        if quantifier not in ("some", "every"):
            return true(part, None)
        (folder, *_) = (match[1] for match in CELL.finditer(rest))
        columns = [name for name in lines(folder)[0] if name not in NO_SETS]
        return (any if quantifier == "some" else all)([true(rest, column) for column in columns])

    # all, for their numbers
    parts = [holds(part) for part in claim.split("; ")]
    return "holds" if all(parts) else "partly" if any(parts) else "fails", frozenset(used)


CLAIMS = (RESULTS / "claims.md").read_text(encoding="utf-8")


def test_findings_count_the_verdicts() -> None:
    """A line of the first table is a paper: how many of its claims hold, partly hold and fail."""
    counts = {}
    for section in CLAIMS.split("\n## ")[1:]:
        verdicts = [judged(claim)[0] for claim in CLAIM.findall(section)]
        counts[section.split()[0]] = [verdicts.count(v) for v in ("holds", "partly", "fails")]
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    assert {paper: list(map(int, numbers)) for paper, *numbers in rows} == counts
    assert f"the {sum(map(sum, counts.values()))} claims" in text


def test_verdicts_follow_from_the_results() -> None:
    claims = [line for line in CLAIMS.splitlines() if CLAIM.search(line)]
    assert len(claims) > 30
    bad = []
    for line in claims:
        verdict, numbers = judged(CLAIM.findall(line)[0])
        shown = CLAIM.sub("", line)
        named = {name for name, _ in CELL.findall(CLAIM.findall(line)[0])}
        told = shown.strip("| ").split("|")[-1].strip()
        if told.split(",")[0] != verdict:
            bad.append(f"{verdict}, not {told}: {shown}")
        if set(folders(shown)) != named:
            bad.append(f"folders {sorted(named)}, and the line names {folders(shown)}: {shown}")
        cited = {
            figure
            for kind, told in COMMENT.findall(shown)
            if kind == "cited"
            for figure in told.split()
        }
        figures = FIGURE.findall(re.sub(r"`[^`]*`", "`x`", COMMENT.sub("", shown)))
        bad += [
            f"{one} in {shown}"
            for one in figures
            if one not in cited and not is_known(one, numbers)
        ]
    assert bad == []


def test_a_verdict_follows_from_cells() -> None:
    m, t = "{block_efficiency_mini_views100: M / avg}", "{block_efficiency_mini_views100: T / avg}"
    assert judged(f"{m} > {t}")[0] == "holds"
    assert judged(f"{t} > {m}")[0] == "fails"
    assert judged(f"{m} > {t}; {t} > {m}")[0] == "partly"
    assert judged(f"{m} / {t} > 1.2") == ("holds", frozenset({3.79, 3.01, 3.79 / 3.01, 1.2}))
    every = "{block_efficiency_mini_views100: M} > {block_efficiency_mini_views100: T}"
    assert judged(f"some {every}")[0] == "holds"
    assert judged(f"every {every}")[0] == "fails"  # without images they are equal
    assert (
        judged("max({collaborative_gsm8k: left + right / CoS, 1 each / calls/token}) < 0.63")[0]
        == "fails"
    )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_figure_of_a_page_is_in_the_results_that_it_names(page: Path) -> None:
    own = (page.parent.name,) if page.parent.parent == RESULTS else ()
    assert unknown(page.read_text(encoding="utf-8"), own) == []


def test_a_stale_figure_is_found() -> None:
    """By its own name, its section's, and a formula whose figures are gone."""
    page = (
        "# A\nIt is 1.23 (`smollm2_gamma3/`).\n\n| a |\n|---|\n| 1.85 |\n| 1.86 |\n\n# B\n\n"
        "- LLaVA-1.5: 1.24\n"
    )
    assert [line[:4] for line in unknown(page)] == ["1.86", "1.24"]
    told = "It is {} (`smollm2_gamma3/`) <!-- derived: {} = {} -->"
    assert unknown(told.format("0.07", "0.07", "1.23 - 1.16")) == []
    assert len(unknown(told.format("0.06", "0.06", "1.22 - 1.16"))) == 1
    with pytest.raises(AssertionError):
        unknown(told.format("0.06", "0.06", "1.24 - 1.19"))
    assert unknown("`smollm2_gamma3/` to `_gamma7/`: 0.89") == []


def compared(folder: str) -> tuple[int, int]:
    """Return how many greedy answers a folder's rows compare, and how many of them differ."""
    rows = json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))["rows"]
    greedy = [row for row in rows if row["temperature"] == 0]
    same = sum(round(row["token_identity_rate"] * row["samples"]) for row in greedy)
    answers = sum(row["samples"] for row in greedy)
    return answers, answers - same


def test_the_numbers_of_equal_answers_are_those_of_the_results() -> None:
    """README and docs/exactness.md name these numbers."""
    readme, exactness = (
        re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
        for page in ("README.md", "docs/exactness.md")
    )
    (mini, _), (smollm2, _) = pairs = compared("exactness_mini"), compared("exactness_smollm2")
    assert f"all {mini + smollm2:,} that were compared" in readme
    answers, differ = compared("exactness_bf16_no_width")
    assert f"{differ} of {answers} answers" in exactness
    more, changed = compared("exactness_bf16_mini_no_width")
    assert f"{changed} of {more:,} of the mini pair" in exactness
    assert f"changed {differ + changed} of {answers + more:,} (" in readme
    (first, _), (second, _) = wide = compared("exactness_bf16"), compared("exactness_bf16_mini")
    assert f"none of {first + second:,} (" in readme
    assert f"none of {first:,} and none of {second:,}" in exactness
    names = "coder_pair_gamma3", "coder_pair_gamma5", "coder_trees", "coder_eagle3_gamma5"
    alike = [path.name for path in RESULTS.glob("coder_alike_*")]
    coder = [[compared(name) for name in group] for group in (names, alike)]
    float32, bfloat16 = (sum(answers for answers, _ in group) for group in coder)
    assert f"all {float32} in float32 on CPUs" in exactness
    assert f"all {bfloat16:,} in bfloat16 at width 8" in exactness
    assert {differ for _, differ in [*pairs, *wide, *coder[0], *coder[1]]} == {0}


def test_tables_of_speed_have_decoding_and_whole_calls() -> None:
    """Of every result that timed whole calls, as means over sets; older ones have decoding only."""
    timed = 0
    for path in sorted(RESULTS.glob("*/results.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if not any("speedup_call" in row for row in rows):
            continue
        name = path.parent.name
        lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            lines.setdefault(
                (row["pairing"], row["row"]) if "pairing" in row else (row["row"],), []
            ).append(row)
        for labels, line in lines.items():
            for field, column in SPEEDS.items():
                mean = sum(row[field] for row in line) / len(line)
                assert looked_up(name, list(labels), column) == f"({mean:.2f})", (name, labels)
        timed += 1
    assert timed > 20


def test_every_folder_of_results_is_named_by_a_page() -> None:
    """`a_gamma3/` to `a_gamma7/` names those between them, too."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), RESULTS / "README.md"]
    named = {without_digits(name) for page in pages for name in folders(page.read_text("utf-8"))}
    there = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert [name for name in sorted(there) if without_digits(name) not in named] == []


def test_results_name_the_command_that_made_them() -> None:
    """The list in results/README.md sends readers there."""
    paths = sorted(RESULTS.rglob("results.json"))
    runs = {path: json.loads(path.read_text(encoding="utf-8"))["run"] for path in paths}
    assert [path for path, run in runs.items() if not run["command"]] == []


def without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)
