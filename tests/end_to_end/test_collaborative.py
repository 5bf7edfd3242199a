"""Training text models and measuring what they write together works once, in small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from configs.eval.gsm8k import config as preset
from configs.train.gsm8k import DEBUG
from eval import collaborative
from eval.lib.collaborative.config import Pairing
from tests.end_to_end.conftest import Calls
from tests.tiny.files import read_json, read_lines, write_lines
from train import text

pytestmark = pytest.mark.full

ROWS = [
    {
        "question": f"Ann has {n} figs and picks {m}. How many?",
        "answer": f"{n}+{m}=<<{n}+{m}={n + m}>>\n#### {n + m}",
    }
    for n in range(2, 6)
    for m in (1, 3)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data and two models trained on its halves, for two steps."""
    path = tmp_path_factory.mktemp("gsm8k")
    write_lines(path / "data.jsonl", ROWS)
    long = ROWS[0] | {"question": "figs " * 2000}
    write_lines(path / "asked.jsonl", (ROWS[0], long, ROWS[1]))
    for i, name in enumerate(("one", "other")):
        stage = replace(DEBUG, part=(i, 2), train=replace(DEBUG.train, seed=i))
        text.train(stage, path / "data.jsonl", path / name)
    return path


@pytest.fixture
def out(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of results of a small preset of these models."""
    models = tuple(str(world / name / "hf") for name in ("one", "other"))
    pairing = Pairing(
        "one + other", models, "weighted", 0.0, (1, 1), sweep="lambda:0.2", chat_template=False
    )
    sizes = {
        "limit": 3,
        "held_out": 3,
        "timed": 1,
        "repeats": 1,
        "max_new_tokens": 16,
        "prompt_buckets": (64,),
    }
    small = replace(preset, pairings=(pairing,), **sizes)
    monkeypatch.setattr("eval.lib.drafts.command_line.load_preset", lambda kind, name: small)
    return world / "out"


def measure(out: Path) -> None:
    data = f"gsm8k={out.parent / 'asked.jsonl'}"
    collaborative.main(["gsm8k", "--data", data, "--against", "standard", "--out", str(out)])


def test_the_script(out: Path) -> None:
    measure(out)

    rows = read_json(out / "results.json")["rows"]
    assert [row["row"] for row in rows] == ["standard", "naive", "speculative", "CoS", "sweep"]
    rates = [row["decode_tokens_per_second"] for row in rows[:4]]
    assert [row["speedup_measured"] for row in rows[:4]] == [rate / rates[0] for rate in rates]
    lows, highs = ([row[f"speedup_call_{end}"] for row in rows] for end in ("low", "high"))
    assert lows == highs == pytest.approx([row["speedup_call"] for row in rows])  # of one sample
    calls = [row["call_tokens_per_second"] for row in rows[:4]]
    assert [row["speedup_call"] for row in rows[:4]] == [rate / calls[0] for rate in calls]
    formulas = [row["speedup_theorem"] for row in rows]
    assert [value is None for value in formulas] == [True, False, True, False, False]
    assert all(row["speedup_corollary_3_5"] >= row["speedup_corollary_3_4"] >= 1 for row in rows)
    assert all(len(row["calls_per_token"]) == 2 for row in rows)
    assert [row["token_identity_rate"] for row in rows[:4]] == [1.0] * 4
    assert rows[0]["calls_per_token"] == [1.0, 1.0]
    alone, together = rows[0]["held_out_nats_alone"], rows[0]["held_out_nats"]
    assert together <= sum(alone) / 2  # by convexity
    assert rows[4]["held_out_nats"] <= 0.2 * alone[0] + 0.8 * alone[1]
    assert "| one + other | gsm8k | CoS | 1,1 |" in (out / "table.md").read_text()
    assert "| naive | one + other | gsm8k |" in (out / "table.md").read_text()
    assert (
        "Prompts left out, as longer than a model's context: 1." in (out / "table.md").read_text()
    )
    # All samples are answered by standard decoding and by CoS, and judged; the first alone by the
    # others, for speed.
    assert [(row["samples"], row["quality"]) for row in rows] == [
        (2, 0.0),
        (1, None),
        (1, None),
        (2, 0.0),
        (2, 0.0),
    ]
    assert rows[4]["combination"] == "weighted:0.2,0.8"
    records = read_lines(out / "records.jsonl")
    assert [record["quality"] for record in records] == [0.0, 0.0, None, None, 0.0, 0.0]
    prompts = read_lines(out / "prompts.jsonl")
    assert [prompt["reader"] for prompt in prompts] == ["model 1", "model 2"] * 2
    assert prompts[0]["ids"] == prompts[1]["ids"]


def test_a_pairing_that_is_stopped_keeps_its_answers(out: Path, calls: Calls) -> None:
    """A pairing that is stopped in the last call of an engine keeps its answers: the script repeats
    that call only.
    """
    straight, stopped = (out.with_name(name) for name in ("straight", "stopped"))
    measure(straight)
    calls.last, calls.count = calls.count, 0
    with pytest.raises(KeyboardInterrupt):
        measure(stopped)
    calls.last, calls.count = 0, 0
    measure(stopped)
    assert calls.count == 1
    records = [(folder / "records.jsonl").read_text() for folder in (straight, stopped)]
    assert records[0] == records[1] != ""
