"""Training on a mesh has the losses of one device, gives each device its share, and restarts on
another mesh.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from jaxspec.errors import InputError
from jaxspec.models.language_model import LanguageModel
from jaxspec.sharding import make_mesh, shardings
from jaxspec.training.config import MeshConfig
from jaxspec.training.loop.batches import check_rows, process_share
from jaxspec.training.loop.step import flatten, set_up
from jaxspec.training.objectives import tuning_loss
from tests.tiny import training

STAGES = {
    "one": replace(training.STAGE, mesh=MeshConfig(data=1)),
    "fsdp": replace(training.STAGE, mesh=MeshConfig(fsdp=8)),
    "model": replace(training.STAGE, mesh=MeshConfig(data=1, model=8), accumulate=4),
    "mixed": replace(
        training.STAGE, mesh=MeshConfig(data=2, fsdp=2, model=2), accumulate=2, remat=True
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Return the losses of one device."""
    path = tmp_path_factory.mktemp("alone")
    training.train(STAGES["one"], path)
    losses = training.losses(path)
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]
    return losses


@pytest.mark.full
def test_losses_are_those_of_one_device(alone, tmp_path):
    """Losses on a mesh are those of one device to rounding, in two parts, and with activations
    computed anew.
    """
    training.train(STAGES["mixed"], tmp_path)
    np.testing.assert_allclose(training.losses(tmp_path), alone, rtol=1e-5)


@pytest.mark.full
def test_goes_on_with_other_devices(alone, tmp_path):
    def dies(step):
        if step == 14:
            raise KeyboardInterrupt
        return training.batch(step)

    with pytest.raises(KeyboardInterrupt):
        training.train(STAGES["fsdp"], tmp_path, dies)
    training.train(STAGES["model"], tmp_path)
    np.testing.assert_allclose(training.losses(tmp_path), alone, rtol=1e-5)


def test_each_device_holds_its_share():
    """Each device holds its share: the optimiser's state is split as the parameters are; without a
    place, all is whole everywhere.
    """
    mesh = make_mesh(model=2, fsdp=4)
    params = training.params()
    loss = tuning_loss(LanguageModel(training.CONFIG))
    sharding_of = partial(shardings, training.CONFIG, params)
    name = "language_model/model/layers_0/mlp/gate_proj/weight"
    for found, rows, columns in ((sharding_of, 4, 2), (None, 1, 1)):
        config = replace(training.STAGE, dtype="bfloat16")
        state, fixed, _ = set_up(config, params, loss, mesh, found)
        adam = next(
            part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part)
        )
        for leaf in (state.params[name], adam.mu[name], adam.nu[name]):
            assert leaf.addressable_shards[0].data.shape == (64 // columns, 32 // rows)
            assert leaf.dtype == np.float32
        # nothing for what is frozen
        assert adam.mu.keys() == state.params.keys() == flatten(params).keys() - fixed.keys()
        assert {leaf.dtype.name for leaf in fixed.values()} == {"bfloat16"}


def is_adam(part) -> bool:
    return hasattr(part, "mu")


def test_mesh_of_a_batch():
    # of eight devices, what divides
    assert dict(MeshConfig().make(12).shape) == {"data": 4, "fsdp": 1, "model": 1}
    assert dict(MeshConfig(fsdp=2).make(12).shape) == {"data": 2, "fsdp": 2, "model": 1}
    assert dict(MeshConfig(model=2).make(1).shape) == {"data": 1, "fsdp": 1, "model": 2}
    given = MeshConfig().make(12, jax.devices()[5:])
    assert list(given.devices.flat) == jax.devices()[5:]
    with pytest.raises(InputError, match="mesh: 6 samples at a time do not divide over 2 data x 2"):
        MeshConfig(data=2, fsdp=2).make(6)
    with pytest.raises(InputError, match="4 data x 4 fsdp x 1 model devices, of"):
        MeshConfig(data=4, fsdp=4).make(16)
    for wrong, line in (
        (MeshConfig(model=16), "mesh: 1 data x 1 fsdp x 16"),
        (MeshConfig(fsdp=0), "fsdp: 0; give a whole number, 1 or more"),
    ):
        with pytest.raises(InputError, match=line):
            wrong.make(16)


def test_every_device_computes_samples_of_its_own_in_each_part() -> None:
    """A mesh whose devices cannot each compute samples of their own in each part of a batch is
    refused: a part has fewer samples than the batch.
    """
    stage = replace(training.STAGE, batch=16, accumulate=4)
    assert stage.make_mesh().shape["data"] == 4
    whole = replace(stage, mesh=MeshConfig(data=8))
    with pytest.raises(InputError, match="mesh: 4 samples at a time do not divide over 8 data x 1"):
        whole.make_mesh()


def test_processes_that_each_make_whole_batches_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {"x": np.zeros((8, 3))}
    check_rows(whole, 4)  # a single process may make more
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    check_rows(whole, 8)
    with pytest.raises(InputError, match="batches: 2 processes make 8 rows for a batch of 4; let"):
        check_rows(whole, 4)


def test_process_share():
    """Processes read their share of the batch's rows; two of four share rows where the model axis
    spans them.
    """

    class Device:
        def __init__(self, number):
            self.process_index = number // 2

    class FakeMesh:
        def __init__(self, *shape):
            count = int(np.prod(shape))
            self.devices = np.asarray([Device(i) for i in range(count)]).reshape(shape)
            self.shape = {"model": shape[-1]}

    def shares(*shape):
        return [process_share(FakeMesh(*shape), process) for process in range(4)]

    assert shares(8, 1, 1) == shares(2, 4, 1) == shares(4, 1, 2) == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert shares(2, 1, 4) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert shares(1, 1, 8) == [(0, 1)] * 4
    with pytest.raises(InputError, match="mesh: model 3 neither divides the devices of a process"):
        shares(2, 1, 3)
