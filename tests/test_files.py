"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.files import whole, write_text


def stop_within(path: Path) -> None:
    with whole(path) as fresh:
        fresh.write_text("half of")
        raise KeyboardInterrupt


def test_a_file_that_is_not_finished_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    write_text(path, "é\n")
    with pytest.raises(KeyboardInterrupt):
        stop_within(path)
    assert path.read_bytes() == "é\n".encode()
    write_text(path, "anew")
    assert path.read_text() == "anew"
    assert list(tmp_path.iterdir()) == [path]
