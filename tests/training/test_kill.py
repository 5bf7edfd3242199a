"""A run that is stopped by a signal resumes to the same bits as one that is not, and sees each batch once.

Kills without a word are in `tests/robustness`.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import training
from tests.training import child
from tests.training.child import Child


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    path = tmp_path_factory.mktemp("straight")
    return child.train_line(path, lambda step: None)["line"]["kernel"]


def finish(directory: Path, straight: np.ndarray) -> None:
    """Lets a run end, and compares it."""
    said = Child("line", directory).end(0)
    assert f"resuming {directory} at step" in said
    lines = training.metrics(directory)
    assert [line["step"] for line in lines] == [*range(1, child.LINE.steps + 1)]
    assert [line["batch"] for line in lines] == [*range(child.LINE.steps)]
    # The finished run asks for no batch, and gives its parameters.
    ended = child.train_line(directory, lambda step: pytest.fail("asked for data"))
    np.testing.assert_array_equal(ended["line"]["kernel"], straight)


def test_told_to_end_while_a_checkpoint_is_written(straight, tmp_path):
    run = Child("line", tmp_path)
    run.await_line(lambda line: line == f"saving {child.LINE.save_every}\n")
    run.process.send_signal(signal.SIGTERM)
    said = run.end(128 + signal.SIGTERM)
    step = int(said.partition("ended by a signal; step ")[2].split()[0])
    assert child.LINE.save_every < step < child.LINE.steps
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == step
    assert (tmp_path / "checkpoints" / str(step)).is_dir()
    finish(tmp_path, straight)
