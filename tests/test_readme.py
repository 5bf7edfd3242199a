"""The documentation describes the code, and its links and names exist."""

from __future__ import annotations

import ast
import re
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
LONGER = {
    "CHANGELOG.md": 10_000,
    "docs/tables.md": 1_200,
    "results/claims.md": 2_100,
    "results/mmspec_recorded/README.md": 1_400,
}
"""Words of pages that are lists of what was measured or changed, and are searched, not read."""
CODE = re.compile(r"```.*?```", re.DOTALL)

every_page = pytest.mark.parametrize("page", PAGES, ids=page_name)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_described(model_type):
    """By a row of its own in docs/families.md."""
    family, page = FAMILIES[model_type], (ROOT / "docs/families.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| `{model_type}` \| (.+) \|$", page, re.MULTILINE)
    title, image_input, *_ = (cell.strip() for cell in row.split("|"))
    assert title == family.title
    assert (image_input == "none") == (family.images is None)


def test_the_recipes_are_listed_with_their_lengths():
    """Every preset is in the table; a line's last cell, if any, has the stages of all its recipes."""
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


@every_page
def test_a_page_is_read_to_its_end(page: Path):
    """A page has at most 900 words outside of its code, its hidden comments and what a command
    writes; README has 110 lines.
    """
    text = page.read_text(encoding="utf-8")
    if page.name == "README.md" and page.parent == ROOT:
        assert len(text.splitlines()) <= 110
    written = re.sub(r"<!-- (\w+): python.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    words = re.findall(
        r"\S*\w\S*", re.sub(r"<!--.*?-->", "", CODE.sub("", written), flags=re.DOTALL)
    )
    assert len(words) <= LONGER.get(page_name(page), 900)


def test_the_readme_begins_with_its_two_commands():
    """On a fresh machine they do all the set-up; pip comes after, for an environment of one's
    own.
    """
    block = CODE.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0].splitlines()[1:]
    commands = [re.fullmatch(r"(make \w+) +# .+: \d+ minutes", line) for line in block[:2]]
    assert [command and command[1] for command in commands] == ["make demo", "make test"]
    assert "pip install -e" in "\n".join(block[2:])


def anchors(page: Path) -> set[str]:
    """What a link may name of a page: its headings, as GitHub writes them."""
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
    """Files of the package may be named without its name, as `engine/engine.py`."""
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
    """In `python -m eval.latency mini`, and the like."""
    named = re.findall(
        r"python -m ((?:eval|train|tests)\.[a-z_]+)", page.read_text(encoding="utf-8")
    )
    places = [ROOT.joinpath(*name.split(".")) for name in named]
    assert [
        place for place in places if not (place.with_suffix(".py").is_file() or place.is_dir())
    ] == []


def legend(text: str) -> dict[str, str]:
    """Letters and what they mean, of a table of both."""
    pairs = re.findall(r"\| *([A-Z]) *\| *([^|]*?) *(?=\|)", text)
    assert len(dict(pairs)) == len({meaning for _, meaning in pairs}) == len(pairs) > 0
    return dict(pairs)


LETTERS = legend(typing.__doc__ or "")


def dimensions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dimension) of all annotations and einsums; of einsums only the large letters, the
    others are local.
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
    """Words say what they mean; what is shorter is a letter of the legend, and the legend has no
    others.
    """
    met, unknown = set(), []
    for path in sorted((ROOT / "jaxspec").rglob("*.py")):
        for line, name in dimensions(ast.parse(path.read_text(encoding="utf-8"))):
            met.add(name)
            if len(name) < 3 and name not in LETTERS:
                unknown.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert unknown == [], "use a letter of jaxspec/typing.py, or a word"
    assert LETTERS.keys() <= met
