"""Exports reach the hub whole: once, also over lost connections, and never over others' work."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from huggingface_hub import metadata_load

from jaxspec.checkpoints.huggingface import load
from jaxspec.cli import main
from jaxspec.errors import InputError
from jaxspec.publishing.push import Repository, push
from tests.tiny.hub_server import Hub, running_hub
from train import recipe

NAME = "us/draft"
TERMS = ("--licence", "apache-2.0", "--base-model", "someone/llava")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with running_hub() as server:
        yield server


def cut_once(method: str, end: str, when: str) -> Callable[[str, str], str]:
    """Cut one request of this method whose path holds this text, "before" or "after" it acts."""
    left = [when]

    def cut(verb: str, path: str) -> str:
        return left.pop() if left and verb == method and end in path else ""

    return cut


def test_an_export_is_one_private_commit_with_a_card(
    good: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(good), "--push", NAME, *TERMS])
    repo = hub.repos[NAME]
    line = f"pushed to {hub.url}/{NAME} (private), revision {repo.commits[-1].revision[:8]}"
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert repo.private
    assert len(repo.commits) == 2
    out = tmp_path / "fetched"
    out.mkdir()
    for name, content in repo.commits[-1].files.items():
        (out / name).write_bytes(content)
    jax.tree.map(np.testing.assert_array_equal, load(out).params, load(good).params)
    card = metadata_load(out / "README.md")
    assert card is not None
    assert (card["license"], card["base_model"]) == ("apache-2.0", "someone/llava")
    assert "# draft\n" in (out / "README.md").read_text()
    assert [*(tmp_path / "cache").rglob("*.safetensors")] == []


def test_the_next_push_is_a_commit_onto_the_last(good: Path, hub: Hub) -> None:
    main(["export", str(good), "--push", NAME, "--public", *TERMS])
    main(["export", str(good), "--push", NAME, "--public", *TERMS, "--dtype", "float16"])
    assert not hub.repos[NAME].private
    assert len(hub.repos[NAME].commits) == 3


def test_a_push_removes_what_an_earlier_one_left(good: Path, hub: Hub, tmp_path: Path) -> None:
    """A push removes the shards, and what reads images, of a whole model pushed earlier; other
    files stay.
    """
    whole = tmp_path / "whole"
    shutil.copytree(good, whole)
    (whole / "README.md").write_text("whole")
    push(whole, Repository(NAME))
    repo = hub.repos[NAME]
    assert [name for name in repo.commits[-1].files if "processor" in name or "-of-" in name]
    repo.commits[-1].files["notes.txt"] = b"mine"
    main(["export", str(good), "--push", NAME, *TERMS, "--text-only"])
    assert len(repo.commits) == 3
    files = {*repo.commits[-1].files}
    assert files >= {"notes.txt", ".gitattributes", "model.safetensors", "config.json", "README.md"}
    assert not [name for name in files if "processor" in name or "-of-" in name or "index" in name]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_that_was_cut_off_goes_on(
    when: str, good: Path, hub: Hub, refusal: Callable[..., str]
) -> None:
    """A push whose connection is lost at the commit goes on, whether the hub made the commit or
    not.
    """
    hub.cut = cut_once("POST", "/commit/", when)
    said = refusal("export", good, "--push", NAME, *TERMS)
    assert f"push to {NAME}: " in said
    assert "run the same command again" in said
    sent = list(hub.sent)
    assert sent
    main(["export", str(good), "--push", NAME, *TERMS])
    assert hub.sent == sent  # no large file went twice
    assert "model.safetensors" in hub.repos[NAME].commits[-1].files
    assert len(hub.repos[NAME].commits) == 2  # the hub's first one, and the export once
    main(["export", str(good), "--push", NAME, *TERMS, "--dtype", "float16"])
    assert len(hub.repos[NAME].commits) == 3  # the record of the push is whole again


def test_a_push_that_is_killed_leaves_a_whole_record(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push that is killed leaves a whole record, without which the machine could not push there
    again.
    """
    (tmp_path / "README.md").write_text("x")
    push(tmp_path, Repository(NAME))
    (tmp_path / "README.md").write_text("y")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, *_, **__: path.write_bytes(b"{") and 1 / 0)
        with pytest.raises(InputError):
            push(tmp_path, Repository(NAME))
    push(tmp_path, Repository(NAME))
    assert hub.repos[NAME].commits[-1].files["README.md"] == b"y"


