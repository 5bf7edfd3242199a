"""Find every command of README and docs, ask its script's own parser about it, and run it against
the twins.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from PIL import Image

from eval.lib.collaborative.config import CollaborativeEvalConfig
from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.config import EvalConfig
from eval.lib.recorded.config import RecordedConfig
from jaxspec.cli import commands as subcommands
from jaxspec.cli import main
from jaxspec.cli.options import parse_subcommand
from tests.conftest import PAGES, ROOT, page_name
from train import distill_data, prepare, prompts, recipe

_OURS = re.compile(
    r"(?:python -m (?:train|eval|jaxspec|configs|tests)\.[\w.]+|jaxspec [a-z]+|make \w+)"
    r"(?![\w.])|pip install -e [^ ]+"
)
_END = re.compile(r"\" &&| && | \|\| |;|&&|\)\"|' *$|\" *$|$")


class Command(NamedTuple):
    """Hold a command as a page has it, on one line."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def script(self) -> str:
        """Return the name of the script, as `train.recipe`, or of the subcommand, as `jaxspec
        generate`.
        """
        words = self.words
        return words[2] if words[0] == "python" else " ".join(words[:2])

    @property
    def options(self) -> list[str]:
        return self.words[3 if self.words[0] == "python" else 2 :]


def shell_blocks(text: str) -> list[str]:
    """Return the shell code between the fences of a page."""
    return re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[Command]:
    """Return every command of this project's, in the order of the pages, each text once a page."""
    found: dict[Command, None] = {}
    for page in PAGES:
        whole = page.read_text(encoding="utf-8")
        spans = re.findall(
            r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", whole, flags=re.DOTALL | re.MULTILINE)
        )
        lines = [line for block in shell_blocks(whole) for line in _lines(block)]
        for line in [*lines, *(span for span in spans if _OURS.match(span))]:
            found |= {Command(page_name(page), text): None for text in _within(line.strip())}
    return list(found)


def _lines(block: str) -> Iterator[str]:
    """Yield the lines of a shell block, with its variables, loops and trainings on a slice written
    out.
    """
    told = dict(re.findall(r"^(\w+)='(.*)'$", block, re.MULTILINE))
    block = re.sub(
        r"train/slice\.sh (?:walk|trial) (\w+)",
        r"python -m train.recipe \1 --cluster auto",
        block.replace("\\\n", " "),
    )
    for line in block.splitlines():
        for name, value in told.items():
            line = line.replace(f"${name}", value)
        loop = re.fullmatch(r"for (\w+) in (.*?); do (.*); done", line)
        yield from (
            [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()] if loop else [line]
        )


def _within(line: str) -> Iterator[str]:
    """Yield the commands of a shell's line: the line itself, or the part in loops, in quotes or
    behind `srun`.
    """
    if _OURS.match(line):
        yield line
        return
    for start in _OURS.finditer(line):
        end = _END.search(line, start.end())
        yield line[start.start() : end.start() if end else None].strip()


def _evaluation(name: str) -> Callable[[list[str]], object]:
    script: Any = importlib.import_module(name)
    kinds: dict[str, Any] = {
        "eval.collaborative": CollaborativeEvalConfig,
        "eval.mmspec": (EvalConfig, RecordedConfig),
    }
    return lambda words: parse_command(script.Options, "", words, kinds.get(name, EvalConfig))


def _function(name: str) -> Callable[[list[str]], object]:
    return lambda words: tyro.extras.get_parser(importlib.import_module(name).main).parse_args(
        words
    )


def _subcommand(name: str, words: list[str]) -> object:
    if name == "export" and words[0].startswith("--"):  # an option that a page names alone
        words = ["SRC", "DST", *words]
    return parse_subcommand(KINDS, [name, *words], "jaxspec", None)


def _recipe(words: list[str]) -> object:
    return recipe.parse_all(words)


KINDS = {name: kind for name, (kind, _) in subcommands().items()}
PREPARED = {"llava": prepare.Llava, "text": prepare.Text, "picturebook": prepare.Book}
MEASURES = (
    *("block_efficiency", "collaborative", "draft_quality", "exactness", "kv_head", "mmspec"),
    "plans",
)
FUNCTIONS = (
    *("eval.latency", "eval.peers", "eval.accelerator", "eval.compiled", "eval.serving"),
    *("eval.tables", "train.text", "train.tower", "train.eyes", "train.alike", "train.steps"),
)
PARSERS: dict[str, Callable[[list[str]], Any]] = {
    **{f"eval.{name}": _evaluation(f"eval.{name}") for name in MEASURES},
    **{name: _function(name) for name in FUNCTIONS},
    "train.recipe": _recipe,
    "train.distill_data": lambda words: tyro.cli(distill_data.Options, args=words),
    "train.prompts": lambda words: tyro.cli(prompts.Options, args=words),
    "train.prepare": lambda words: parse_subcommand(PREPARED, words, "train.prepare", None),
    **{f"jaxspec {name}": partial(_subcommand, name) for name in KINDS},
}


