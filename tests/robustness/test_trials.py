"""A few of the trials that `python -m tests.robustness damage` makes by the thousand, and how they are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness import trials
from tests.robustness.damage import Outcome


@pytest.mark.parametrize(("trial", "count"), [(trials.image, 150), (trials.command_line, 60)])
def test_images_and_command_lines(trial, count, tmp_path: Path) -> None:
    found = [trial(tmp_path, seed) for seed in range(count)]
    assert [one for one in found if trials.is_bad(one)] == []
    assert {one.ended for one in found} == {"used", "refused"}


def test_trials_run_in_a_process_of_their_own() -> None:
    assert [one.seed for one in trials.run("rows", range(7, 9))] == [7, 8]


def test_what_is_not_well_is_counted_apart() -> None:
    ends = [("used", 1.0, 0), ("refused", 21.0, 0), ("refused", 1.0, 3 << 30), ("KeyError at x.py:3", 1.0, 0)]
    row = trials.summary("bytes", [Outcome(0, "bytes", "", *end) for end in ends])
    assert (row["tried"], row["used"], row["refused"], row["else"]) == (4, 1, 0, 3)
