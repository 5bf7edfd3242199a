"""These fixtures give what drafts and heads learn from."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.data.prepared import prepare
from tests import tiny


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny LLaVA `target` and twenty prepared conversations `talk`."""
    path = tmp_path_factory.mktemp("taught")
    tiny.save(path / "target", tiny.CONFIG, tiny.random_params(tiny.CONFIG))
    prepare("talk", path, [tiny.Talk()[i] for i in range(20)])
    return path