def parse(command: Command) -> None:
    """Let the script's own parser read a command; it raises, or exits with 2, where there is no
    such option.

    Of a name alone, as `jaxspec export`, there is nothing to read.
    """
    words = [word for word in command.options if word != "--help"]
    if command.script in PARSERS:
        if words or command.script in ("jaxspec demo", *FUNCTIONS):
            PARSERS[command.script](words)
    elif command.script.startswith("make "):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{command.words[1]}:", makefile, re.MULTILINE), command.text
    elif command.script == "pip install":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(re.findall(r"[\w-]+", command.words[3])) <= set(
            project["optional-dependencies"]
        ), command.text
    elif not command.script.endswith(".NAME"):
        assert not command.script.startswith(("train.", "eval.")), (
            f"{command.script}: what is its parser?"
        )
        assert find_spec(command.script), command.text


def run(command: Command) -> None:
    """Run a command in this process and folder, with --debug behind it where it trains or
    measures.
    """
    name, words = command.script, [*command.options, "--debug"]
    if name.startswith("jaxspec "):
        main(command.words[1:])
    elif name in FUNCTIONS:
        tyro.cli(importlib.import_module(name).main, args=words)
    elif name in ("train.distill_data", "train.prepare", "train.prompts"):
        importlib.import_module(name).main(PARSERS[name](words))
    else:
        importlib.import_module(name).main(words)


def made_by(command: Command) -> str:
    """Return the name of the data set that a command makes; "" for other commands."""
    words = command.words
    makes = command.script in ("train.prepare", "train.distill_data") and "--name" in words
    return words[words.index("--name") + 1] if makes else ""


NOT_RUN = {
    r"NAME|PRESET|DIR|FOLDER$|SRC|DST|--help|^jaxspec (generate|export|import|plan)$|export --": (
        "stands for others"
    ),
    r"^(make|pip) |tests\.|jaxspec\.data|jaxspec\.models|configs\.|train\.prompts": (
        "is not about models of the hub"
    ),
    r"--cluster": "is for several hosts",
    r"eval\.mmspec recorded": "needs the record of LLaVA-1.5-7B, which is no model",
    r"eval\.(latency|accelerator|compiled)": (
        "times shapes of 7B with random weights, which need an accelerator"
    ),
    r"jaxspec drafts": "is run by tests/hub/test_drafts.py",
    r"jaxspec plan": "is run by tests/decoding/test_plan.py and tests/training/test_plan.py",
    r"jaxspec serve|eval\.serving": (
        "runs until it is stopped, or needs it to run; tests/serve runs both"
    ),
    r"train\.(tower|text|eyes|alike|steps)|mini|synthetic|visual|collaborative gsm8k|aasd$|"
    r"jaxspec demo|smollm2": (
        "is of models that are shipped, or made from scratch; tests/end_to_end runs these scripts"
    ),
}
"""Commands that no twin is run with, and why; the first that is found in one counts."""


def why_not(command: Command) -> str:
    """Return why a command is parsed alone; empty if it can be run."""
    return next(
        (reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command.text)), ""
    )


def lay_out(folder: Path) -> None:
    """Write what the pages begin with: a checkout, a photograph, a folder of some, questions about
    them, some held out, and prompts without images.
    """
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)).save(folder / "photo.jpg")
    (folder / "jaxspec_demo").symlink_to(ROOT / "jaxspec_demo")
    pages = rng.integers(0, 256, (6, 30, 40, 3), np.uint8)
    for photos in ("photos", "llava_pretrain", "llava_tune", "onevision", "m4_instruct"):
        (folder / photos).mkdir()
        for number, page in enumerate(pages):
            Image.fromarray(page).save(folder / photos / f"{number}.jpg")
    talk = (
        {"from": "human", "value": "<image>\nWhat is this?"},
        {"from": "gpt", "value": "A tree."},
    )
    rows = [
        {"id": str(number), "image": f"{number}.jpg", "conversations": talk} for number in range(4)
    ]
    (folder / "mix.json").write_text(json.dumps(rows))
    held_out = [
        {"id": str(number), "image": f"{number}.jpg", "turns": ["What is this?"]}
        for number in (4, 5)
    ]
    (folder / "held_out.jsonl").write_text("\n".join(map(json.dumps, held_out)) + "\n")
    prompts = folder / "runs" / "data" / "prompts"  # as train.prompts leaves them
    prompts.mkdir(parents=True)
    (prompts / "train.jsonl").write_text('{"id": 0, "question": "Why?", "answer": "So."}\n' * 4)


def keep_trial(runs: Path) -> None:
    """Move what a trial has left to where its run would have left it, for the commands that
    follow.
    """
    if (runs / "debug").exists():
        shutil.copytree(runs / "debug", runs, dirs_exist_ok=True)
        shutil.rmtree(runs / "debug")
