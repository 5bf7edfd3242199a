"""eval/block_efficiency.py --regret on tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eval import block_efficiency
from eval.lib.config import EvalConfig, Variant
from eval.lib.simulation import measure_regret
from jaxspec.errors import InputError
from jaxspec.loading import LoadedModel

from tests import tiny


def test_regret_of_each_rule_and_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(tiny.CONFIG, text_config=replace(tiny.CONFIG.text_config, num_hidden_layers=1))
    params = tiny.random_params(config)
    target = tiny.save(tmp_path / "target", config, params)
    draft = tiny.save(tmp_path / "draft", config, tiny.noisy(params, 0.1))
    rows = tuple(Variant(rule, ("M", "T"), weighting=rule) for rule in ("static", "hard_match", "hard_match:window=4"))
    preset = EvalConfig(
        target=str(target), draft=str(draft), rows=rows, sets=("facts",), turns=(1,), limit=2, gamma=2,
        max_new_tokens=8, batch_size=2,
    )  # fmt: skip
    monkeypatch.setattr("eval.lib.command_line.load_preset", lambda kind, name: preset)
    block_efficiency.main(f"tiny --out {tmp_path / 'out'} --regret".split())
    measured, replayed = np.array_split(json.loads((tmp_path / "out/results.json").read_text())["rows"], 2)
    assert [row["weighting"] for row in replayed] == ["static", "hard_match", "hard_match:window=4"]
    for one, other in zip(measured, replayed, strict=True):
        assert one["tokens_per_pass"] == other["tokens_per_pass"]
        assert other["samples"] == 2
    assert "| hard_match:window=4 | 1 |" in (tmp_path / "out/table.md").read_text()


def test_rows_that_mix_nothing_are_refused() -> None:
    models = LoadedModel(tiny.CONFIG, {}, None, None), LoadedModel(tiny.CONFIG, {}, None, None)
    config = EvalConfig(target="a", draft="b", rows=(Variant("M", ("M",)),), sets=("facts",))
    with pytest.raises(InputError, match="regret: no row mixes views"):
        measure_regret(config, *models, None)
