"""Signals that end a run save all first, whatever the signal, and a second Ctrl-C does not wait for
it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec.training.config import TrainConfig
from jaxspec.training.loop.preemption import Preempted, Preemption
from jaxspec.training.loop.trainer import fit
from tests.tiny import training
from tests.training import test_trainer
from tests.training.test_trainer import batches, loss_fn, params

pytestmark = pytest.mark.full

STAGE = replace(test_trainer.STAGE, save_every=100)


def train(
    directory: Path, stage: TrainConfig = STAGE, asked: Any = batches, **options: Any
) -> np.ndarray:
    return fit(stage, params(), loss_fn, asked, directory, **options)["line"]["kernel"]


@pytest.fixture(params=[signal.SIGTERM], ids=lambda number: number.name)
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """Yield a signal with a handler of its own, wherever the tests run: in the background, or under
    nohup.
    """
    before = signal.signal(request.param, signal.default_int_handler)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], indirect=True)
def test_a_run_that_is_told_to_end_saves_and_goes_on(
    tmp_path: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(step: int) -> dict[str, np.ndarray]:
        if step == 1:
            os.kill(os.getpid(), number)
        return batches(step)

    with pytest.raises(Preempted) as ended:
        train(tmp_path / "cut", asked=told)
    assert ended.value.code == 128 + number
    assert f"\n{tmp_path}/cut: ended by a signal; step" in capsys.readouterr().err
    assert signal.getsignal(number) is signal.default_int_handler
    (saved,) = (int(path.name) for path in (tmp_path / "cut" / "checkpoints").iterdir())
    asked: list[int] = []
    rest = train(tmp_path / "cut", asked=lambda step: asked.append(step) or batches(step))
    assert 0 < saved < STAGE.steps
    assert asked == [*range(saved, STAGE.steps)]
    np.testing.assert_array_equal(rest, train(tmp_path / "straight"))


def test_a_signal_during_an_evaluation_saves_the_step_that_was_evaluated(
    tmp_path: Path, number: int
) -> None:
    """A signal during an evaluation saves the step that was evaluated: the evaluation is in the
    log, and no other step is run, which might compile for minutes.
    """

    def evaluate(params: Any) -> dict[str, float]:
        signal.raise_signal(number)
        return {"tau": 2.0}

    stage = replace(STAGE, evaluate_every=2)
    with pytest.raises(Preempted):
        train(tmp_path, stage, evaluate=evaluate)
    lines = training.metrics(tmp_path)
    assert [(line["step"], line.get("tau")) for line in lines] == [(1, None), (2, None), (2, 2.0)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
    train(tmp_path, replace(stage, steps=6), evaluate=lambda params: {"tau": 3.0})
    lines = training.metrics(tmp_path)
    assert [line["tau"] for line in lines if "tau" in line] == [2.0, 3.0, 3.0]


def test_an_evaluation_that_a_signal_put_off_is_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation that was due when a signal ended the run is made when it goes on, and once."""
    stage, reached = replace(STAGE, evaluate_every=2), iter([False, False, True])
    monkeypatch.setattr(Preemption, "reached", lambda self: next(reached, False))
    with pytest.raises(Preempted):
        train(tmp_path, stage, evaluate=lambda params: {"tau": 1.0})
    assert [line["step"] for line in training.metrics(tmp_path)] == [1, 2]
    for _ in range(2):
        train(tmp_path, stage, evaluate=lambda params: {"tau": 2.0})
        lines = [line for line in training.metrics(tmp_path) if "tau" in line]
        assert [line["step"] for line in lines] == [2, 4, 6]


def test_a_signal_in_the_last_evaluation_ends_the_run_too(tmp_path: Path, number: int) -> None:
    """A signal in the last evaluation ends the run too, before the next stage begins; the same
    command goes on to it.
    """
    stage = replace(STAGE, evaluate_every=STAGE.steps)
    with pytest.raises(Preempted):
        train(tmp_path / "cut", stage, evaluate=lambda params: signal.raise_signal(number) or {})
    rest = train(tmp_path / "cut", stage)
    np.testing.assert_array_equal(rest, train(tmp_path / "straight"))


def test_an_ignored_signal_ends_nothing(tmp_path: Path, number: int) -> None:
    signal.signal(number, signal.SIG_IGN)
    with Preemption() as told:
        signal.raise_signal(number)
        assert not told.reached()


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
        assert told.reached()
    signal.signal(signal.SIGHUP, before)
