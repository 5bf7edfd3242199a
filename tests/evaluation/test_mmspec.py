"""MMSpec's prompts are read from its files, and answers to them are summed up or refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from eval.lib.questions import mmspec_files
from eval.lib.questions.mmspec_files import Turn, summary_csv, summary_rows
from eval.lib.questions.sets import evaluation_set, read_prompts
from eval.lib.standins.replay import answers_of
from jaxspec.data.rows import local_rows
from jaxspec.errors import InputError

PROMPT = {
    "id": "m_1",
    "image": "a.jpg",
    "turns": ["What?", "Why?"],
    "category": "Games",
    "topic": "multi-turn",
}

TEN = (9,) * 10


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (5, 5)).save(tmp_path / "images/a.jpg")
    rows = [PROMPT, PROMPT | {"id": "m_2", "turns": ["Who?"], "topic": "general"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "prompts.jsonl"


def test_prompts(prompts: Path) -> None:
    first, second = read_prompts(prompts)
    assert first.id == "m_1"
    assert [asked for asked, _ in first.turns] == ["<image>\nWhat?", "Why?"]
    assert dict(first.labels) == {"topic": "multi-turn", "category": "Games"}
    assert len(first.images) == 1
    assert [s.id for s in evaluation_set("mmspec", turns=2, data={"mmspec": prompts})] == ["m_1"]
    assert len(evaluation_set("mmspec", data={"mmspec": prompts})) == 2
    assert second.turns[0][0] == "<image>\nWho?"


def test_summary(prompts: Path) -> None:
    one, two = read_prompts(prompts)
    answers = {
        "baseline": [(one, [Turn("", TEN, 9, None, 1.0)]), (two, [Turn("", TEN, 9, None, 1.0)])],
        "M": [(one, [Turn("", TEN, 4, 5, 0.5)]), (two, [Turn("", TEN, 6, 3, 0.25)])],
    }
    rows = list(csv.DictReader(io.StringIO(summary_csv(summary_rows(answers)))))
    assert tuple(rows[0]) == mmspec_files.SUMMARY
    assert [(row["method"], row["group"]) for row in rows[:2]] == [
        ("baseline", "ALL"),
        ("baseline", "multi-turn"),
    ]
    every = next(row for row in rows if (row["method"], row["group"]) == ("M", "ALL"))
    assert [float(every[k]) for k in ("MAT", "draft_accept_mean", "speedup_paired")] == [
        2.0,
        0.8,
        3.0,
    ]
    assert float(every["speedup_global"]) == pytest.approx(20 / 0.75 / 10)
    base = rows[0]
    assert [float(base[k]) for k in ("MAT", "speedup_paired", "speedup_global")] == [1.0, 1.0, 1.0]
    assert (base["draft_accept_mean"], base["total_draft_time"]) == ("", "")


@pytest.mark.parametrize("choices", [None, [{"turns": ["a"], "new_tokens": [1, 2]}]])
def test_bad_answers(choices: object, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps({"question_id": "m_1", "choices": choices}))
    with pytest.raises(InputError, match="line 1: 'choices' holds no list"):
        answers_of(next(local_rows(path)))
