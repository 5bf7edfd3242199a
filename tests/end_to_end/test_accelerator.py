"""What eval/accelerator.py runs: every part is a script with options that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import tyro

from eval import accelerator, latency
from jaxspec.command import preset_names
from jaxspec.errors import InputError


@pytest.mark.parametrize("name", accelerator.PARTS)
def test_parts_are_commands_of_their_scripts(name: str) -> None:
    script, *options = accelerator.PARTS[name]
    assert script == "eval.latency"
    tyro.extras.get_parser(latency.main).parse_args([*options, "--out", "runs"])  # exits where an option is unknown
    assert options[0] in preset_names("latency")


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="parts: no part 'start'; did you mean 'startup'"):
        accelerator.main(tmp_path, parts=("start",))


def test_parts_that_fail_are_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "other"):
        monkeypatch.setitem(accelerator.PARTS, name, (f"eval.no_{name}",))
    with pytest.raises(SystemExit, match="not done: one, other"):
        accelerator.main(tmp_path, parts=("one", "other"))
