"""Packages add models and commands by entry points."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.checkpoints.locating import locate
from jaxspec.errors import InputError
from jaxspec.plugins import plugins


def test_a_package_adds_a_model_by_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package adds a model by its id: it is found as pip installs it, next to those of this
    checkout, and only its own id loads it.
    """
    note = tmp_path / "toys-1.0.dist-info"
    note.mkdir()
    (note / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (note / "entry_points.txt").write_text(
        "[jaxspec.models]\ntoy-1 = jaxspec_toys:toy\nbroken = jaxspec_toys.not:here\n"
    )
    (tmp_path / "jaxspec_toys.py").write_text(
        "from pathlib import Path\ndef toy():\n    return Path(__file__).parent\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert locate("toy-1") == tmp_path
    assert {"toy-1", "smollm2-135m", "smollm2-eyes"} <= plugins("models").keys()
    with pytest.raises(InputError, match="did you mean 'toy-1'"):
        locate("toy-2")
    with pytest.raises(
        InputError, match=r"broken: jaxspec_toys\.not:here, .* cannot be imported .*; install"
    ):
        locate("broken")
