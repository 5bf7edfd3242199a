"""Tests of this folder find every named model in a cache of their own, offline: the hub of
twins.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from filelock import FileLock

from jaxspec import LoadedModel
from tests.hub.build import build_hub


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder `hub` of an HF_HOME in which every id has a snapshot; workers share one."""
    home = tmp_path_factory.mktemp("hf_home")
    workers = home.parents[1] if "PYTEST_XDIST_WORKER" in os.environ else home.parent
    shared, folder = workers / "twins", home / "hub"
    with FileLock(workers / "twins.lock"):
        if not shared.exists():
            build_hub(folder)
            folder.rename(shared)
    folder.symlink_to(shared)
    return folder


@contextmanager
def cached_at(cache: Path) -> Iterator[None]:
    """Put a hub's cache at this folder `hub` and set HF_HUB_OFFLINE=1, in this process and those
    that it starts.
    """
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(cache.parent))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # Read from the environment when huggingface_hub was imported.
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture(autouse=True, scope="module")
def offline_hub(hub_cache: Path) -> Iterator[Path]:
    """Point HF_HOME at the twins, and leave no network."""
    with cached_at(hub_cache):
        yield hub_cache


@cache
def load_twin(name: str) -> LoadedModel:
    """Load a twin by its id, once a process."""
    return LoadedModel.load(name)
