"""Score an answer: accuracy, ROUGE-L, METEOR, or whether a program passes its tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from eval.lib.questions.run_code import passes
from jaxspec.data.benchmarks import BENCHMARKS
from jaxspec.data.samples import Sample
from jaxspec.errors import needing

SHORT = {
    name for sets in BENCHMARKS.values() if sets.short for name in (sets.name, sets.synthetic)
} - {None}
"""Sets whose answers are right or wrong, and picturebook's sets that stand for them."""
MEASURES = {"humaneval": "pass@1", "humaneval-chat": "pass@1", "cnn-dm": "ROUGE-L"}
"""What sets are judged by, where that is not accuracy."""

METRICS = ("accuracy", "pass@1", "rouge_l", "meteor")
"""IbED's measures of answers, and pass@1."""
EXAMPLES = "\nQuestion:", "\n\nQ:", "\n\nArticle:"
"""Beginnings of the questions after worked examples."""
_OUTSIDE = r"[^\s#)\]}]"
"""First character of a line outside a function."""


def quality(sample: Sample, answer: str, run_code: bool = False) -> float | None:
    """Return CoS's measure of an answer to the sample's set; None if it cannot be judged.

    Args:
      run_code: Run the answers to HumanEval; without it they are not judged.
    """
    # After worked examples models continue with a question of their own.
    for mark in EXAMPLES:
        if mark in sample.turns[0][0]:
            answer = answer.partition(mark)[0]
    measure = MEASURES.get(sample.dataset)
    if measure == "pass@1":
        return float(passes_tests(sample, answer)) if run_code else None
    return rouge_l(references(sample), answer) if measure else accuracy(sample, answer)


def judge(sample: Sample, answer: str, run_code: bool = False) -> dict[str, float | None]:
    """Return the measures of an answer to a sample's first question; None if they do not apply."""
    answers = references(sample)
    scores: dict[str, float | None] = dict.fromkeys(METRICS)
    if MEASURES.get(sample.dataset) == "pass@1":
        scores["pass@1"] = quality(sample, answer, run_code)
    elif answers:
        scores["accuracy"] = accuracy(sample, answer)
        scores |= {"rouge_l": rouge_l(answers, answer), "meteor": meteor(answers, answer)}
    return scores


def accuracy(sample: Sample, answer: str) -> float | None:
    """Return 1 for a right answer and 0 for a wrong one; None for sets without short answers.

    GSM8K's answers count by their final number, multiple choice by its letter or words, and others
    by `is_right`.
    """
    accepted = references(sample)
    if sample.dataset not in SHORT or not accepted:
        return None
    benchmark = BENCHMARKS.get(sample.dataset)
    if benchmark and benchmark.final:
        return float(final_number(answer) == final_number(accepted[0]))
    letter = chosen_letter(answer) if benchmark and benchmark.options else None
    return float(letter == sample.turns[0][1][0] if letter else is_right(accepted, answer))


def references(sample: Sample) -> tuple[str, ...]:
    """Return the set's answers to the sample's first question: short ones, or its reference."""
    return sample.accepted or tuple(filter(None, [sample.turns[0][1]]))


def final_number(text: str) -> str | None:
    """Return GSM8K's answer: the number after the last ####, else the last number."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    return re.sub(r",|\.0*$", "", numbers[-1]) if numbers else None


def chosen_letter(text: str) -> str | None:
    """Return the letter that a text chooses: after its last "answer", else at its beginning."""
    letters = re.findall(r"(?i:answer)(?i: is)?[^\w']*([A-J])(?![\w'])", text)
    opening = re.match(r"\W*([A-J])(?:[.):,]|\s*$|\s*\n)", text)
    return letters[-1] if letters else opening and opening[1]


def is_right(accepted: Sequence[str], answer: str) -> bool:
    """Return whether the answer holds an accepted one, as whole words in any case and punctuation.

    If yes or no is accepted, the first of these two words in the answer decides.
    """
    text = f" {_words(answer)} "
    right = [_words(reference) for reference in accepted]
    if {"yes", "no"} & set(right):
        first = re.search(r" (yes|no)(?= )", text)
        return first is not None and first[1] in right
    return any(f" {reference} " in text for reference in right if reference)


def passes_tests(sample: Sample, answer: str) -> bool:
    """Return whether an answer to HumanEval passes the tests in the sample's `labels`.

    The answer is the rest of the question's function, or the whole function. Prose around it and
    fences are left out.
    """
    labels = dict(sample.labels)
    fenced = re.search(r"(?s)```(?:\n?[Pp]ython)?[ ]*\n(.*?)(?:```|\Z)", answer)
    code = fenced[1] if fenced else answer
    whole = re.search(
        rf"(?ms)^def {re.escape(labels['entry_point'])}\b.*?(?=\n{_OUTSIDE}|\Z)", code
    )
    if whole:
        body = code if fenced else whole[0]
    else:
        indented, *after = re.split(rf"\n(?={_OUTSIDE})", "\n" + code.lstrip("\n"))
        # A decoder may cut the first spaces.
        body = indented if indented.strip() else f"    {''.join(after[:1])}"
    return passes(
        f"{labels['prompt']}\n{body}\n\n{labels['test']}\n\ncheck({labels['entry_point']})\n"
    )


def rouge_l(references: Sequence[str], answer: str) -> float:
    """Return ROUGE-L's F-measure with Porter stems, the best over the references."""
    return float(rouge_scorer().score_multi(references, answer)["rougeL"].fmeasure)


@cache
def rouge_scorer() -> Any:
    """Return rouge-score's scorer; InputError if the package is not installed."""
    with needing("quality: ROUGE", "quality"):
        from rouge_score.rouge_scorer import RougeScorer
    return RougeScorer(["rougeL"], use_stemmer=True)


def meteor(references: Sequence[str], answer: str) -> float | None:
    """Return nltk's METEOR, the best over the references; None without WordNet's files.

    nltk looks synonyms up by stem, so words whose stem is no word have no synonyms.
    """
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    try:
        wordnet.ensure_loaded()
    except LookupError:
        return None
    return float(
        meteor_score([_words(text).split() for text in references], _words(answer).split())
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"[\w']+", text.lower()))
