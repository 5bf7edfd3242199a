"""docs/training.md: its program asks about any folder of photographs, and its commands are such as there are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tyro
from eval import block_efficiency
from eval.lib.command_line import parse_command
from jaxspec.data.sources import Prepared
from PIL import Image
from train import prepare

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
PREPARE = {"llava": prepare.Llava, "text": prepare.Text, "picturebook": prepare.Book}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def commands() -> Iterator[list[str]]:
    """The words of every command about photographs, behind `python` and `-m`, in order, and of those in the text."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    lines = [line for line in lines if "smollm2" not in line and "prompts" not in line]
    within = re.findall(r"`(python -m train.[^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))
    for line in [*lines, *within]:
        yield shlex.split(line.removeprefix("python ").removeprefix("-m "))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 20 photographs of which `ask.py` has asked."""
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 9, 3), np.uint8)
    for i, page in enumerate(pixels):
        Image.fromarray(page).save(tmp_path / "photos" / f"it's {i:02d}.{('png', 'jpg', 'JPEG')[i % 3]}")
    (tmp_path / "photos" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    (program,) = blocks("python")
    exec(program, {})
    return tmp_path


def test_training_and_held_out_photographs_are_others(asked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = next(words for words in commands() if words[0] == "train.prepare")
    assert "--target" in words
    target = words.index("--target")
    words[target + 1] = str(ROOT / words[target + 1])
    folder = prepare.main(tyro.extras.subcommand_cli_from_dict(PREPARE, args=words[1:]))
    assert "bucket  rows that teach" in capsys.readouterr().out
    rows = Prepared(folder)
    assert len(rows) == 90
    words = next(words for words in commands() if words[0] == "eval.block_efficiency")
    _, config, _ = parse_command(block_efficiency.Options, "", words[1:])
    held_out = config.samples("photos")
    assert len(held_out) == 2
    seen = {row.images[0].content for row in rows}
    assert len(seen) == 18
    assert not seen & {sample.images[0].content for sample in held_out}
    assert {sample.turns[0][0] for sample in held_out} < {row.turns[0][0] for row in rows}
