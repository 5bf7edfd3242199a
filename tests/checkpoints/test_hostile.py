"""Checkpoints of strangers: no code of theirs runs, nothing outside their directory is read."""

from __future__ import annotations

import ast
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from jaxspec.checkpoints.huggingface import save
from jaxspec.checkpoints.inspection import inspect
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.errors import InputError
from tests.conftest import ROOT
from tests.end_to_end import tiny


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded LLaVA with tokeniser and image processor."""
    path = tmp_path_factory.mktemp("good") / "model"
    params, words, pages = tiny.random_params(tiny.CONFIG), tiny.tokenizer(), tiny.image_processor()
    save(path, tiny.CONFIG, params, tokenizer=words, image_processor=pages, max_shard_bytes=40_000)
    return path


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(good, tmp_path / "model")


def edit(file: Path, **entries: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def test_code_in_a_checkpoint_does_not_run(model, monkeypatch):
    """Neither by itself, nor where somebody at the terminal says yes to all that transformers asks."""
    (model / "processor_config.json").unlink()
    edit(model / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil"] * 2})
    evil = {"image_processor_type": "Evil", "auto_map": {"AutoImageProcessor": "evil.Evil"}}
    edit(model / "preprocessor_config.json", **evil)
    (model / "evil.py").write_text(f"open({str(model / 'ran')!r}, 'w').close()\nclass Evil:\n    pass\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    with pytest.raises(InputError, match="own code is never run") as caught:
        load_image_processor(model)
    assert "\n" not in str(caught.value)
    load_tokenizer(model)  # as one of transformers' own classes
    assert any("own code is never run" in problem for problem in inspect(model).problems)
    assert not (model / "ran").exists()


SOURCES = [file for part in ("jaxspec", "configs", "train", "eval") for file in sorted((ROOT / part).rglob("*.py"))]


def test_every_call_of_transformers_refuses_code():
    calls = 0
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".from_pretrained", ".pipeline")):
                words = [ast.unparse(keyword) for keyword in node.keywords]
                assert "trust_remote_code=False" in words, f"{file}:{node.lineno}"
                calls += 1
    assert calls >= 7
