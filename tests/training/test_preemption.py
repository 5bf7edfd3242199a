"""Signals that end a run: all is saved first, whatever the signal, and a second Ctrl-C does not
wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.loop.preemption import Preempted, Preemption
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import mean_of_rows

pytestmark = pytest.mark.full

STAGE = TrainConfig(steps=6, batch=4, learning_rate=0.1, warmup=1, log_every=1, mesh=MeshConfig(1))


def batch(step: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(step).normal(size=(4, 3)).astype(np.float32)}


@mean_of_rows
def loss_fn(params: Any, rows: Any) -> Any:
    loss = jnp.mean((rows["x"] @ params["kernel"] - 1) ** 2)
    return loss, {"loss": loss}


def train(
    directory: Path, stage: TrainConfig = STAGE, asked: Any = batch, **options: Any
) -> np.ndarray:
    return fit(
        stage, {"kernel": np.zeros((3, 1), np.float32)}, loss_fn, asked, directory, **options
    )["kernel"]


@pytest.fixture(
    params=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal with a handler of its own, wherever the tests run: in the background, or under
    nohup.
    """
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


def test_a_run_that_is_told_to_end_saves_and_goes_on(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(step: int) -> dict[str, np.ndarray]:
        if step == 1:
            os.kill(os.getpid(), number)
        return batch(step)

    with pytest.raises(Preempted) as ended:
        train(tmp_path / "cut", asked=told)
    assert ended.value.code == 128 + number
    assert f"\n{tmp_path}/cut: ended by a signal; step" in capsys.readouterr().err
    assert signal.getsignal(number) is signal.default_int_handler
    (saved,) = (int(path.name) for path in (tmp_path / "cut" / "checkpoints").iterdir())
    asked: list[int] = []
    rest = train(tmp_path / "cut", asked=lambda step: asked.append(step) or batch(step))
    assert 0 < saved < STAGE.steps
    assert asked == [*range(saved, STAGE.steps)]
    np.testing.assert_array_equal(rest, train(tmp_path / "straight"))


def test_a_signal_during_an_evaluation_saves_the_step_that_was_evaluated(
    tmp_path: Path, number: int
) -> None:
    """The evaluation is in the log, and no other step is run, which might compile for minutes."""

    def evaluate(params: Any) -> dict[str, float]:
        signal.raise_signal(number)
        return {"tau": 2.0}

    stage = replace(STAGE, evaluate_every=2)
    with pytest.raises(Preempted):
        train(tmp_path, stage, evaluate=evaluate)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("tau")) for line in lines] == [(1, None), (2, None), (2, 2.0)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    train(tmp_path, replace(stage, steps=6), evaluate=lambda params: {"tau": 3.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["tau"] for line in lines if "tau" in line] == [2.0, 3.0, 3.0]


def test_a_signal_in_the_last_evaluation_ends_the_run_too(tmp_path: Path, number: int) -> None:
    """Otherwise the next stage would begin; the same command goes on to it."""
    stage = replace(STAGE, evaluate_every=STAGE.steps)
    with pytest.raises(Preempted):
        train(tmp_path / "cut", stage, evaluate=lambda params: signal.raise_signal(number) or {})
    rest = train(tmp_path / "cut", stage)
    np.testing.assert_array_equal(rest, train(tmp_path / "straight"))


def test_an_ignored_signal_ends_nothing(tmp_path: Path, number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with Preemption() as told:
        signal.raise_signal(number)
        assert not told.reached(1)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def evaluate(params: Any) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return {}

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, replace(STAGE, evaluate_every=2), evaluate=evaluate)
    signal.signal(signal.SIGINT, before)


def test_a_terminal_that_hung_up_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ours, terminal = os.openpty()
    monkeypatch.setattr(sys, "stderr", os.fdopen(terminal, "w"))
    with Preemption() as told:
        os.close(ours)
        signal.raise_signal(signal.SIGHUP)
        print("saved", file=sys.stderr, flush=True)
        assert told.reached(1)
    signal.signal(signal.SIGHUP, before)
