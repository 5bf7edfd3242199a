"""eval/robustness.py: damaged checkpoints, by a process apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval import robustness
from jaxspec.errors import InputError
from jaxspec.evaluation.damage import Outcome
from tests.end_to_end import tiny


def test_the_table_counts_what_became_of_each(tmp_path: Path) -> None:
    tiny.save_pair(tmp_path)
    with pytest.raises(SystemExit) as left:
        robustness.main(tmp_path / "target", tmp_path / "head", tmp_path / "out", damages=4, first=7)
    assert left.value.code == 0
    *rows, whole = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert whole["tried"] == whole["used"] + whole["refused"] == sum(row["tried"] for row in rows) == 4
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    assert [record["seed"] for record in records] == [7, 8, 9, 10]


def test_what_is_not_well_is_counted_apart() -> None:
    ends = [("used", 1.0, 0), ("refused", 21.0, 0), ("refused", 1.0, 3 << 30), ("KeyError at x.py:3", 1.0, 0)]
    row = robustness.summary("bytes", [Outcome(0, "bytes", "", *end) for end in ends])
    assert (row["tried"], row["used"], row["refused"], row["else"]) == (4, 1, 0, 3)


def test_a_head_of_another_target_is_refused_first(tmp_path: Path) -> None:
    tiny.save_pair(tmp_path)
    with pytest.raises(InputError, match="KV head"):
        robustness.main(tmp_path / "target", tmp_path / "target", tmp_path / "out", damages=1)