def test_a_file_whose_connection_is_lost_is_sent_again(good: Path, hub: Hub) -> None:
    hub.cut = cut_once("PUT", "/objects/", "before")
    main(["export", str(good), "--push", NAME, *TERMS])
    assert len(hub.repos[NAME].commits) == 2


def test_a_newer_revision_is_left_alone(
    good: Path, hub: Hub, refusal: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A newer revision of others is left alone; on request a push goes onto it, and its card stays,
    also in later pushes.
    """
    main(["export", str(good), "--push", NAME, *TERMS])
    newer = hub.commit(NAME, "better", {"config.json": b"{}"})
    said = refusal("export", good, "--push", NAME, *TERMS, "--dtype", "float16")
    assert f"{NAME} holds revision {newer.revision[:8]}, which this machine did not push" in said
    assert hub.repos[NAME].commits[-1] is newer
    edited: dict[str, bytes | None] = {"README.md": b"theirs", "notes.txt": b"theirs"}
    newer = hub.commit(NAME, "card", edited)
    said = refusal("export", good, "--push", NAME, *TERMS, "--onto", "1234")
    assert f"read it, then give --onto {newer.revision[:8]}" in said
    for options in (("--onto", newer.revision[:8]), ("--dtype", "float16")):
        main(["export", str(good), "--push", NAME, *TERMS, *options])
        assert "somebody edited, stays" in capsys.readouterr().out
    files = hub.repos[NAME].commits[-1].files
    assert files["README.md"] == files["notes.txt"] == b"theirs"
    assert files["config.json"] != b"{}"
    # Also one that comes while the files are sent.
    hub.cut = lambda method, path: (
        hub.commit("us/other", "theirs", {"a": b""}) and "" if "preupload" in path else ""
    )
    assert "somebody has changed" in refusal("export", good, "--push", "us/other", *TERMS)
    assert {commit.title for commit in hub.repos["us/other"].commits} == {
        "initial commit",
        "theirs",
    }


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (TERMS[2:], "names no licence; look it up, and give it as --licence apache-2.0"),
        (("--licence", "apache2", *TERMS[2:]), "not in the hub's list"),
        (("--base-model", "../llava"), "base-model '../llava': no id of the hub; give owner/name"),
        (TERMS[:2], "was made from is unknown; give it as --base-model owner/name"),
        (("--push", "draft", *TERMS), "push: 'draft'; give the repository's id, owner/name"),
    ],
)
def test_what_is_not_named_is_not_pushed(
    options: Any, line: str, good: Path, hub: Hub, refusal: Callable[..., str]
) -> None:
    assert line in refusal(
        "export", good, *(() if "--push" in options else ("--push", NAME)), *options
    )
    assert hub.repos == {}


def test_what_the_hub_refuses_is_one_line(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "README.md").write_text("x")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(InputError, match="log in with `hf auth login`"):
        push(tmp_path, Repository(NAME))
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    (tmp_path / "train.log").write_text("mine")
    push(tmp_path, Repository(NAME, public=True))
    assert {*hub.repos[NAME].commits[-1].files} == {".gitattributes", "README.md"}
    with pytest.raises(InputError, match=f"{NAME} is public; give --public, or another name"):
        push(tmp_path, Repository(NAME))


def test_a_recipe_says_before_it_trains_what_its_card_lacks(good: Path, hub: Hub) -> None:
    start = ("mini_text", "--start", str(good), "--target", str(good), "--push")
    with pytest.raises(InputError, match="give the repository's id, owner/name"):
        recipe.main([*start, "draft"])
    with pytest.raises(InputError, match="names no licence"):
        recipe.main([*start, NAME])
    with pytest.raises(InputError, match="a trial is not pushed; leave out --debug"):
        recipe.main([*start, NAME, *TERMS, "--debug"])


def test_options_of_a_push_need_one(
    good: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    for options in (("--public",), ("--onto", "1234")):
        line = f"{options[0]}: needs --push; give a repository, or leave it out"
        assert line in refusal("export", good, tmp_path / "out", *options)
        with pytest.raises(InputError, match=line):
            recipe.main(["mini_text", *options])
    with pytest.raises(InputError, match="--licence: needs --push"):
        recipe.main(["mini_text", *TERMS])
