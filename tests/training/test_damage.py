"""What is damaged in a training directory is named, and the run goes on from the step before, to
the same bits.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.errors import InputError
from jaxspec.training.loop.trainer import fit
from tests.tiny import training
from tests.training.child import Child
from tests.training.test_trainer import STAGE, batches, dies_at, loss_fn, params

pytestmark = pytest.mark.full

STATE = {"a": jnp.arange(5000, dtype=jnp.float32), "b": {"c": jnp.ones((3, 4), jnp.bfloat16)}}


def state(step: int) -> dict:
    return jax.tree.map(lambda leaf: leaf + step, STATE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    # names that are text when they are read again, in another order
    workers = {number: number for number in range(11)}
    with Checkpoints(path, run={"batch": 8, "workers": workers}) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state(step), wait=True)
    return path


def flipped(content: bytes) -> bytes:
    """Return the content with one bit flipped."""
    place = random.Random(len(content)).randrange(len(content))
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


DAMAGES: tuple[Callable[[bytes], bytes | None], ...] = (
    flipped,
    lambda content: None,
    lambda content: b"",
    lambda content: content[: len(content) // 2],
)
"""What becomes of a file; None: it is gone."""


def test_damage_of_one_file_costs_one_step_at_most(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Damage of one file costs one step at most, also of the largest, which has the arrays, and
    which Orbax reads whatever its bits are.
    """
    files = sorted(
        (path for path in (saved / "4").rglob("*") if path.is_file()),
        key=lambda path: -path.stat().st_size,
    )
    found = []
    for number, file in enumerate(files):
        copy = tmp_path / str(number)
        shutil.copytree(saved, copy)
        content = DAMAGES[number % len(DAMAGES)](file.read_bytes())
        (copy / file.relative_to(saved)).unlink()
        if content is not None:
            (copy / file.relative_to(saved)).write_bytes(content)
        with Checkpoints(copy) as checkpoints:
            restored = checkpoints.restore(STATE)
        found.append(int(restored["a"][0]))
        jax.tree.map(np.testing.assert_array_equal, restored, state(found[-1]))
        said = capfd.readouterr().err
        assert "Traceback" not in said
        assert (
            (f"{copy}: step 4 is damaged" in said)
            == (copy / "4.damaged").is_dir()
            == (found[-1] == 2)
        )
    assert found[0] == 2
    assert {*found} == {2, 4}  # not every file is needed


def test_where_no_step_can_be_read_nothing_is_moved(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "saved")
    for file in (tmp_path / "saved").glob("*/data/metadata"):
        file.write_text("{")
    before = sorted((tmp_path / "saved").rglob("*"))
    with Checkpoints(tmp_path / "saved") as checkpoints:
        assert checkpoints.newest() is None
        with pytest.raises(InputError, match=r"step 4 cannot be read \(JSONDecodeError.*nor any b"):
            checkpoints.restore(STATE)
    assert sorted((tmp_path / "saved").rglob("*")) == before


def test_a_run_goes_on_from_the_step_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = fit(STAGE, params(), loss_fn, batches, tmp_path / "straight")
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, params(), loss_fn, dies_at(5), run)
    (run / "checkpoints/4/data/metadata").unlink()
    (run / "checkpoints/7").mkdir()
    (run / "train_config.json").write_text("{")
    seen = []
    ended = fit(STAGE, params(), loss_fn, lambda step: seen.append(step) or batches(step), run)
    assert seen == [2, 3, 4, 5]
    np.testing.assert_array_equal(ended["line"]["kernel"], straight["line"]["kernel"])
    assert [line["step"] for line in training.metrics(run)] == [1, 2, 3, 4, 5, 6]
    said = capsys.readouterr().err
    for step in (7, 4):
        assert f"{run}/checkpoints: step {step} is damaged" in said
        assert f"now {step}.damaged; step 2 is whole" in said
    assert (run / "train_config.json").read_text() == (
        tmp_path / "straight/train_config.json"
    ).read_text()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "4",
        "6",
        "4.damaged",
        "7.damaged",
    }


def test_a_checkpoint_tells_its_run_itself(tmp_path: Path) -> None:
    fit(STAGE, params(), loss_fn, batches, tmp_path)
    (tmp_path / "train_config.json").unlink()
    with pytest.raises(
        InputError, match=r"holds a run with learning_rate 0\.1, but now it is 0\.2"
    ):
        fit(replace(STAGE, learning_rate=0.2), params(), loss_fn, batches, tmp_path)


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    """A full disk ends training in one line, although TensorStore calls Orbax's closed loop for
    each of many writes.
    """
    said = Child("full_disk", tmp_path).end(2)
    assert "Traceback" not in said
    assert f"child: error: {tmp_path}/checkpoints: cannot be written: File too large" in said
