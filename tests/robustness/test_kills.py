"""A few of the kills that `tests.robustness.kills` does by the hundred lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.kills import kill_preparations, kill_tables, kill_trainings

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("kill", "count"), [(kill_trainings, 2), (kill_tables, 4), (kill_preparations, 3)]
)
def test_killed_runs_end_as_undisturbed_ones(kill, count, tmp_path: Path) -> None:
    killed = kill(count, 0, tmp_path)
    assert killed.kills == count
    assert killed.runs >= 1
