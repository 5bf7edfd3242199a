"""Every figure of a page is in the results that its sentence or its section names, so that no page
can grow stale.

A figure is a number with a decimal point. It is looked up in the tables of the folders of
`results/` that its list item, its paragraph or its table's row names; where that names none, in
those that the section names. Two hidden comments in the same place help:

    <!-- derived: 1.8 = 1.98 / 1.09 -->    follows from figures of these tables
    <!-- cited: 1.25 1.5 -->               is no measurement of ours

A line of a table of claims ends in its samples a set, the margins of its comparisons and a verdict,
which follow from cells of the folders:

    <!-- claim: {views100: T / avg} > {views100: M / avg}; some {views100: T} > {views100: M} -->

A cell names its folder, the labels of its line, and its column, of `table.md` or, if that has none,
of `results.json`; `some` and `every` go over the columns of sets. Its figures are of these cells.

A side is ahead if the difference is larger than its margin, which follows from the margins of the
cells. A cell of tokens per pass has a 95 % interval: of the row's blocks, or over its samples where
the row has that too and it is wider. Every other cell is known to 5 %, or less well, where tokens
per cycle of collaborating models spread more over samples. `>` and `<` come out as claimed, against
it, or undecided within the margin; `>=`, `<=` and `=` take what is within it.
`holds`: all comparisons come out as claimed; `no difference`: all are undecided; `fails`: none
comes out; `partly`: the rest.
"""

from __future__ import annotations

import ast
import json
import math
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
    "docs/how.md",
    *(f"docs/tables{paper}.md" for paper in ("", "-aasd", "-cos", "-ibed", "-tabed")),
    "docs/tpu.md",
    "picturebook/README.md",
)  # sizes, versions, worked examples and what the papers print
PAGES = [page for page in conftest.PAGES if page_name(page) not in OTHERS]
FIGURE = re.compile(
    r"(?<![\w.-])(?<!Python )(?<!jax )(?<!transformers )(?<!` )(?<!arXiv )(?<!§)(?<!Corollary )"
    r"\d+\.\d+(?![\w.]*\d|-)"
)
COMMENT = re.compile(r"<!-- (derived|cited): (.*?) -->")
CLAIM = re.compile(r"<!-- claim: (.*?) -->")
CELL = re.compile(r"\{([\w/]+): ([^}]*)\}")
NO_SETS = {"views", "turn", "avg", "speed-up", "whole calls", "predicted", "identical"}
SPEEDS = {"speedup_measured": "speed-up", "speedup_call": "whole calls"}
"""Fields of results, and the columns of their means over sets."""
UNKNOWN = 0.05
"""Margin of a number without an interval: a time, a speed, a rate."""
SIGNS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@cache
def measured(folder: str) -> frozenset[float]:
    """Return the numbers of a folder's tables, and its rows' speed-ups of decoding and calls."""
    place = RESULTS / folder
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in sorted(place.rglob("*"))
        if path.suffix in (".md", ".csv", ".jsonl") and path.name != "README.md"
    )
    numbers = {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[+-]\d+)?", text)}
    for path in place.rglob("results.json"):
        results = json.loads(path.read_text(encoding="utf-8")).get("rows", [])
        numbers |= {row[name] for row in results for name in SPEEDS if row.get(name)}
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
    text = "\n".join(line for line in page.split("\n") if not CLAIM.search(line))
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
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


@cache
def rows(folder: str) -> list[dict[str, Any]]:
    """Return the rows of a folder's results."""
    return json.loads((RESULTS / folder / "results.json").read_text(encoding="utf-8"))["rows"]


def looked_up(folder: str, labels: list[str], column: str) -> str:
    """Return a cell, a number or a list of numbers in brackets; the lines with all labels agree."""
    tables = [line for line in lines(folder) if column in line]
    if not tables:
        tables = [{name: str(value) for name, value in row.items()} for row in rows(folder)]
    (cell,) = {line[column] for line in tables if set(labels) <= set(line.values())}
    return f"({cell})"


def half_interval(row: dict[str, Any]) -> float:
    """Return half of the 95 % interval of a row's tokens per pass."""
    counts = row["acceptance_histogram"]  # of blocks, by accepted tokens
    blocks = sum(counts)
    mean = sum(n * count for n, count in enumerate(counts)) / blocks
    variance = sum(count * (n - mean) ** 2 for n, count in enumerate(counts)) / blocks
    return max(1.96 * math.sqrt(variance / blocks), (row.get("high", 0) - row.get("low", 0)) / 2)


