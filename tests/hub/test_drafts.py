"""Each published draft that is listed has commands that parse, and a twin that changes no
answer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from jaxspec import Engine, EngineConfig, Request
from jaxspec.checkpoints.directories import read_config, write_json
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.cli import main
from jaxspec.cli.drafts import PUBLISHED, cached_draft
from jaxspec.cli.generate import Generate
from jaxspec.cli.options import parse_subcommand
from jaxspec.errors import InputError
from jaxspec.heads.loading import load_head
from jaxspec.loading.models import load_draft
from tests import tiny
from tests.conftest import ROOT
from tests.hub.block_heads import BlockTwin
from tests.hub.build import add
from tests.hub.conftest import load_twin
from tests.hub.heads import HEADS, LAYOUTS, twin_of
from tests.hub.table import ALIKE, TWINS, HeadTwin


def test_each_listed_draft_has_a_twin_for_its_target() -> None:
    """Each listed draft has a twin for its target; a target that no page names has the twin of one
    that differs in sizes.
    """
    targets = {draft.id: ALIKE.get(draft.target, draft.target) for draft in PUBLISHED}
    heads = {name: twin_of(name).target for name in targets if name not in TWINS}
    assert targets == targets | heads
    assert {*targets.values()} <= TWINS.keys()
    # A text head, which the list may have or not.
    assert HEADS.keys() - targets.keys() <= {"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}


@pytest.mark.parametrize("name", [draft.id for draft in PUBLISHED if draft.id not in TWINS])
def test_each_listed_head_is_read_as_it_was_made(name: str) -> None:
    """Each listed head is read as it was made, from a config.json with its publisher's entries."""
    twin, made = twin_of(name), {}
    if isinstance(twin, HeadTwin):
        made = {"images": twin.rule} | twin.fields
    elif isinstance(twin, BlockTwin):
        made = {"layer_types": twin.kinds, "sliding_window": twin.options.get("window")}
        made = {key: twin.options[key] for key in twin.options if key != "window"} | made
    config = load_head(name)[0].for_target(read_config(locate(twin.target)))
    read = vars(config) | vars(config.text_config)
    assert {key: read[key] for key in made} == made


@pytest.mark.parametrize("name", [*LAYOUTS[:2], *tiny.rarer(*LAYOUTS[2:])])
def test_a_head_of_each_layout_changes_no_answer(name: str) -> None:
    target = load_twin(HEADS[name].target)
    assert answer(Engine(target, load_draft(name, target), SHAPE)) == plain_answer(
        HEADS[name].target
    )


SHAPE = EngineConfig(gamma=3, prompt_buckets=(128, 256), new_buckets=(16,), image_buckets=(0,))


def answer(engine: Engine) -> Sequence[int]:
    return engine.generate(Request("Why is the sky blue?", 16, min_new_tokens=16)).tokens


@cache
def plain_answer(target: str) -> Sequence[int]:
    return answer(Engine(load_twin(target), config=SHAPE))


def test_auto_takes_the_first_listed_draft_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`auto` takes the first listed draft in the cache; one with only its config.json there counts
    as none.
    """
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
