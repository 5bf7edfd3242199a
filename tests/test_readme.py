"""The documentation describes the code, and its links and names exist."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxspec import typing
from jaxspec.command import load_preset, preset_names
from jaxspec.models.families import FAMILIES
from tests import conftest
from tests.conftest import ROOT, page_name
from train.recipe import KIND

PAGES = [*conftest.PAGES, *(ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY"))]
FOLDERS = ("jaxspec", "jaxspec_demo", "eval", "train", "configs", "tests", "results")
REFERENCES = (
    "CHANGELOG.md",
    "SECURITY.md",
    "results/claims.md",
    "results/mmspec_recorded/README.md",
    "picturebook/README.md",
)
"""Pages that are searched, not read."""
READ = [page for page in PAGES if page_name(page) not in REFERENCES]
NUMBER = re.compile(r"(?<![\w.,/-])\d[\d,]*(?:\.\d+)?(?![\w-])")
CODE = re.compile(r"```.*?```", re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_described(model_type):
    """Every family is described by a row of its own in docs/families.md."""
    family, page = FAMILIES[model_type], (ROOT / "docs/families.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{model_type}` \| (.+) \|$", page, re.MULTILINE)
    title, image_input, *_ = (cell.strip() for cell in row.split("|"))
    assert title == family.title
    assert (image_input == "none") == (family.images is None)


def test_the_recipes_are_listed_with_their_lengths():
    """Every recipe's preset is in the table; a line's last cell, if any, has the stages of all its
    recipes.
    """
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8").partition("## Recipes")[2]
    named = []
    for line in re.findall(r"^\| `.*\|$", page.partition("\n## ")[0], re.MULTILINE):
        recipes, _, lengths = (cell.strip() for cell in line.strip("|").split("|"))
        named += (names := re.findall(r"`(\w+)`", recipes))
        for name in names if lengths else ():
            stages = [stage.train for stage in load_preset(KIND, name).stages]
            assert lengths == ", ".join(f"{stage.steps:,} x {stage.batch}" for stage in stages), (
                name
            )
    assert sorted(named) == sorted(preset_names(KIND))


def prose(page: Path) -> str:
    """Return a page's running text: no code, tables, hidden comments or targets of links."""
    text = re.sub(
        r"<!-- (\w+): python.*?<!-- /\1 -->",
        "",
        CODE.sub("", page.read_text("utf-8")),
        flags=re.DOTALL,
    )
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^ *\|.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)\s]*\)", "]", text)


def sentences(page: Path) -> Iterator[str]:
    """Yield the sentences of a page's running text; a heading or list item begins a new one."""
    for paragraph in re.split(r"\n\s*\n|\n(?= *(?:[-*>]|\d+\.) )", prose(page)):
        yield from re.split(r"(?<=[.!?:;])[*)\]]*\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", READ, ids=page_name)
def test_a_sentence_has_at_most_three_numbers(page: Path):
    """A sentence has at most three numbers; more belong in a table. Sizes in names, as in `7B`, and
    digits in code are not counted.
    """
    crowded = {
        sentence: found
        for sentence in sentences(page)
        if len(found := NUMBER.findall(re.sub(r"^\d+\. |`[^`]*`", "", sentence))) > 3
    }
    assert crowded == {}


@pytest.mark.parametrize("page", READ, ids=page_name)
def test_running_text_names_no_folder_of_results(page: Path):
    """Running text names no folder of results: a link leads there, or a table has a column."""
    if page.is_relative_to(ROOT / "results"):
        return
    there = {path.name for path in (ROOT / "results").iterdir() if path.is_dir()}
    named = re.findall(r"`(?:results/)?(\w+)/?`|results/(\w+)", prose(page))
    assert there & {name for pair in named for name in pair} == set()


@pytest.mark.parametrize("page", READ, ids=page_name)
def test_a_page_begins_with_what_its_reader_can_do_after_it(page: Path):
    _, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert page.name == "README.md" or re.match(r"(After|By the end of) this page ", first)


@pytest.mark.parametrize("page", READ, ids=page_name)
def test_a_page_can_be_read_at_one_sitting(page: Path):
    """A page has at most 1,500 words outside of code and tables that a command writes."""
    text = re.sub(
        r"<!-- (\w+): python.*?<!-- /\1 -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    words = re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", CODE.sub("", text), flags=re.DOTALL))
    assert len(words) <= 1_500


