"""eval/batches.py on tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.batches import main
from jaxspec.evaluation.config import EvalConfig, Row
from tests.end_to_end import tiny


def test_all_ways_to_decode_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = map(str, tiny.save_pair(tmp_path))
    preset = EvalConfig(target=target, draft=draft, rows=(Row("T", ("T",)),), sets=("facts",))
    monkeypatch.setattr("eval.batches.load_preset", lambda kind, name: preset)
    out = tmp_path / "out"
    main("tiny", out, batches=(2,), dataset="facts", samples=3, new=12, long=12, gamma=1, view="T", repeats=1)
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert row["identical"]
    assert row["plain_waste"] == 0  # random weights say no EOS: rows end together, and the third has none beside it
    assert 0 <= row["speculative_waste"] < 0.5
    rates = [name for name in row if name not in ("batch", "identical", "plain_waste", "speculative_waste")]
    assert len(rates) == 3 + 4  # of each way to decode; of refill and growth, plain and speculative
    assert all(row[name] > 0 for name in rates)
    assert "All answers are the same tokens." in (out / "table.md").read_text()
