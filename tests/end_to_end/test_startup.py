"""eval/startup.py: the host's own time, and starts that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval import startup
from jaxspec.errors import InputError
from tests import tiny


def test_host_time_with_and_without_an_image(tmp_path: Path) -> None:
    rows = startup.host(*map(str, tiny.save_pair(tmp_path)), calls=1)
    assert [row["what"] for row in rows] == ["host time of a call, text", "host time of a call, one image"]
    assert all(row["seconds"] > 0 for row in rows)


def test_a_start_that_fails_tells_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^checkpoint '.*none': no such directory; give one"):
        startup.start(str(tmp_path / "none"), str(tmp_path / "none"), warm=0)


def test_no_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="starts: 0; give a whole number, 1 or more"):
        startup.main(out=tmp_path, starts=0)
