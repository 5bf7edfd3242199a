"""Bad input on the way of real use: each is one line and exit code 2, and nothing that was measured is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval import block_efficiency
from jaxspec.checkpoints.locating import locate
from jaxspec.command import input_errors

from tests.hub import build
from tests.hub.conftest import cached_at
from tests.hub.data import DATA, write

TARGET, DRAFT = "llava-hf/llava-1.5-7b-hf", "mjbooo/lvlm68m"
ASKED = ("llava15", "--rows", "M", "--turns", "1", "--limit", "2", "--max-new-tokens", "4", "--out", "out")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The line with which a table ends."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, input_errors("eval"):
        block_efficiency.main([*ASKED, *options])
    assert ended.value.code == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("eval: error: "))
    return line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_wrong_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'mjbooo/lvlm86m': no such directory, and cannot be fetched from the hub" in refused(
        capsys, "--draft", "mjbooo/lvlm86m", "--sets", "pope"
    )


def test_a_corrupt_set_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier measurements are kept, and the same command resumes after them when the file is mended."""
    cache = tmp_path / "hub"
    cache.mkdir()
    for repository in ("lmms-lab/POPE", "lmms-lab/MMVet"):
        build.add(cache, repository, lambda folder, twin=DATA[repository]: write(folder, twin), "datasets")
    for model in (TARGET, DRAFT):
        name = f"models--{model.replace('/', '--')}"
        (cache / name).symlink_to(locate(model).parents[1])
    (file,) = cache.glob("datasets--lmms-lab--MMVet/snapshots/*/data/*.parquet")
    whole = file.read_bytes()
    file.resolve().write_bytes(whole[:-9])
    with cached_at(cache):
        assert f"{file.name}: cannot be read as parquet" in refused(capsys, "--sets", "pope", "mm-vet")
        before = json.loads((tmp_path / "out.unfinished" / "results.json").read_text())["rows"]
        assert [row["dataset"] for row in before] == ["pope"]
        file.resolve().write_bytes(whole)
        block_efficiency.main([*ASKED, "--sets", "pope", "mm-vet"])
    assert "1 parts are measured already" in capsys.readouterr().err
    after = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert after[:1] == before
    assert [row["dataset"] for row in after] == ["pope", "mm-vet"]
