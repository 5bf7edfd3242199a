"""Accuracy, ROUGE-L and METEOR of plain answers."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from eval import draft_quality
from eval.draft_quality import is_right, judge, meteor
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError
from jaxspec.evaluation.config import EvalConfig, Variant
from tests import tiny

pytest.importorskip("rouge_score", reason="ROUGE and METEOR need the `quality` extra")


@pytest.mark.parametrize(
    ("accepted", "answer", "right"),
    [
        (("1999", "'99"), "It was in 1999.", True),
        (("1999",), "It was in 19990.", False),
        (("red ball",), "A Red, ball!", True),
        (("red ball",), "A ball that is red.", False),
        (("yes",), "Yes, there is no cup.", True),
        (("no",), "Yes, there is no cup.", False),
        (("no",), "No.", True),
        (("yes",), "A cup.", False),
        (("?",), "What?", False),
    ],
)
def test_accuracy(accepted: tuple[str, ...], answer: str, right: bool) -> None:
    assert is_right(accepted, answer) is right


def test_rouge_is_the_longest_common_subsequence() -> None:
    """By hand: 'the cat sat' and 'the cats slept', stems in common: the, cat; P = R = 2/3."""
    assert draft_quality.rouge_l(["the cat sat"], "the cats slept") == pytest.approx(2 / 3)
    assert draft_quality.rouge_l(["a dog", "the cat sat"], "the cat sat") == 1.0


@dataclass(frozen=True)
class Lemma:
    word: str

    def name(self) -> str:
        return self.word


class Lexicon:
    """WordNet's interface over one set of synonyms."""

    def synsets(self, word: str) -> list[Lexicon]:
        return [self] if word in ("big", "vast") else []

    def lemmas(self) -> list[Lemma]:
        return [Lemma("big"), Lemma("vast")]


def test_meteor_counts_synonyms() -> None:
    """Banerjee and Lavie 2005: F = 10PR / (R + 9P), less 0.5 (chunks / matches)^3 of it; all match in one chunk."""
    assert meteor(["a big cat"], "a vast cat", Lexicon()) == pytest.approx(1 - 0.5 * (1 / 3) ** 3)
    assert meteor(["a big cat"], "a small cat", Lexicon()) == pytest.approx(2 / 3 * 0.5)  # two chunks


def test_what_does_not_apply_is_none() -> None:
    blank = Sample("0", "mmspec", (), (("Q", ""),))
    assert set(judge(blank, "It.").values()) == {None}
    long = Sample("0", "llava-bench", (), (("Q", "It is red."),))
    assert judge(long, "It is red.")["accuracy"] is None
    assert judge(long, "It is red.")["rouge_l"] == 1.0
    number = Sample("0", "gsm8k", (), (("Q", "1+1 is 2\n#### 2"),), accepted=("2",))
    assert judge(number, "The answer is 2.")["accuracy"] == 1.0


def test_a_missing_package_is_told_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    draft_quality.rouge_scorer.cache_clear()
    config = EvalConfig(target="target", draft="draft", rows=(Variant("T", ("T",)),), sets=("facts",))
    with pytest.raises(InputError, match=r"rouge-score is not installed; pip install 'jaxspec\[quality\]'"):
        draft_quality.measure_quality(config, {})


def test_the_script_writes_both_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny.save_pair(tmp_path / "pair")
    preset = EvalConfig(
        target=str(target),
        draft=str(draft),
        rows=(Variant("T", ("T",)),),
        sets=("facts", "describe"),
        max_new_tokens=8,
        prompt_buckets=(384,),
        image_buckets=(1,),
    )
    monkeypatch.setattr("jaxspec.evaluation.config.load_preset", lambda kind, name: preset)
    draft_quality.main(f"tiny --out {tmp_path / 'out'} --limit 2".split())
    rows = json.loads((tmp_path / "out/results.json").read_text())["rows"]
    assert [(row["dataset"], row["model"]) for row in rows] == [
        (dataset, model) for dataset in ("facts", "describe") for model in ("target", "draft")
    ]
    assert rows[0]["accuracy"] is not None
    assert rows[2]["accuracy"] is None
    assert all(0 <= row["rouge_l"] <= 1 and row["samples"] == 2 for row in rows)
    assert "rouge_l" in capsys.readouterr().out
    assert "accuracy" in (tmp_path / "out/table.md").read_text()
