"""Every command of README and docs is read by its script's own parser, and those about models of
the hub run against their twins, word for word, with `--debug` behind them: here those that take
seconds, others by `python -m tests.hub`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from jaxspec.checkpoints.locating import locate
from jaxspec.command import load_preset, preset_names
from jaxspec.data.prepared import Prepared
from jaxspec.engine.captioners import load_captioner
from jaxspec.heads.loading import is_head, load_head
from jaxspec.loading.models import LoadedModel
from tests.conftest import PAGES, page_name
from tests.hub import build
from tests.hub.pages import (
    Command,
    commands,
    keep_trial,
    lay_out,
    made_by,
    parse,
    run,
    shell_blocks,
    why_not,
)
from tests.hub.table import CAPTIONERS, TWINS
from train.recipe import KIND

COMMANDS = commands()
HERE = (*TWINS, "jaxspec_demo/mini/target --draft")
SHORT = [
    c
    for c in COMMANDS
    if c.script.startswith("jaxspec ")
    and c.script != "jaxspec serve"
    and any(name in c.text for name in HERE)
]
CHAIN = [
    c
    for c in COMMANDS
    if c.page == "docs/training.md" and re.search("my_mix|mine=|export runs/train/llava15", c.text)
]
SETS = {name: c for c in COMMANDS if (name := made_by(c))}


@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: f"{command.page} {command.text[:60]}"
)
def test_every_command_is_read_by_its_parser(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    # no other host is here
    monkeypatch.setattr("eval.lib.drafts.command_line.join_cluster", lambda place: None)
    if not build.TORCH and "--rows C " in command.text:
        pytest.skip("captioners run in torch")
    parse(command)
    assert not build.TORCH or "left out" not in capsys.readouterr().err  # rows of captions
    assert (
        command in (*SHORT, *CHAIN)
        or why_not(command)
        or re.match("python -m (train|eval)", command.text)
    )


def test_shells_can_read_every_block() -> None:
    for page in PAGES:
        for block in shell_blocks(page.read_text(encoding="utf-8")):
            read = subprocess.run(
                ["bash", "-n"], input=block, capture_output=True, text=True, check=False
            )
            assert not read.stderr, f"{page_name(page)}: {read.stderr}"


def test_the_list_is_whole() -> None:
    """The list has commands of every page, in blocks and text, and in the quotes of other
    commands.
    """
    assert {command.page for command in COMMANDS} >= {
        "README.md",
        "docs/recipes.md",
        "docs/tpu.md",
        "docs/tables.md",
        "docs/training.md",
    }
    found = {command.script for command in COMMANDS}
    assert {"train.recipe", "train.prepare", "train.distill_data", "eval.block_efficiency"} <= found
    assert {
        "jaxspec generate",
        "jaxspec collaborate",
        "jaxspec export",
        "make test",
        "pip install",
    } <= found
    assert any(
        command.page == "docs/tpu.md" and "--cluster auto" in command.text for command in COMMANDS
    )


@pytest.fixture
def folder(tmp_path: Path, offline_hub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a reader's working directory, and change to it."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.full
@pytest.mark.parametrize("text", dict.fromkeys(command.text for command in SHORT))
def test_it_runs_to_its_end(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Command("", text)
    drafts = {
        "llava15_68m": "mjbooo/lvlm68m",
        "llava15_68m_answers": "mjbooo/lvlm68m",
        "text_68m": "JackFram/llama-68m",
    }
    for recipe, draft in drafts.items():  # as recipes leave them
        shutil.copytree(locate(draft), folder / "runs" / "train" / recipe / "hf")
    run(command)
    assert capsys.readouterr().out.strip()
    if command.script == "jaxspec export":
        (load_head if is_head(command.options[1]) else LoadedModel.load)(command.options[1])


def left_in(runs: Path) -> set[Path]:
    """Return the files that runs, not trials, have left."""
    return {path for path in runs.rglob("*") if "debug" not in path.parts}


@pytest.mark.full
def test_a_draft_for_a_real_target_is_prepared_trained_and_measured(folder: Path) -> None:
    """A draft for a real target is prepared, trained and measured by the commands of
    docs/training.md, `With a real target`, each as a trial.
    """
    runs = folder / "runs"
    for command in CHAIN:
        before = left_in(runs)
        run(command)
        assert left_in(runs) == before
        keep_trial(runs)
    (table,) = folder.glob("runs/eval/**/table.md")
    assert "mine" in table.read_text()
    assert is_head(folder / "runs" / "train" / "kv_llava15_7b" / "hf")


def make_sets(folder: Path, *recipes: str) -> list[str]:
    """Run the documented commands of the data sets that these recipes name, and of those that
    answers come from.
    """
    names = [
        name
        for recipe in recipes
        for stage in load_preset(KIND, recipe).stages
        for name, _ in stage.data
    ]
    asked = [
        SETS[name].words[SETS[name].words.index("--data") + 1].removeprefix("runs/data/")
        for name in names
    ]
    for name in dict.fromkeys([*(name for name in asked if name in SETS), *names]):
        run(SETS[name])
        keep_trial(folder / "runs")
    return names


@pytest.mark.parametrize("name", preset_names(KIND))
def test_a_documented_command_makes_each_data_set_of_a_recipe(name: str) -> None:
    named = {name for stage in load_preset(KIND, name).stages for name, _ in stage.data}
    assert {
        name for name in named if not name.startswith("picturebook:") and name != "picturebook"
    } <= SETS.keys()


@pytest.mark.full
def test_sets_of_the_hub_are_prepared_as_documented(folder: Path) -> None:
    """Sets of the hub are prepared as documented: images with what is said of them, and AASD's
    three texts.
    """
    names = make_sets(folder, "onevision_68m", "kv_llava15_7b_answers")
    assert [len(Prepared(Path("runs/data") / name)) for name in names] == [4] * len(names)
    turns = {
        name: Prepared(Path("runs/data") / name)[0].turns for name in make_sets(folder, "ft_llama")
    }
    ((question, _),) = turns["redpajama_1t_sample"]
    assert question == ""
    assert turns["oig_small_chip2"] == (("How many are 1 and 2?", "They are 3."),)
    assert turns["oasst1"] == (("Which animal barks?", "A dog does."),)


@pytest.mark.full
@pytest.mark.skipif(not build.TORCH, reason="these captioners run in torch")
@pytest.mark.parametrize("name", CAPTIONERS)
def test_a_captioner_is_read_by_its_id_from_the_cache(name: str, tmp_path: Path) -> None:
    kind = "florence2" if "lorence" in name else "blip"
    pages = [Image.new("RGB", (40, 30), colour) for colour in ("red", "blue")]
    found = load_captioner(f"{kind}:{name}", directory=tmp_path).caption(pages)
    assert len({caption.text for caption in found}) == (2 if kind == "florence2" else 1)
    # with the same times
    assert load_captioner(f"{kind}:{name}", directory=tmp_path).caption(pages) == found
