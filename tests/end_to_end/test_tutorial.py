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
from jaxspec.cli.export import Export
from jaxspec.command import load_preset
from jaxspec.data.sources import Prepared
from PIL import Image
from train import distill_data, prepare, recipe

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
for others in ("AASD's drafts", "Data of the recipes"):  # tests/hub runs these on twins
    PAGE = re.sub(rf"## {others}.*?(?=\n## |\Z)", "", PAGE, flags=re.DOTALL)
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


def test_commands_are_such_as_there_are_and_each_finds_what_those_before_it_write(asked: Path) -> None:
    there, walked = {"mix.json", "held_out.jsonl", "photos"}, set()
    for script, *words in commands():
        needs, makes = STEPS[script](words)
        absent = [path for path in needs if path not in there and not (ROOT / path).is_dir()]
        assert not [path for path in absent if not path.startswith("llava-hf/")], f"{script} {words}"
        there |= makes
        walked.add(script)
    assert walked == set(STEPS)


Step = tuple[set[str], set[str]]
"""Paths that a command reads, and that it writes."""


def prepared(words: list[str]) -> Step:
    options = tyro.extras.subcommand_cli_from_dict(PREPARE, args=words)
    return {str(options.data), str(options.images), options.target}, {f"runs/data/{options.name}"}


def distilled(words: list[str]) -> Step:
    options = tyro.cli(distill_data.Options, args=words)
    return {options.data, options.target, *filter(None, [options.draft])}, {f"runs/data/{options.name}"}


def trained(words: list[str]) -> Step:
    name, *rest = words
    config, options = recipe._parse(name, load_preset(recipe.KIND, name), rest)
    start = getattr(options, "start", None)
    return {*options.data, config.target, *filter(None, [start])}, {f"runs/train/{name}/hf"}


def exported(words: list[str]) -> Step:
    options = tyro.cli(Export, args=words[1:])
    assert words[0] == "export"
    assert options.vocab_of is not None
    return {options.source, options.vocab_of}, {str(options.destination)}


def evaluated(words: list[str]) -> Step:
    _, config, _ = parse_command(block_efficiency.Options, "", words)
    assert len(config.rows) == 1
    return {config.draft, config.target}, set()


STEPS = {
    "pip": lambda words: (set(), set()),
    "ask.py": lambda words: (set(), set()),
    "train.prepare": prepared,
    "train.distill_data": distilled,
    "train.recipe": trained,
    "jaxspec": exported,
    "eval.block_efficiency": evaluated,
}