def test_the_readmes_first_block_works_in_a_fresh_shell(tmp_path: Path) -> None:
    """README's first block works in a fresh shell as it is copied, with ADDRESS filled in. In place
    of an installation the environment records which commands `make` and the block find; their own
    tests run them.
    """
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    block = page.partition("```sh\n")[2].partition("```")[0]
    source, log = tmp_path / "source", tmp_path / "log"
    source.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, source)
    venv.create(source / ".venv", with_pip=False)
    for name in ("jaxspec", "python"):
        stand_in = source / ".venv" / "bin" / name
        stand_in.unlink(missing_ok=True)
        stand_in.write_text(f'#!/bin/sh\n[ "$2" = pip ] && exit 1\necho {name} "$@" >> {log}\n')
        stand_in.chmod(0o755)
    (source / ".venv" / ".demo").touch()
    clone = f"cp -R {source} jaxspec && touch jaxspec/.venv/.demo"
    lines = block.replace("git clone ADDRESS jaxspec", clone).replace("YOURS.jpg", "photo.jpg")
    assert lines.startswith(clone)
    done = subprocess.run(
        ["bash", "-e", "-c", lines],
        cwd=tmp_path,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    drawn, served, own = log.read_text().splitlines()[0], *log.read_text().splitlines()[-2:]
    assert drawn.startswith("jaxspec demo --out runs/race.json --svg runs/race.svg")
    assert (served, own) == (
        "jaxspec serve --demo",
        "jaxspec demo --image photo.jpg --svg yours.svg",
    )
    *_, opened, first, second, third = done.stdout.splitlines()
    assert "runs/race.svg" in opened
    assert "report.html" in opened
    names = [line.partition("#")[0].strip() for line in block.splitlines()[2:]]
    assert [line.strip() for line in (first, second, third)] == names


def test_make_demo_installs_what_the_blocks_commands_need() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rule = makefile.partition("$(VENV)/.demo: ")[2].partition("\n\n")[0]
    assert "-e '.[gguf,serve]'" in rule


def anchors(page: Path) -> set[str]:
    """Return what a link may name of a page: its headings, as GitHub writes them."""
    headings = re.findall(
        r"^#+ (.+)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:", link):
            continue
        place, _, anchor = link.partition("#")
        there = page.parent / place if place else page
        assert there.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {link}"


@every_page
def test_files_that_are_named_exist(page: Path):
    """Files that a page names exist; those of the package may be named without its name, as
    `engine/engine.py`.
    """
    own = "|".join(path.name for path in (ROOT / "jaxspec").iterdir() if path.is_dir())
    named = re.findall(
        rf"`((?:{'|'.join(FOLDERS)}|{own})/[\w/.-]*)`", page.read_text(encoding="utf-8")
    )
    absent = [
        name for name in named if not ((ROOT / name).exists() or (ROOT / "jaxspec" / name).exists())
    ]
    assert absent == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "results" / "README.md"], ids=page_name)
def test_modules_that_are_named_exist(page: Path):
    """Modules that a page names, as in `python -m eval.latency mini`, exist."""
    text = page.read_text(encoding="utf-8").partition("\n## 0.")[0]  # a release names what it had
    named = re.findall(r"python -m ((?:eval|train|tests)\.[a-z_]+)", text)
    places = [ROOT.joinpath(*name.split(".")) for name in named]
    assert [
        place for place in places if not (place.with_suffix(".py").is_file() or place.is_dir())
    ] == []


def legend(text: str) -> dict[str, str]:
    """Return letters and what they mean, of a table of both."""
    pairs = re.findall(r"\| *([A-Z]) *\| *([^|]*?) *(?=\|)", text)
    assert len(dict(pairs)) == len({meaning for _, meaning in pairs}) == len(pairs) > 0
    return dict(pairs)


LETTERS = legend(typing.__doc__ or "")


def dimensions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dimension) of all annotations and einsums; of einsums only the large letters,
    the others are local.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(
                value=ast.Name("Float" | "Int" | "Bool" | "UInt"),
                slice=ast.Tuple([_, ast.Constant(str(shape))]),
            ):
                yield from ((node.lineno, name) for name in re.findall(r"[A-Za-z_]+", shape))
            case ast.Call(func=ast.Attribute(attr="einsum"), args=[ast.Constant(str(pattern)), *_]):
                yield from ((node.lineno, name) for name in re.findall("[A-Z]", pattern))


def test_every_letter_has_a_meaning():
    """Every dimension is a word, or a letter of the legend, and the legend has no others."""
    met, unknown = set(), []
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        for line, dimension in dimensions(ast.parse(path.read_text(encoding="utf-8"))):
            name = dimension.removeprefix("_")  # `_T`: of any size
            met.add(name)
            if len(name) < 3 and name not in LETTERS:
                unknown.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert unknown == [], "use a letter of jaxspec/typing.py, or a word"
    assert LETTERS.keys() <= met
