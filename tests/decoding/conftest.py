"""The pair that engines decode with."""

from __future__ import annotations

import pytest

from jaxspec.loading.models import LoadedModel
from tests import tiny


@pytest.fixture(scope="session")
def target() -> LoadedModel:
    return tiny.loaded(tiny.random_params(tiny.CONFIG))


@pytest.fixture(scope="session")
def draft(target: LoadedModel) -> LoadedModel:
    """Looks through the target's tower."""
    return tiny.loaded(
        tiny.noisy(target.params, 0.1) | {"vision_tower": target.params["vision_tower"]}
    )