def margin(folder: str, labels: list[str], column: str, cell: float) -> float:
    """Return how far a cell may be from what more samples or runs would give."""
    gamma = re.fullmatch(r"tau gamma=(\d+)", column)
    names = {*labels, column}
    parts = [
        row
        for row in (rows(folder) if column in ("avg", *sets(folder)) or gamma else [])
        if row.get("row") in names
        and ("avg" in names or row["dataset"] in names)
        and (gamma is None or row["gamma"] == int(gamma[1]))
    ]
    if not parts:
        spreads = [
            (row["high"] - row["low"]) / 2 / row["tokens_per_cycle"]
            for row in rows(folder)
            if "low" in row and {row.get("pairing"), row["row"]} <= names
        ]
        return max([UNKNOWN, *spreads]) * abs(cell)
    mean = sum(row["tokens_per_pass"] for row in parts) / len(parts)
    assert abs(mean - cell) < 0.006, (
        f"{folder}: {labels}, {column}: {cell}, and its rows give {mean}"
    )
    return math.hypot(*map(half_interval, parts)) / len(parts)


def sets(folder: str) -> list[str]:
    """Return the columns of sets of a folder's first table."""
    return [name for name in lines(folder)[0] if name not in NO_SETS]


class Claim:
    """Hold a claim's verdict, with the numbers and the margins that it is of."""

    def __init__(self, text: str) -> None:
        self.numbers: set[float] = set()
        self.margins: list[float] = []
        outcomes = {self.outcome(part) for part in text.split("; ")}
        self.verdict = "partly" if 1 in outcomes else "fails"
        if len(outcomes) == 1:
            self.verdict = {1: "holds", 0: "no difference", -1: "fails"}[outcomes.pop()]

    def outcome(self, part: str) -> int:
        """Return 1 if a part comes out as claimed, 0 within its margin, -1 otherwise."""
        quantifier, _, rest = part.partition(" ")
        if quantifier not in ("some", "every"):
            return self.compared(part, None)
        (folder, *_) = (match[1] for match in CELL.finditer(rest))
        outcomes = [self.compared(rest, column) for column in sets(folder)]
        return min(outcomes) if quantifier == "every" else (1 if 1 in outcomes else -1)

    def compared(self, part: str, column: str | None) -> int:
        """Return the outcome of a comparison, of one column of sets if its cells name none."""
        values: list[float] = []
        margins: list[float] = []

        def cell(match: re.Match[str]) -> str:
            *labels, name = match[2].split(" / ") + ([column] if column else [])
            cells = [
                float(text) for text in looked_up(match[1], labels, name).strip("()").split(", ")
            ]
            margins.extend(margin(match[1], labels, name, each) for each in cells)
            values.extend(cells)
            return f"({', '.join('{}' for _ in cells)})"

        left, sign, right = re.split(r" (>=|<=|>|<|=) ", CELL.sub(cell, part))

        def sides(numbers: list[float]) -> tuple[float, float]:
            count = left.count("{}")
            return value(left.format(*numbers[:count])), value(right.format(*numbers[count:]))

        def difference(numbers: list[float]) -> float:
            first, second = sides(numbers)
            return first - second

        middle = difference(values)
        # How far each cell's margin moves the difference, as for independent errors.
        moves = [
            difference([*values[:i], values[i] + margins[i], *values[i + 1 :]]) - middle
            for i in range(len(values))
        ]
        whole = math.hypot(*moves)
        self.margins.append(whole)
        self.numbers |= {*values, *sides(values)}
        order = 0 if abs(middle) <= whole else int(math.copysign(1, middle))
        order = -order if sign.startswith("<") else order
        if sign == "=":
            return 1 if order == 0 else -1
        return order if sign in "<>" else (1 if order >= 0 else -1)

    def spread(self) -> str:
        """Return the cell of the margins: one number, or the least and the most."""
        return " to ".join(dict.fromkeys(f"{f(self.margins):.2g}" for f in (min, max)))


def samples(names: list[str]) -> str:
    """Return the cell of the samples a set of folders; `-` for times of passes."""
    counts = [row["samples"] for name in names for row in rows(name) if "samples" in row]
    return " to ".join(dict.fromkeys(map(str, (min(counts), max(counts))))) if counts else "-"


CLAIMS = (RESULTS / "claims.md").read_text(encoding="utf-8")


VERDICTS = "holds", "partly", "no difference", "fails"


