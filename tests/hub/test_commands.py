"""The commands of README and docs that name models of the hub run against their twins, word for word."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jaxspec.cli import main
from jaxspec.decoding.loading import LoadedModel
from tests.end_to_end.test_readme_commands import PAGES, blocks
from tests.hub.table import TWINS

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


def test_the_headline_command_is_among_them() -> None:
    kinds = [shlex.split(command)[0] for command in COMMANDS]
    assert {"generate", "collaborate", "export"} <= set(kinds)
