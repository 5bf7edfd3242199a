"""Prompts for drafts of a small model have no question in common between what is trained on and
what is held apart.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from jaxspec.data.conversations import own_samples
from jaxspec.errors import InputError
from train.prompts import Options, main


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder of sources, with one question each."""
    data = tmp_path / "data"
    for file, row in {
        "gsm8k/train.jsonl": {"question": "How many?", "answer": "2"},
        "gsm8k/test.jsonl": {"question": "How few?", "answer": "1"},
        "humaneval/HumanEval.jsonl.gz": {
            "prompt": "def f():\n    '''One.'''",
            "canonical_solution": "    return 1",
        },
        "mmspec/mmspec_24.jsonl": {"turns": ["Which shape?"]},
        "llava/qa90_questions.jsonl": {"text": "What colour?"},
    }.items():
        (data / file).parent.mkdir(parents=True, exist_ok=True)
        with (gzip.open if file.endswith("gz") else open)(data / file, "wt") as lines:
            lines.write(json.dumps(row) + "\n")
    return data


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("gsm8k/test.jsonl", "{", r"test\.jsonl line 2: not JSON"),
        (
            "gsm8k/test.jsonl",
            '{"question": "How?"}',
            r"test\.jsonl line 2: lacks a column \('answer'\); fetch the file",
        ),
        ("mmspec/mmspec_24.jsonl", '{"turns": []}', r"mmspec_24\.jsonl: turns without a first"),
    ],
)
def test_a_broken_source_is_one_line(file: str, line: str, message: str, data: Path) -> None:
    with (data / file).open("a") as lines:
        lines.write(f"{line}\n")
    with pytest.raises(InputError, match=message):
        main(Options(data))


def test_test_prompts_are_held_apart(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "stdlib_module_names", ("abc", "copy", "csv", "fractions", "json", "shlex", "textwrap")
    )
    out = main(Options(data, tmp_path / "out"))
    learned = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    held = {file.stem: list(own_samples("test", file)) for file in (out / "test").glob("*.jsonl")}
    asked = {sample.turns[0][0] for samples in held.values() for sample in samples}
    assert held.keys() >= {"gsm8k", "humaneval", "chat"}
    assert {row["id"].split("-")[0] for row in learned} == {"gsm8k", "code", "explain", "summary"}
    assert not asked & {row["question"] for row in learned}
    few = main(Options(data, tmp_path / "few", most=4)) / "train.jsonl"
    assert [json.loads(line) for line in few.read_text().splitlines()] == learned[:4]
    assert len({row["id"].split("-")[0] for row in learned[:4]}) == 4
    assert held["humaneval"][0].turns[0][0].endswith("```python\ndef f():\n    '''One.'''\n```")
    code = next(row for row in learned if "def shorten(" in row["question"])
    head = code["question"].partition("```python\n")[2].removesuffix("\n```")
    assert code["answer"].startswith(head)
    assert len(code["answer"]) > len(head)