def test_findings_count_the_verdicts() -> None:
    """docs/findings.md counts, for each paper, how many of its claims have each verdict."""
    counts = {}
    for section in CLAIMS.split("\n## ")[1:]:
        verdicts = [Claim(claim).verdict for claim in CLAIM.findall(section)]
        counts[section.split()[0]] = [verdicts.count(each) for each in VERDICTS]
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\w+)" + 4 * r" \| (\d+)" + r" \|", text, re.MULTILINE)
    assert {paper: list(map(int, numbers)) for paper, *numbers in table} == counts
    assert f"the {sum(map(sum, counts.values()))} claims" in text


def test_verdicts_follow_from_the_results() -> None:
    claims = [line for line in CLAIMS.splitlines() if CLAIM.search(line)]
    assert len(claims) > 30
    bad = []
    for line in claims:
        (text,) = CLAIM.findall(line)
        claim = Claim(text)
        shown = CLAIM.sub("", line)
        named = list(dict.fromkeys(name.partition("/")[0] for name, _ in CELL.findall(text)))
        cells = [cell.strip() for cell in shown.strip("| ").split("|")]
        whole = list(dict.fromkeys(name for name, _ in CELL.findall(text)))
        expected = [samples(whole), claim.spread(), claim.verdict]
        if [*cells[-3:-1], cells[-1].partition(",")[0]] != expected:
            bad.append(f"{expected}, not {cells[-3:]}: {shown}")
        if {*folders(shown)} != {*named}:
            bad.append(f"folders {sorted(named)}, and the line names {folders(shown)}: {shown}")
        cited = {
            figure
            for kind, told in COMMENT.findall(shown)
            if kind == "cited"
            for figure in told.split()
        }
        page = " | ".join(cells[:-2])
        figures = FIGURE.findall(re.sub(r"`[^`]*`", "`x`", COMMENT.sub("", page)))
        bad += [
            f"{one} in {shown}"
            for one in figures
            if one not in cited and not is_known(one, frozenset(claim.numbers))
        ]
    assert bad == []


def test_a_verdict_follows_from_cells() -> None:
    m, t = "{block_efficiency_mini_views100: M / avg}", "{block_efficiency_mini_views100: T / avg}"
    claim = Claim(f"{m} / {t} > 1.2")
    assert claim.numbers == {3.79, 3.01, 3.79 / 3.01, 1.2}
    every = "{block_efficiency_mini_views100: M} > {block_efficiency_mini_views100: T}"
    calls = "{collaborative_gsm8k: left + right / CoS, 1 each / calls/token}"
    verdicts = {
        f"{m} > {t}": "holds",
        f"{t} > {m}": "fails",
        f"{m} > {t}; {t} > {m}": "partly",
        f"{m} > {m}": "no difference",
        f"{m} > {m}; {t} > {m}": "fails",
        f"{m} >= {m}; {m} = {m}": "holds",
        f"{m} = {t}": "fails",
        f"some {every}": "holds",
        f"every {every}": "no difference",  # without images they are equal
        f"max({calls}) < 0.5": "fails",
        f"max({calls}) < 0.65": "no difference",  # 0.63, known to 5 %
        f"max({calls}) < 0.7": "holds",
        "{accelerator/llava7b_68m: 1 / 2 / 3 / speed-up} > 2.5": "holds",
        "{accelerator/llava7b_68m: forced, B=1, R=2 / verify_ms} < 4.7": "no difference",
    }
    assert {text: Claim(text).verdict for text in verdicts} == verdicts


def test_a_margin_is_of_blocks_or_of_samples() -> None:
    """A margin is of a row's blocks, here a hundred, half with no and half with two accepted
    tokens, or of its samples where that interval is wider.
    """
    row: dict[str, Any] = {"acceptance_histogram": [50, 0, 50]}
    assert half_interval(row) == pytest.approx(0.196)
    assert half_interval(row | {"low": 1.5, "high": 2.5}) == 0.5
    pairing = "0.5B + 1.5B, T=1"
    known = [
        margin("coder_cos_sampled", [pairing, name], "calls", 1) for name in ("CoS", "speculative")
    ]
    assert known == [UNKNOWN, pytest.approx(0.053, abs=1e-3)]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_figure_of_a_page_is_in_the_results_that_it_names(page: Path) -> None:
    own = (page.parent.name,) if page.parent.parent == RESULTS else ()
    assert unknown(page.read_text(encoding="utf-8"), own) == []


def test_a_stale_figure_is_found() -> None:
    """A stale figure is found by its own folder's name, its section's, or a formula whose figures
    are gone.
    """
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
    greedy = [row for row in rows(folder) if row["temperature"] == 0]
    same = sum(round(row["token_identity_rate"] * row["samples"]) for row in greedy)
    answers = sum(row["samples"] for row in greedy)
    return answers, answers - same


