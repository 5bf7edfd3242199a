"""eval/batches.py on tiny checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.batches import main, waste
from jaxspec.decoding.engine import Result, RowStats
from jaxspec.errors import InputError
from jaxspec.evaluation.config import EvalConfig, Row
from tests import tiny


def test_all_ways_to_decode_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Text models of one layer, whole batches, and caches of one size: few and small programs.
    config = replace(tiny.CONFIG.text_config, num_hidden_layers=1)
    params = tiny.random_params(config)
    target = tiny.save(tmp_path / "target", config, params)
    draft = tiny.save(tmp_path / "draft", config, tiny.noisy(params, 0.1))
    preset = EvalConfig(target=str(target), draft=str(draft), rows=(Row("T", ("T",)),), sets=("facts",))
    monkeypatch.setattr("jaxspec.evaluation.command.load_preset", lambda kind, name: preset)
    out = tmp_path / "out"
    main("tiny", out, batches=(2,), dataset="facts", samples=4, new=12, long=12, gamma=1, view="T", repeats=1)
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert row["identical"]
    assert 0 <= row["plain_waste"] < 0.5
    assert 0 <= row["speculative_waste"] < 0.5
    rates = [name for name in row if name not in ("batch", "identical", "plain_waste", "speculative_waste")]
    assert len(rates) == 3 + 4  # of each way to decode; of refill and growth, plain and speculative
    assert all(row[name] > 0 for name in rates)
    assert "All answers are the same tokens." in (out / "table.md").read_text()


def test_waste_is_what_rows_wait_for_others() -> None:
    """By hand: rows of 3 and 1 steps run 3 each, the one of 2 steps has none beside it: 6 of 8 row-steps count."""
    nothing = np.zeros(0)
    answers = [Result("", (), RowStats(steps, 0, nothing, nothing, nothing), 0.0, 0.0, 2) for steps in (3, 1, 2)]
    assert waste(answers, 2) == 1 - 6 / 8


def test_a_preset_of_another_script_is_refused() -> None:
    with pytest.raises(InputError, match="'gsm8k': is for another script under eval/; use one of aasd, "):
        main("gsm8k")
