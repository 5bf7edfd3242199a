"""No code of strangers' checkpoints runs, and nothing outside of their directory is read."""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoints.directories import read_config
from jaxspec.checkpoints.huggingface import load
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.cli.inspect import inspect
from tests import tiny
from tests.conftest import ROOT
from tests.robustness.damage import outcome, use
from tests.tiny.families import FAMILIES, write
from tests.tiny.files import change_json as edit


def test_code_in_a_checkpoint_does_not_run(model, monkeypatch):
    """A checkpoint's own code does not run, even if somebody at the terminal says yes to all that
    transformers asks.
    """
    (model / "processor_config.json").unlink()
    edit(
        model / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["evil.Evil"] * 2},
    )
    evil = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    edit(model / "preprocessor_config.json", **evil)
    (model / "evil.py").write_text(
        f"open({str(model / 'ran')!r}, 'w').close()\nclass Evil:\n    pass\n"
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    assert "own code is never run" in tiny.one_line(load_image_processor, model, tiny.CONFIG)
    load_tokenizer(model)  # as one of transformers' own classes
    assert any("own code is never run" in problem for problem in inspect(model).problems)
    assert not (model / "ran").exists()


SOURCES = [
    file
    for part in ("jaxspec", "configs", "train", "eval")
    for file in sorted((ROOT / part).rglob("*.py"))
]


@pytest.mark.parametrize(
    ("functions", "refusal", "least"),
    [
        ((".from_pretrained", ".pipeline"), "trust_remote_code=False", 5),
        (("torch.load",), "weights_only=True", 1),
    ],
)
def test_every_call_that_could_run_code_refuses_it(functions, refusal, least):
    calls = 0
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(functions):
                words = [ast.unparse(keyword) for keyword in node.keywords]
                assert refusal in words, f"{file}:{node.lineno}"
                calls += 1
    assert calls >= least


SHARD, INDEX = "model-00001-of-00005.safetensors", "model.safetensors.index.json"


def refused(model: Path) -> str:
    """Return the one line that `load` says; `inspect` must report a problem too."""
    said = tiny.one_line(load, model)
    assert inspect(model).problems
    return said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_small_file_that_may_not_be_read_is_named(model: Path) -> None:
    (model / "note.txt").touch(0)
    assert "note.txt: cannot be read ([Errno 13]" in refused(model)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["../outside.safetensors", "{}/outside.safetensors"])
def test_an_index_names_files_of_its_directory(name, there, model):
    """An index that names a file outside its directory is refused, and the answer does not reveal
    whether that file exists.
    """
    if there:
        (model / SHARD).rename(model.parent / "outside.safetensors")
    name = name.format(model.parent)
    index = json.loads((model / INDEX).read_text())["weight_map"]
    edit(
        model / INDEX,
        weight_map={key: name if shard == SHARD else shard for key, shard in index.items()},
    )
    assert refused(model) == (
        f"{model / INDEX}: not readable as an index (it names {str(name)[:60]!r}, which is "
        "no file of its directory); "
        "fetch it again"
    )


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", [SHARD, "config.json", "chat_template.jinja"])
def test_links_do_not_lead_out(name, there, model):
    outside = model.parent / "outside"
    if there:
        outside.write_bytes((model / SHARD).read_bytes())
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    said = f"{model / name}: a link out of the directory; put the file itself there"
    assert refused(model) == said
    for read in (load_tokenizer, partial(load_image_processor, config=tiny.CONFIG), read_config):
        assert tiny.one_line(read, model) == said


def test_links_within_and_to_a_hub_caches_blobs(model):
    """Links within a directory, and to blobs as `huggingface_hub` lays a model down, are followed;
    links elsewhere are not.
    """
    cache = model.parent / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(model.iterdir()):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert inspect(snapshot).problems == []
    (model.parent / "link").symlink_to(snapshot)
    assert inspect(model.parent / "link").problems == []
    # of huggingface_hub 2: blobs that models share, each named by a link
    shared = model.parent / "blobs" / "0f"
    shared.mkdir(parents=True)
    for blob in list((cache / "blobs").iterdir()):
        blob.rename(shared / blob.name)
        blob.symlink_to(f"../../blobs/0f/{blob.name}")
    assert inspect(snapshot).problems == []
    # a stranger's archive may hold a link in their place
    for blobs in (cache / "blobs", model.parent / "blobs"):
        away = blobs.rename(model.parent / f"elsewhere {blobs.parent.name}")
        blobs.symlink_to(away)
        assert "a link out of the directory" in refused(snapshot)
        blobs.unlink()
        away.rename(blobs)


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_pipes_are_not_opened(name, model):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    assert refused(model) == f"{model / name}: no regular file; remove it"


HEADERS = {
    "sizes": '{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
    "overlap": '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
    ' "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "names": '{"\\u001b[2J": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    "nesting": "[" * 100_000,
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers(case, model):
    header = HEADERS[case]
    (model / SHARD).write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))
    said = refused(model)
    assert f"{SHARD}: unreadable (" in said
    assert said.isprintable()


def test_files_of_no_end(model):
    """A file without end is refused by its size: it takes no space on the disk, and would take all
    memory.
    """
    os.truncate(model / "tokenizer.json", 1 << 40)
    assert "tokenizer.json: 1099511627776 bytes, but at most" in refused(model)


IMAGE_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "no spread": ({"image_std": [0.0, 0.2, 0.2]}, "fails on a blank image (pixels is not finite)"),
    "huge": ({"size": {"shortest_edge": 48_000}}, "shortest_edge 48000; give 1 to 56"),
    "other image": (
        {"crop_size": {"height": 14, "width": 14}},
        "gives [3, 14, 14] and the tower reads [3, 28, 28]",
    ),
}


@pytest.mark.parametrize("case", IMAGE_SETTINGS)
def test_image_processors_fail_when_they_are_read(case, model):
    """Settings of an image processor that cannot work are refused when it is read, before gigabytes
    are taken or the first image comes.
    """
    entries, words = IMAGE_SETTINGS[case]
    edit(model / "preprocessor_config.json", **entries)
    said = tiny.one_line(load_image_processor, model, tiny.CONFIG)
    assert words in said
    assert str(model) in said
    assert any(words in problem for problem in inspect(model).problems)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_damaged_checkpoints(family, tmp_path):
    """Damaged checkpoints are used or refused in little time and memory. `python -m
    tests.robustness damage` tries thousands more.
    """
    whole = write(tmp_path / "whole", family)
    use(whole)
    (tmp_path / "scratch").mkdir()
    found = [outcome(whole, tmp_path / "scratch", seed) for seed in range(30)]
    assert [one for one in found if not one.well] == []
    assert {one.ended for one in found} == {"used", "refused"}
    assert max(one.seconds for one in found) < 20
    assert max(one.growth for one in found) < 2e9
