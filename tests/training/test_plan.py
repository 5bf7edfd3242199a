"""Plans of training say what a step would hold on devices that are not there, and know the peaks of
chips.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from configs.latency.llava7b_68m import config as sizes
from jaxspec.engine.plan import usual_head
from jaxspec.sharding import on_mesh
from jaxspec.training.plan import abstract_step, mesh_for


def test_a_7b_target_teaches_a_68m_draft() -> None:
    """A step in which a 7B target teaches a 68M draft lowers for 64 TPUs, and each holds its share:
    two bytes a frozen parameter, four a trained one, eight of its moments, four of its gradient.
    """
    devices, batch = 64, 16
    assert dict(mesh_for(16, 256).shape) == {"data": 1, "fsdp": 16, "model": 1}
    mesh = mesh_for(devices, batch)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 16, "model": 4}
    found = abstract_step(sizes.target, sizes.draft, mesh, batch, 1024, "bfloat16")
    with on_mesh(mesh):
        traced = found.step.trace(found.state, found.frozen, found.batch)
    assert (
        f"mhlo.num_partitions = {devices}"
        in traced.lower(lowering_platforms=("tpu",)).as_text()[:2000]
    )
    held = found.held
    assert held["frozen"] == pytest.approx(2 * 7_063_427_072 / devices, rel=0.03)  # with one tower
    trained = 4 * 68e6 / devices
    assert (held["trained"], held["gradient"]) == pytest.approx((trained, trained), rel=0.1)
    assert held["optimizer"] == pytest.approx(2 * held["trained"], rel=1e-4)
    # Of a row's slot, for each model: its token and its source; the mask, and where the teacher
    # reads it.
    assert held["batch"] == batch // 16 * (1024 * (2 * 8 + 1 + 4) + 2 * 4 + 4 + 336 * 336 * 3 * 4)
    # Two operations a weight and token of the teacher, six of the draft.
    assert found.flops == pytest.approx((2 * 6.93e9 + 6 * 0.045e9) * batch * 1024, rel=0.02)


def test_a_7b_target_teaches_a_head() -> None:
    """A step in which a 7B target teaches a head traces; the head trains, and its blocks are scored
    by the target's matrix.
    """
    devices, batch, length = 8, 16, 1024
    mesh, head = mesh_for(devices, batch), usual_head(sizes.target, gamma=3)
    found = abstract_step(sizes.target, head, mesh, batch, length, "bfloat16")
    with on_mesh(mesh):
        state, metrics = jax.eval_shape(found.step, found.state, found.frozen, found.batch)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, found.state)
    assert metrics["loss"].shape == ()
    held, trained = found.held, 202_391_552 + 2 * 64 * 576 + 4096 + 1
    assert held["frozen"] == pytest.approx(2 * 7_063_427_072 / devices, rel=0.03)
    assert held["trained"] == pytest.approx(4 * trained / devices, rel=0.03)
    drafted = batch * 128 * 3
    read = 2 * 6.93e9 * batch * length
    assert found.flops == pytest.approx(read + 6 * drafted * (trained + 32064 * 4096), rel=0.02)


def test_the_command_tells_the_mesh_of_a_training(
    pair: tuple[Path, Path], said: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxspec.cli.plan.TRAINING_ROOM", 2e-6)
    words = f"plan {pair[0]} --draft {pair[1]} --train 6 --prompt 64 --chips v5e".split()
    lines = [line.split() for line in said(*words).splitlines()]
    cells = {line[0]: line[1:4] for line in lines if line and line[0].startswith("mesh.")}
    assert cells == {
        "mesh.data": ["1", "1", "1"],
        "mesh.fsdp": ["1", "2", "2"],
        "mesh.model": ["1", "1", "2"],
    }
