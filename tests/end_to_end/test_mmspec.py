"""MMSpec's script runs with a target and with its recorded answers, also for a user's own set."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from eval import block_efficiency, mmspec
from eval.lib.drafts.config import EvalConfig, Variant
from jaxspec.errors import InputError
from tests.tiny.files import read_json, read_lines, write_lines

pytestmark = pytest.mark.full


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as lines:
        return list(csv.DictReader(lines))


def test_answers_summary_and_replay(tiny_preset: Callable[..., EvalConfig], tmp_path: Path) -> None:
    Image.new("RGB", (28, 28), "red").save(tmp_path / "a.png")
    prompts = [
        {
            "id": "m_1",
            "image": "a.png",
            "turns": ["What?", "Why?", "So?"],
            "category": "x",
            "topic": "many",
        },
        {"id": "m_2", "image": "a.png", "turns": ["Who?"], "category": "x", "topic": "one"},
    ]
    write_lines(tmp_path / "prompts.jsonl", prompts)
    data = (f"mmspec={tmp_path / 'prompts.jsonl'}",)
    rows = (Variant("MT", ("M", "T")),)
    tiny_preset(
        rows=rows, sets=("mmspec",), data=data, gamma=3, batch_size=1, prompt_buckets=(128,)
    )
    mmspec.main(["tiny", "--out", str(tmp_path / "out")])
    plain, fast = (
        read_lines(tmp_path / f"out/{name}-temperature-0.jsonl") for name in ("baseline", "MT")
    )
    assert [len(row["choices"][0]["turns"]) for row in plain] == [3, 1]
    for ours, theirs in zip(fast, plain, strict=True):
        assert ours["choices"][0]["token_ids"] == theirs["choices"][0]["token_ids"]
        assert ours["choices"][0]["idxs"] <= theirs["choices"][0]["idxs"]
    with pytest.raises(
        InputError, match="out: holds results of gamma 3, but now it is 2; give another --out"
    ):
        mmspec.main(["tiny", "--out", str(tmp_path / "out"), "--gamma", "2"])
    measured = rows_of(tmp_path / "out/summary.csv")
    assert [(row["method"], row["group"]) for row in measured] == [
        (method, group) for method in ("baseline", "MT") for group in ("ALL", "many", "one")
    ]

    replay = f"replay:{tmp_path / 'out/baseline-temperature-0.jsonl'}"
    mmspec.main(["tiny", "--out", str(tmp_path / "again"), "--target", replay])
    told = rows_of(tmp_path / "again/summary.csv")
    counts = ("n_turns", "total_new_tokens", "MAT", "draft_accept_mean")
    assert [[row[k] for k in counts] for row in told] == [
        [row[k] for k in counts] for row in measured
    ]
    assert {row["speedup_paired"] for row in told} == {""}

    own = ["--sets", f"mine={tmp_path / 'prompts.jsonl'}", "--images", str(tmp_path)]
    block_efficiency.main(["tiny", "--out", str(tmp_path / "table"), "--target", replay, *own])
    rows = read_json(tmp_path / "table/results.json")["rows"]
    assert [(row["turn"], row["samples"], row["token_identity_rate"]) for row in rows] == [
        (1, 2, 1.0),
        (2, 1, 1.0),
    ]
    assert {row["dataset"] for row in rows} == {"mine"}
    assert all("speedup_measured" not in row for row in rows)
