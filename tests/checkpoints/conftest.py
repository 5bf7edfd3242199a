"""These fixtures give a tiny checkpoint, and a copy of it that a test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jaxspec.checkpoints.huggingface import SaveOptions, save
from tests import tiny


@pytest.fixture(scope="package")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a sharded LLaVA with tokeniser and image processor."""
    path = tmp_path_factory.mktemp("good") / "model"
    params, words, pages = tiny.random_params(tiny.CONFIG), tiny.tokenizer(), tiny.image_processor()
    options = SaveOptions(max_shard_bytes=40_000)
    save(path, tiny.CONFIG, params, options, tokenizer=words, image_processor=pages)
    return path


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint, which the test may damage."""
    return shutil.copytree(good, tmp_path / "model")
