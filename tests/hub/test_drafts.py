"""The list of published drafts: its commands parse, and its targets are the twins'."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from jaxspec.checkpoints.directories import write_json
from jaxspec.checkpoints.locating import model_name
from jaxspec.cli import main
from jaxspec.cli.drafts import PUBLISHED, cached_draft
from jaxspec.cli.generate import Generate
from jaxspec.cli.options import parse_subcommand
from jaxspec.errors import InputError
from tests.conftest import ROOT
from tests.hub import block_heads
from tests.hub.assistants import ASSISTANTS
from tests.hub.build import add
from tests.hub.table import HEADS


def test_each_draft_is_listed_for_the_target_that_its_twin_drafts_for() -> None:
    targets = {name: twin.target for name, twin in (HEADS | block_heads.HEADS | ASSISTANTS).items()}
    listed = {draft.id: draft.target for draft in PUBLISHED}
    assert {name: listed[name] for name in listed.keys() & targets} == {
        name: targets[name] for name in listed.keys() & targets
    }
    # A text head, which the list may have or not.
    assert targets.keys() - listed.keys() <= {"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}


def test_auto_takes_the_first_listed_draft_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache that has only the config.json of a draft counts as none."""
    assert model_name(cached_draft("Qwen/Qwen3-8B")) == "z-lab/Qwen3-8B-DFlash-b16"
    line = "draft 'auto': none of z-lab/Qwen3-8B-DFlash-b16, .* is in the hub's cache; fetch one"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    add(tmp_path, "z-lab/Qwen3-8B-DFlash-b16", lambda path: write_json(path / "config.json", {}))
    with pytest.raises(InputError, match=line):
        cached_draft("Qwen/Qwen3-8B")


def test_the_page_cites_what_the_list_claims() -> None:
    """docs/choose.md has a row for some of the drafts, with the numbers of their claims."""
    text = (ROOT / "docs" / "choose.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    claims = {draft.id: re.findall(r"\d+\.\d+", draft.claim) for draft in PUBLISHED}
    named = [(row, name) for row in rows for name in claims if f"`{name}`" in row]
    assert len(named) >= 8
    assert [(row, name) for row, name in named if not all(n in row for n in claims[name])] == []


def test_each_printed_command_parses(capsys: pytest.CaptureFixture[str]) -> None:
    main(["drafts"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("jaxspec generate")]
    parsed = [
        parse_subcommand({"generate": Generate}, command[1:], "jaxspec", None)
        for command in commands
    ]
    assert sorted((args.model.target, args.drafting.draft) for args in parsed) == sorted(
        (draft.target, (draft.id,)) for draft in PUBLISHED
    )


def test_a_target_without_a_known_draft_is_told_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["drafts", "llava-hf/llava-1.5-7b"])
    assert stop.value.code == 2
    assert "'llava-hf/llava-1.5-7b-hf'" in capsys.readouterr().err
