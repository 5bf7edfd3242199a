"""Some hundred of the damaged rows that `tests.robustness.damaged_rows` makes by the thousand are
read or refused in one line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny
from tests.robustness.damaged_rows import ROWS, row_outcome

pytestmark = pytest.mark.full


def test_damaged_rows_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    draft = tiny.loaded({})
    found = [row_outcome(tmp_path, seed, draft) for seed in range(300)]
    assert [one for one in found if not one.well] == []
    assert {one.ended for one in found} == {"used", "refused"}
    assert {one.kind for one in found} == {*ROWS}
    assert max(one.seconds for one in found) < 20