def test_the_numbers_of_equal_answers_are_those_of_the_results() -> None:
    """README and docs/exactness.md name the numbers of equal answers that the results have."""
    readme, exactness = (
        re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))
        for page in ("README.md", "docs/exactness.md")
    )
    (mini, _), (smollm2, _) = pairs = compared("exactness_mini"), compared("exactness_smollm2")
    assert f"all {mini + smollm2:,} answers of SmolLM2 and of the toy models" in readme
    answers, differ = compared("exactness_bf16_no_width")
    assert f"{differ} of {answers} answers" in exactness
    more, changed = compared("exactness_bf16_mini_no_width")
    assert f"{changed} of {more:,} (" in exactness
    assert f"changed {differ + changed} of {answers + more:,} answers." in readme
    (first, _), (second, _) = wide = compared("exactness_bf16"), compared("exactness_bf16_mini")
    assert f"none of {first + second:,}." in readme
    assert f"none of {first:,} (" in exactness
    assert f"none of {second:,} (" in exactness
    names = "coder_pair_gamma3", "coder_pair_gamma5", "coder_trees", "coder_eagle3_gamma5"
    alike = [path.name for path in RESULTS.glob("coder_alike_*")]
    coder = [[compared(name) for name in group] for group in (names, alike)]
    float32, bfloat16 = (sum(answers for answers, _ in group) for group in coder)
    assert f"all {float32} in float32 on CPUs" in exactness
    assert f"all {bfloat16:,} in bfloat16 at width 8" in exactness
    assert {differ for _, differ in [*pairs, *wide, *coder[0], *coder[1]]} == {0}


COMPILED = {
    "gemma4": "Gemma 4",
    "llava13b": "LLaVA-1.5-13B",
    "llava7b": "LLaVA-1.5-7B with a 68M draft",
    "qwen3_8b": "Qwen3",
    "qwen3vl": "Qwen3-VL",
}
"""Rows of the table in docs/what-ran.md by how folders `compiled_*` begin."""


def test_what_was_compiled_is_named_among_what_ran() -> None:
    page = (ROOT / "docs" / "what-ran.md").read_text(encoding="utf-8")
    head, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("| model |")[2].partition("\n\n")[0].splitlines()
    )
    estimated = set()
    for path in RESULTS.glob("compiled_*"):
        (name,) = (row for begin, row in COMPILED.items() if path.name[9:].startswith(begin))
        for row in rows(path.name):
            chip = row["chips"].partition(":")[0]
            column = "TPU" if chip.startswith("v") else f"NVIDIA {chip.upper()}"
            estimated.add((name, column))
    for name, column in sorted(estimated):
        (line,) = (line for line in lines if line[0].partition(",")[0] == name)
        cell = line[1 + head.index(column)]
        assert cell in ("estimated", "measured"), (name, column)


def test_the_papers_words_name_fields_of_results() -> None:
    """The papers' words, in the last column of their table in docs/glossary.md, name fields of
    results.
    """
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    section = page.partition("## The papers' words")[2].partition("\n## ")[0]
    named = {
        field
        for line in section.splitlines()
        if line.startswith("|")
        for field in re.findall(r"`(\w+)`", line.strip("| ").split("|")[-1])
    } - {"results"}
    known = {field for name in ("eyes_kv_head", "coder_cos") for row in rows(name) for field in row}
    assert len(named) > 10
    assert named <= known


def test_tables_of_speed_have_decoding_and_whole_calls() -> None:
    """Tables of results that timed whole calls have them as means over sets; old ones lack them."""
    timed = 0
    for path in sorted(RESULTS.glob("*/results.json")):
        name = path.parent.name
        if not any("speedup_call" in row for row in rows(name)):
            continue
        lines: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows(name):
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
    """Every folder of results is named by a page; `a_gamma3/` to `a_gamma7/` names those between
    them, too.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), RESULTS / "README.md"]
    named = {without_digits(name) for page in pages for name in folders(page.read_text("utf-8"))}
    there = {path.name for path in RESULTS.iterdir() if path.is_dir()}
    assert [name for name in sorted(there) if without_digits(name) not in named] == []


def test_results_name_the_command_that_made_them() -> None:
    """Results name the command that made them, as the list in results/README.md says."""
    paths = sorted(RESULTS.rglob("results.json"))
    runs = {path: json.loads(path.read_text(encoding="utf-8"))["run"] for path in paths}
    assert [path for path, run in runs.items() if not run["command"]] == []


def without_digits(name: str) -> str:
    return re.sub(r"\d+", "", name)
