"""Runs go on from checkpoints and chunks of answers in a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from jaxspec.errors import InputError
from jaxspec.training.loop.preemption import Preempted
from jaxspec.training.regenerate import regenerate, regenerated
from tests.tiny import Talk
from tests.tiny.bucket import Bucket, bucket
from tests.training.test_preemption import STAGE, train
from tests.training.test_regenerate import WORK, chunks, engine, options, straight  # noqa: F401
from tests.training.test_trainer import batches

pytestmark = pytest.mark.full


@pytest.fixture
def place() -> Iterator[str]:
    with bucket() as address:
        yield address


def names() -> set[str]:
    """Return the names of what the bucket holds."""
    return {name.removeprefix("/bucket/") for name in Bucket.store}


def test_a_slice_goes_on_from_the_bucket(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = replace(STAGE, checkpoints=f"{place}/run/", save_every=2)

    points = itertools.count(1)  # a step has two
    reached = "jaxspec.training.loop.preemption.Preemption.reached"
    monkeypatch.setattr(reached, lambda self: next(points) == 5)
    with pytest.raises(Preempted):
        train(tmp_path / "first", stage)
    monkeypatch.undo()
    assert {name.split("/")[1] for name in names()} == {"2", "3"}
    asked: list[int] = []
    again = train(tmp_path / "second", stage, lambda step: asked.append(step) or batches(step))
    assert asked == [3, 4, 5]
    np.testing.assert_array_equal(again, train(tmp_path / "straight"))


def test_chunks_in_a_bucket_are_those_of_a_folder(
    place: str,
    engine,  # noqa: F811
    straight: Path,  # noqa: F811
) -> None:
    address = f"{place}/talk_t1"
    assert regenerate(engine, Talk(), WORK, address, (1, 2)) == 1
    assert regenerate(engine, Talk(), WORK, address) == 3
    assert names() == {
        f"talk_t1/{name}" for name in ("000000.jsonl", "000001.jsonl", "000002.jsonl", "work.json")
    }
    files = fsspec.filesystem("gcs")
    assert [files.cat_file(f"{address}/{i:06d}.jsonl").decode() for i in range(3)] == chunks(
        straight
    )
    mine, theirs = (list(regenerated(Talk(), WORK, folder)) for folder in (address, straight))
    assert [sample.turns for sample in mine] == [sample.turns for sample in theirs]
    with pytest.raises(InputError, match=r"temperature 1.0, but now it is 0.0"):
        regenerate(engine, Talk(), replace(WORK, temperature=0.0), address)
