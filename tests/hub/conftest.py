"""The hub of twins: tests of this folder find every named model in a cache of their own, offline."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from jaxspec import LoadedModel
from tests.hub import build
from tests.hub.table import TWINS


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `hub` of an HF_HOME in which every id of the table has a snapshot."""
    folder = tmp_path_factory.mktemp("hf_home") / "hub"
    folder.mkdir()
    for name, twin in TWINS.items():
        build.add(folder, name, twin)
    return folder


@pytest.fixture(autouse=True, scope="module")
def offline_hub(hub_cache: Path) -> Iterator[Path]:
    """HF_HOME at the twins and HF_HUB_OFFLINE=1, in this process and those that it starts."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(hub_cache.parent))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Read from the environment when huggingface_hub was imported.
        patch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield hub_cache


@cache
def load_twin(name: str) -> LoadedModel:
    """Load a twin by its id, once a process."""
    return LoadedModel.load(name)
