"""The commands of README and docs that name models of the hub run against their twins, word for word.

Where a command trains or measures, `--debug` stands behind it.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import tyro
from PIL import Image

from eval import block_efficiency
from jaxspec.checkpoints.kv_head import is_kv_head
from jaxspec.cli import main
from jaxspec.decoding.loading import LoadedModel
from tests.end_to_end.test_readme_commands import PAGES, blocks
from tests.end_to_end.test_tutorial import PREPARE
from tests.hub.table import TWINS
from train import distill_data, prepare, recipe

LINES = [line for page in PAGES for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()]
COMMANDS = dict.fromkeys(
    line.removeprefix("jaxspec ")
    for line in LINES
    if line.startswith("jaxspec ") and any(name in line for name in TWINS)
)


@pytest.fixture
def folder(tmp_path: Path, offline_hub: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's working directory: a photograph, and a draft that `train.recipe llava15_68m` left."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")
    (snapshot,) = (offline_hub / "models--mjbooo--lvlm68m" / "snapshots").iterdir()
    shutil.copytree(snapshot, tmp_path / "runs" / "train" / "llava15_68m" / "hf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_it_runs_to_its_end(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)
    main(words)
    assert capsys.readouterr().out.strip()
    if words[0] == "export":
        LoadedModel.load(words[2])


@pytest.fixture
def photographs(folder: Path) -> Path:
    """What docs/training.md begins with: a folder of photographs, questions about them, and some held out."""
    shutil.rmtree(folder / "runs")
    (folder / "photos").mkdir()
    pixels = np.random.default_rng(1).integers(0, 256, (6, 30, 40, 3), np.uint8)
    for number, page in enumerate(pixels):
        Image.fromarray(page).save(folder / "photos" / f"{number}.jpg")
    talk = ({"from": "human", "value": "<image>\nWhat is this?"}, {"from": "gpt", "value": "A tree."})
    rows = [{"id": str(number), "image": f"{number}.jpg", "conversations": talk} for number in range(4)]
    (folder / "mix.json").write_text(json.dumps(rows))
    held_out = [{"id": str(number), "image": f"{number}.jpg", "turns": ["What is this?"]} for number in (4, 5)]
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)) + "\n")
    return folder


def test_a_draft_for_a_real_target_is_prepared_trained_and_measured(photographs: Path) -> None:
    """The commands of docs/training.md, `With a real target`, one after the other."""
    (page,) = (page for page in PAGES if "## With a real target" in page)
    chapter = page.split("## With a real target")[1].split("\n## ")[0]
    lines = [*blocks(chapter, "sh")[0].splitlines(), *re.findall(r"`(python -m train[^`]+)`", chapter)]
    scripts = {
        "train.prepare": lambda words: prepare.main(tyro.extras.subcommand_cli_from_dict(PREPARE, args=words)),
        "train.distill_data": lambda words: distill_data.main(tyro.cli(distill_data.Options, args=[*words, "--debug"])),
        "train.recipe": lambda words: recipe.main([*words, "--debug"]),
        "eval.block_efficiency": lambda words: block_efficiency.main([*words, "--debug"]),
    }
    for line in lines:
        words = shlex.split(line)
        if words[0] == "jaxspec":
            main(words[1:])
        else:
            scripts[words[2]](words[3:])
    (table,) = photographs.glob("runs/eval/**/table.md")
    assert "mine" in table.read_text()
    assert is_kv_head(photographs / "runs" / "train" / "kv_llava15_7b" / "hf")


def test_the_headline_command_is_among_them() -> None:
    kinds = [shlex.split(command)[0] for command in COMMANDS]
    assert {"generate", "collaborate", "export"} <= set(kinds)
