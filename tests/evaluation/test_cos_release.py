"""CoS's questions are read from a clone of its released code, here a made-up one with the same
files.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from configs.eval import cos
from eval import collaborative
from eval.lib.drafts.published import papers_of
from eval.lib.questions.cos_release import released_samples
from eval.lib.questions.quality import quality
from jaxspec.errors import InputError

SHOT = (
    "Question: 1 + 1?\nAnswer: Let's think.\n2\n#### 2\n\n"
    "Question: {{question}}\nAnswer: Let's think."
)
FILES = {
    "gsm8k/prompt_fewshot.txt": SHOT,
    "cnndm/prompt_fewshot.txt": "Article: A.\n\nHighlights: B.\n\n"
    "Article: {{article}}\n\nHighlights: \n",
    "mmlu/prompt_fewshot.txt": "Q: {{question}}\nChoices: \n{{choices_str}}\nA: ",
    "mmlu/mmlu-cot-claude-single.json": json.dumps({"law": "On law.\n\nQ: Why?\nA: C.", "art": ""}),
}
ROWS = {
    "gsm8k": [{"question": f"{n} + {n}?", "answer": f"It is.\n#### {2 * n}"} for n in range(30)],
    "cnn-dm": [{"article": "Rain {{fell}}.", "highlights": "Rain."}],
    "mmlu": [
        {
            "question": "Who?",
            "choices": ["<I>", "we", "you", "they"],
            "answer": 1,
            "subject": subject,
        }
        for subject in ("law", "law", "art")
    ],
    "humaneval": [
        {
            "prompt": "def f():\n",
            "canonical_solution": "    pass",
            "test": "def check(f): pass",
            "entry_point": "f",
        }
    ],
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / "clone" / "src" / "mydatasets" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for name, rows in ROWS.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path / "clone"


def test_prompts_are_the_clones_in_its_order(clone: Path, tmp_path: Path) -> None:
    asked = {
        name: [s.turns[0][0] for s in released_samples(name, clone, tmp_path / f"{name}.jsonl")]
        for name in ROWS
    }
    order = np.random.default_rng(42).permutation(30)
    assert asked["gsm8k"] == [SHOT.replace("{{question}}", f"{n} + {n}?") for n in order]
    # Jinja drops a file's last line end; what it fills in is not a template.
    assert asked["cnn-dm"] == [
        "Article: A.\n\nHighlights: B.\n\nArticle: Rain {{fell}}.\n\nHighlights: "
    ]
    choices = "Q: Who?\nChoices: \n(A) <I>\n(B) we\n(C) you\n(D) they\nA: "
    law = f"On law.\n\nQ: Why?\nA: C.\n\n{choices}"
    expected = [law, law, f"\n\n{choices}"]  # in the file's order, subjects do not take turns
    assert asked["mmlu"] == [expected[i] for i in np.random.default_rng(42).permutation(3)]
    assert asked["humaneval"] == ["def f():\n"]


def test_answers_end_where_the_model_asks_a_question_itself(clone: Path, tmp_path: Path) -> None:
    (first, *_) = released_samples("gsm8k", clone, tmp_path / "gsm8k.jsonl")
    right = first.turns[0][1].rpartition("#### ")[2]
    assert quality(first, f"So it is {right}.\n\nQuestion: 7 + 7?\nAnswer: 14\n#### 14") == 1
    (law, *_) = released_samples("mmlu", clone, tmp_path / "mmlu.jsonl")
    assert quality(law, "The answer is B.\n\nQ: Again?\nA: The answer is C.") == 1


def test_the_preset_asks_all_models_in_raw_text(clone: Path, tmp_path: Path) -> None:
    data = tuple(f"{name}={tmp_path / f'{name}.jsonl'}" for name in ROWS)
    released = replace(cos.config, data=data, released=clone)
    assert len(released.samples("gsm8k", 4)) == 4
    chats = [pairing for pairing in cos.config.pairings if pairing.chat_template]
    assert chats
    for pairing in chats:
        assert cos.config.in_chat_form(pairing)
        assert not released.in_chat_form(pairing)
    assert papers_of(released, released.published)  # the paper's lines show in both forms
    assert papers_of(cos.config, cos.config.published)


def test_what_the_clone_lacks_is_named(clone: Path, tmp_path: Path) -> None:
    (clone / "src/mydatasets/gsm8k/prompt_fewshot.txt").unlink()
    with pytest.raises(InputError, match=r"gsm8k/prompt_fewshot.txt: cannot be read.*Kamichanw/Co"):
        next(released_samples("gsm8k", clone, tmp_path / "gsm8k.jsonl"))
    with pytest.raises(InputError, match="CoS does not ask pope; its sets are humaneval, gsm8k"):
        next(released_samples("pope", clone))
    # before any model is read
    with pytest.raises(InputError, match=r"released .*/gsm8k/prompt_fewshot.txt: cannot be read"):
        collaborative.main(["cos", "--released", str(clone), "--out", str(tmp_path / "out")])
