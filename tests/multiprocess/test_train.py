"""Two processes train one model on one mesh with the losses of a single device, through a SIGTERM
to one of them.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxspec.cluster import join_cluster
from jaxspec.errors import InputError
from jaxspec.training.config import MeshConfig
from tests.multiprocess.pairs import free_address
from tests.tiny import training
from tests.training import child
from tests.training.child import Child

pytestmark = pytest.mark.full


def pair(model: str, directory: Path, gate: int = child.GATE) -> list[Child]:
    address = free_address()
    return [Child(model, directory, f"{address},2,{index}", gate) for index in range(2)]


def test_two_processes(tmp_path: Path) -> None:
    single = replace(training.STAGE, mesh=MeshConfig(data=1))
    expected = training.train(single, tmp_path / "one")
    told = pair("lvlm", tmp_path / "two")
    # Both wait before the gate when one gets the signal, and pass it when both know.
    for run in told:
        run.await_line(lambda line: line == f"batch {child.GATE}\n")
    told[1].process.send_signal(signal.SIGTERM)
    for run in told:
        run.await_line(lambda line: "Received preemption notice" in line)
    first, second = end(told, 128 + signal.SIGTERM)
    step = int(first.partition("ended by a signal; step ")[2].split()[0])
    assert step < training.STAGE.steps
    assert "ended by a signal" not in second  # the first process speaks for all
    told = pair("lvlm", tmp_path / "two", gate=step)
    # One gets the signal before the first step, whose batch waits.
    told[0].await_line(lambda line: line.startswith("resuming "))
    told[1].process.send_signal(signal.SIGTERM)
    for run in told:
        run.await_line(lambda line: "Received preemption notice" in line)
    first, _ = end(told, 128 + signal.SIGTERM)
    assert f"resuming {tmp_path / 'two'} at step {step} of" in first
    assert f"ended by a signal; step {step + 1} of" in first
    first, second = end(pair("lvlm", tmp_path / "two"), 0)
    assert f"resuming {tmp_path / 'two'} at step {step + 1} of" in first
    np.testing.assert_allclose(
        training.losses(tmp_path / "two"), training.losses(tmp_path / "one"), rtol=1e-5
    )
    # One process takes over what two have saved.
    finished = training.train(single, tmp_path / "two", lambda step: pytest.fail("asked for data"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), finished, expected)


def end(runs: list[Child], code: int) -> list[str]:
    for run in runs:
        run.open_gate()
    return [run.end(code) for run in runs]


@pytest.mark.parametrize("place", ["host:1,2", "host:1,2,2"])
def test_a_place_in_a_cluster_that_is_none(place):
    with pytest.raises(InputError, match="give auto, or HOST:PORT,COUNT,INDEX"):
        join_cluster(place)
