"""The list of docs/tables.md is of every table and figure of the papers, and its commands are such as there are."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import pytest
import tyro
from configs import tables
from configs.tables import PAPERS, commands, list_of_tables
from eval import block_efficiency, collaborative, draft_quality, kv_head, latency
from eval.lib import loading
from eval.lib.command_line import parse_command
from eval.lib.config import EvalConfig
from eval.lib.tables import put_between
from eval.lib.together import CollaborativeEvalConfig
from jaxspec.command import load_preset
from jaxspec.errors import InputError
from train import distill_data, recipe

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "tables.md"
COUNTS = {"TABED": (22, 9), "IbED": (13, 11), "AASD": (2, 4), "CoS": (10, 8)}
"""Tables and figures of each paper."""


def test_the_page_holds_the_list(tmp_path: Path) -> None:
    text, copy = PAGE.read_text(encoding="utf-8"), tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    put_between(copy, "tables", list_of_tables())
    assert copy.read_text(encoding="utf-8") == text, "run: python -m configs.tables docs/tables.md"
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
        assert bool(line.command) != bool(line.why), line.where


def _preset(options: type, kind: type = EvalConfig) -> Callable[[list[str]], object]:
    return lambda words: parse_command(options, "", words, kind)


def _latency(words: list[str]) -> None:
    def only_parsed(preset: str, **options: object) -> str:
        return preset

    parsed = wraps(latency.main)(only_parsed)
    assert inspect.signature(parsed) == inspect.signature(latency.main)
    load_preset("latency", tyro.cli(parsed, args=words))


SCRIPTS: dict[str, Callable[[list[str]], object]] = {
    "eval.block_efficiency": _preset(block_efficiency.Options),
    "eval.draft_quality": _preset(draft_quality.Options),
    "eval.kv_head": _preset(kv_head.Options),
    "eval.collaborative": _preset(collaborative.Options, CollaborativeEvalConfig),
    "eval.latency": _latency,
    "train.distill_data": lambda words: tyro.cli(distill_data.Options, args=words),
    "train.recipe": lambda words: recipe._parse(words[0], load_preset(recipe.KIND, words[0]), words[1:]),
}


@pytest.mark.parametrize("command", commands())
def test_every_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Presets, rows, options and sets are there, and what one command reads another has written."""
    monkeypatch.setattr(loading, "captioner_lack", lambda text: None)
    python, flag, script, *words = shlex.split(command)
    assert (python, flag) == ("python", "-m")
    SCRIPTS[script](words)
    written = {
        found[1] or f"runs/train/{found[0]}"
        for found in re.findall(r"train\.recipe (\w+)(?:.*?--runs (\S+))?", "\n".join(commands()))
    }
    assert {place.removesuffix("/hf") for place in re.findall(r"runs/train/\S+/hf", command)} <= written


def test_every_command_writes_to_a_place_of_its_own() -> None:
    """One after the other they all run: where results of other options lie, a command is refused."""
    places: dict[tuple[str, str], str] = {}
    for command in commands():
        _, _, script, *words = shlex.split(command)
        option = {"train.recipe": "--runs", "train.distill_data": "--name"}.get(script, "--out")
        out = words[words.index(option) + 1] if option in words else words[0]
        assert places.setdefault((script, out), command) == command


def test_a_wrong_command_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "captioner_lack", lambda text: None)
    for words in (["llava16"], ["llava15", "--rows", "X"], ["llava15", "--gama", "3"], ["llava15", "--sets", "pop"]):
        with pytest.raises(InputError):
            SCRIPTS["eval.block_efficiency"](words)
    assert tables.TABED[0].where == "Tables 1, 3, 4, 18"
