"""Answers are scored by accuracy, ROUGE-L and METEOR, and by whether programs pass their tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval import draft_quality
from eval.lib.drafts.config import EvalConfig, Variant
from eval.lib.questions.quality import (
    chosen_letter,
    final_number,
    is_right,
    judge,
    quality,
    rouge_l,
)
from eval.lib.questions.run_code import passes
from jaxspec.data.benchmarks import benchmark_samples, few_shot_samples
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from tests.tiny.files import read_json, read_lines

pytest.importorskip("rouge_score", reason="ROUGE and METEOR need the `quality` extra")


@pytest.mark.parametrize(
    ("accepted", "answer", "right"),
    [
        (("1999", "'99"), "It was in 1999.", True),
        (("red ball",), "A Red, ball!", True),
        (("yes",), "Yes, there is no cup.", True),
        (("no",), "Yes, there is no cup.", False),
        (("yes",), "A cup.", False),
    ],
)
def test_accuracy(accepted: tuple[str, ...], answer: str, right: bool) -> None:
    assert is_right(accepted, answer) is right


def test_rouge_is_the_longest_common_subsequence() -> None:
    """ROUGE-L is the longest common subsequence: of 'the cat sat' and 'the cats slept' the stems
    the, cat; P = R = 2/3.
    """
    assert rouge_l(["the cat sat"], "the cats slept") == pytest.approx(2 / 3)
    assert rouge_l(["a dog", "the cat sat"], "the cat sat") == 1.0


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("So 3+4=<<3+4=7>>7.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("it is 5. Or 6.50 dollars", "6.50"),
        ("#### -3 degrees", "-3"),
        ("none", None),
    ],
)
def test_final_numbers(written: str, number: str | None) -> None:
    assert final_number(written) == number


@pytest.mark.parametrize(
    ("written", "letter"),
    [
        ("B. even", "B"),
        (" (C)", "C"),
        ("It is not A. The answer is (B).", "B"),
        ("A cup of tea", None),
    ],
)
def test_chosen_letters(written: str, letter: str | None) -> None:
    assert chosen_letter(written) == letter


def test_questions_of_choice_and_worked_examples(tmp_path: Path) -> None:
    """Questions of choice, asked with examples, count a letter or the option's words, and ignore
    what a model asks next.
    """
    row = {"question": "2 is", "subject": "algebra", "choices": ["odd", "even"], "answer": 1}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"{json.dumps(row)}\n" * 5)
    sample = next(few_shot_samples("mmlu", rows, rows))
    right = [
        quality(sample, told) for told in (" B", "even", "B. even\n\nQuestion: Is it?\nAnswer: A")
    ]
    assert right == [1.0, 1.0, 1.0]
    assert [quality(sample, told) for told in ("A", "odd", "\n\nQuestion: 2 is\nAnswer: B")] == [
        0.0,
        0.0,
        0.0,
    ]
    article = Sample("0", "cnn-dm", (), (("Rain fell.", "the cat sat"),))
    assert quality(article, "the cats slept") == pytest.approx(2 / 3)


ASKED = 'def double(x: int) -> int:\n    """Return 2 x."""\n'
TESTS = "def check(candidate):\n    assert candidate(3) == 6\n"
RIGHT = (
    "    y = x + x\n    return y\n\nprint(double('no'))\nIt adds.",
    "return 2 * x",
    "\n    return (\n        2\n        * x\n)\nassert False",
    f"Surely:\n```python\n{ASKED}    return 2 * x\n```\nIt doubles.",
    "```\n    return 2 * x\n```",
    f"```\npython\n{ASKED}    return 2 * x\n```",
    f"Surely.\n{ASKED}    return 2 * x\nIt doubles.",
)
WRONG = ("    return x", "    exit(0)", "    return 2 *", "")


def test_programs_pass_or_fail(tmp_path: Path) -> None:
    row = {
        "task_id": "0",
        "prompt": ASKED,
        "canonical_solution": "    return 2 * x\n",
        "test": TESTS,
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"entry_point": "double"}))
    (sample,) = benchmark_samples("humaneval", tmp_path / "rows.jsonl")
    assert quality(sample, RIGHT[0]) is None
    assert [quality(sample, told, run_code=True) for told in RIGHT + WRONG] == [1.0] * 7 + [0.0] * 4


def test_humaneval_asked_in_chat_is_judged_alone(tmp_path: Path) -> None:
    row = {
        "prompt": ASKED,
        "canonical_solution": "    return 2 * x\n",
        "test": TESTS,
        "entry_point": "double",
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (sample,) = benchmark_samples("humaneval-chat", tmp_path / "rows.jsonl")
    assert sample.turns[0][0].endswith(f"```python\n{ASKED.strip()}\n```")
    assert [judge(sample, told, run_code=True)["pass@1"] for told in RIGHT + WRONG] == [1.0] * 7 + [
        0.0
    ] * 4
    assert set(judge(sample, RIGHT[0]).values()) == {None}


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "held = 'x' * 2_000_000_000",
        "import socket",
        "import urllib.request",
        "open('large', 'wb').write(bytes(2 << 20))",
    ],
)
def test_programs_have_limits(program: str) -> None:
    assert not passes(program, seconds=0.7)


def test_a_harmless_program_passes_and_is_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert passes(
        "import os\nassert 'SECRET' not in os.environ and not os.listdir()\n"
        "open('a', 'w').write('b')"
    )


def test_what_does_not_apply_is_none() -> None:
    blank = Sample("0", "mmspec", (), (("Q", ""),))
    assert set(judge(blank, "It.").values()) == {None}
    long = Sample("0", "llava-bench", (), (("Q", "It is red."),))
    assert judge(long, "It is red.")["accuracy"] is None
    assert judge(long, "It is red.")["rouge_l"] == 1.0
    number = Sample("0", "gsm8k", (), (("Q", "1+1 is 2\n#### 2"),), accepted=("2",))
    assert judge(number, "The answer is 2.")["accuracy"] == 1.0


def test_the_script_writes_every_model(
    tiny_preset: Callable[..., EvalConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tiny_preset(rows=(Variant("T", ("T",)),), sets=("facts", "describe"))
    options = f"--limit 2 --text-only --drafts pool={preset.draft[0]}:P1"
    draft_quality.main(f"tiny --out {tmp_path / 'out'} {options}".split())
    rows = read_json(tmp_path / "out/results.json")["rows"]
    assert [(row["dataset"], row["model"]) for row in rows] == [
        (dataset, model)
        for dataset in ("facts", "describe")
        for name in ("target", "draft", "pool")
        for model in (name, f"{name}, text-only")
    ]
    assert rows[0]["accuracy"] is not None
    assert rows[6]["accuracy"] is None
    records = read_lines(tmp_path / "out/records.jsonl")
    prompts = (tmp_path / "out/prompts.jsonl").read_text().splitlines()
    read = {(p["dataset"], p["model"], p["reader"]): p["view"] for p in map(json.loads, prompts)}
    assert read["describe", "pool", "model 1"] == "P1"
    said = {
        (one["dataset"], one["model"]): one["text"]
        for one in records
        if one["sample"].endswith("001")
    }
    for model in ("target", "draft"):
        assert said["facts", model] == said["facts", f"{model}, text-only"]  # there are no images
        assert said["describe", model] != said["describe", f"{model}, text-only"]
    assert said["facts", "pool"] == said["facts", "draft"]
    assert said["describe", "pool"] not in (
        said["describe", "draft"],
        said["describe", "draft, text-only"],
    )
    assert all(0 <= row["rouge_l"] <= 1 and row["samples"] == 2 for row in rows)
    assert "rouge_l" in capsys.readouterr().out
    assert "accuracy" in (tmp_path / "out/table.md").read_text()
    with pytest.raises(InputError, match="drafts: there is a row 'target' already; give another"):
        draft_quality.main(["tiny", "--drafts", f"target={preset.draft[0]}"])


@pytest.mark.full
def test_combinations_answer_beside_their_models(
    tiny_preset: Callable[..., EvalConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_preset(rows=(Variant("lookup", ("lookup",)),), sets=("describe",))
    ways = ("weighted:1,0", "weighted:0.5,0.5", "contrastive:mu=0.1")
    draft_quality.main(
        f"tiny --out {tmp_path / 'out'} --limit 2 --combinations {' '.join(ways)}".split()
    )
    lines = (tmp_path / "out/records.jsonl").read_text().splitlines()
    said: dict[str, list[str]] = {}
    for one in map(json.loads, lines):
        said.setdefault(one["model"], []).append(one["text"])
    assert list(said) == ["target", "draft", *ways]
    assert said["weighted:1,0"] == said["target"] != said["draft"]
    assert said["weighted:0.5,0.5"] not in (said["target"], said["draft"])
    assert said["contrastive:mu=0.1"] != said["weighted:0.5,0.5"]
    with pytest.raises(InputError, match="combinations: they need"):
        draft_quality.main(["tiny", "--draft", "", "--combinations", "weighted"])
    with pytest.raises(InputError, match="combination"):
        draft_quality.main(["tiny", "--combinations", "mean"])
