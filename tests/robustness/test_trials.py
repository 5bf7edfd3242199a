"""A few of the trials that `python -m tests.robustness damage` makes by the thousand end well, and
are counted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness import trials

pytestmark = pytest.mark.full


@pytest.mark.parametrize(("trial", "count"), [(trials.image, 150), (trials.command_line, 60)])
def test_images_and_command_lines(trial, count, tmp_path: Path) -> None:
    found = [trial(tmp_path, seed) for seed in range(count)]
    assert [one for one in found if trials.is_bad(one)] == []
    assert {one.ended for one in found} == {"used", "refused"}
