"""eval/weightings.py on tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval import weightings
from jaxspec.evaluation.config import EvalConfig, Row
from tests import tiny


def test_regret_of_each_rule_and_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny.CONFIG, text_config=replace(tiny.CONFIG.text_config, num_hidden_layers=1))
    params = tiny.random_params(config)
    target = tiny.save(tmp_path / "target", config, params)
    draft = tiny.save(tmp_path / "draft", config, tiny.noisy(params, 0.1))
    preset = EvalConfig(
        str(target), str(draft), (Row("MT", ("M", "T")),), ("facts",), turns=(1,), limit=2, gamma=2, max_new_tokens=8,
        batch_size=2,
    )  # fmt: skip
    monkeypatch.setattr("jaxspec.evaluation.command.load_preset", lambda kind, name: preset)
    weightings.main(f"tiny --out {tmp_path / 'out'} --views M T --rules static em --windows 4".split())
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert [row["weighting"] for row in rows] == ["static", "em", "em:window=4"]
    assert all(row["samples"] == 2 and row["block_efficiency"] >= 1 for row in rows)
    assert "| em:window=4 | 1 |" in (tmp_path / "out/table.md").read_text()
