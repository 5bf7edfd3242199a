"""Training on a mesh: the same losses as on one device, each device with its share, and a restart on another mesh."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.errors import InputError
from jaxspec.models import init_params
from jaxspec.sharding import make_mesh
from jaxspec.training.config import MeshConfig
from jaxspec.training.placement import process_share
from tests.training import tiny

ONE = MeshConfig(data=1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("alone")
    return path, flatten_dict(tiny.train(replace(tiny.STAGE, mesh=ONE), path), sep="/")


@pytest.mark.parametrize(
    "stage",
    [
        replace(tiny.STAGE, mesh=MeshConfig(data=8)),
        replace(tiny.STAGE, mesh=MeshConfig(fsdp=8)),
        replace(tiny.STAGE, mesh=MeshConfig(data=1, model=8)),
        replace(tiny.STAGE, mesh=MeshConfig(data=2, fsdp=2, model=2), accumulate=2, remat=True),
    ],
    ids=["data", "fsdp", "model", "mixed, in parts, rematerialised"],
)
def test_losses_are_those_of_one_device(stage, alone, tmp_path):
    tiny.train(stage, tmp_path)
    expected = tiny.losses(alone[0])
    assert len(expected) == 20
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(tiny.losses(tmp_path), expected, rtol=1e-5)


def test_goes_on_with_other_devices(alone, tmp_path):
    def dies(step):
        if step == 14:
            raise KeyboardInterrupt
        return tiny.batch(step)

    with pytest.raises(KeyboardInterrupt):
        tiny.train(replace(tiny.STAGE, mesh=MeshConfig(data=4, fsdp=2)), tmp_path, dies)
    tiny.train(replace(tiny.STAGE, mesh=MeshConfig(data=1, model=4)), tmp_path)
    np.testing.assert_allclose(tiny.losses(tmp_path), tiny.losses(alone[0]), rtol=1e-5)
