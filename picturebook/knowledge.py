"""Ask without pages: plain facts (a closed list) and small sums, worked step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from picturebook.phrases import NAMES, plural
from picturebook.samples import Sample
from picturebook.scenes import KINDS, below, other, pick

_LINES = Path(__file__).with_name("facts.txt").read_text(encoding="utf-8").splitlines()
FACTS = tuple(zip(_LINES[::2], _LINES[1::2], strict=True))
"""(question in small letters, answer: what was asked, then one sentence of background)."""


def fact_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Ask for a fact in one of four ways, each with its way of answering."""
    question, answer = pick(rng, FACTS)
    way = below(rng, 4)
    if way == 0:
        return question[0].upper() + question[1:], answer
    if way == 1:
        return f"Here is a question: {question}", f"Here is the answer: {answer}"
    if way == 2:
        return f"Please tell me, {question}", f"With pleasure. {answer}"
    return f"I want to know, {question}", f"Good question. {answer}"


PLURALS = tuple(plural(kind) for kind in KINDS if kind not in ("fish", "moon"))


def sum_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Pose a word problem of one or two steps, with numbers up to 50; the answer works it out."""
    name = pick(rng, NAMES)
    friend, what = other(rng, NAMES, name), pick(rng, PLURALS)
    steps, lead = pick(
        rng,
        (
            ("", ""),
            (" Work step by step.", "Step by step: "),
            (" Explain your steps.", "Here are the steps. "),
        ),
    )
    form = below(rng, 6)
    if form == 0:
        a, b = 2 + below(rng, 29), 2 + below(rng, 19)
        question = (
            f"{name} has {a} {what} and finds {b} more. How many {what} does {name} have now?"
        )
        begin = f"{name} starts with {a} {what} and gets {b} more"
        work = f"{begin}. {a} + {b} = {a + b}. The answer is {a + b}."
    elif form == 1:
        a = 10 + below(rng, 41)
        b = 1 + below(rng, a - 1)
        question = (
            f"{name} has {a} {what} and gives {b} of them to {friend}. How many {what} are left?"
        )
        begin = f"{name} starts with {a} {what} and gives {b} away"
        work = f"{begin}. {a} - {b} = {a - b}. The answer is {a - b}."
    elif form == 2:
        a, b = 2 + below(rng, 6), 2 + below(rng, 6)
        question = f"{name} has {a} bags with {b} {what} in each. How many {what} does {name} have?"
        work = (
            f"There are {a} bags with {b} {what} each. {a} x {b} = {a * b}. The answer is {a * b}."
        )
    elif form == 3:
        a, b = 2 + below(rng, 19), 2 + below(rng, 14)
        c = 1 + below(rng, a + b - 1)
        begin = f"{name} has {a} {what}, finds {b} more and loses {c}"
        question = f"{begin}. How many {what} does {name} have now?"
        d = a + b - c
        work = f"First, {a} + {b} = {a + b}. Then {a + b} - {c} = {d}. The answer is {d}."
    elif form == 4:
        a, b, c = 2 + below(rng, 4), 2 + below(rng, 5), 1 + below(rng, 20)
        begin = f"{name} has {a} bags with {b} {what} in each and {c} more in a box"
        question = f"{begin}. How many {what} are there?"
        total = a * b + c
        work = f"First, {a} x {b} = {a * b}. Then {a * b} + {c} = {total}. The answer is {total}."
    else:
        a, b = 2 + below(rng, 19), 1 + below(rng, 10)
        begin = f"{name} has {a} {what} and {friend} has {b} more"
        question = f"{begin}. How many {what} do they have together?"
        c = a + b
        work = (
            f"First, {friend} has {a} + {b} = {c}. Then {a} + {c} = {a + c}. The answer is {a + c}."
        )
    return question + steps, lead + work


def facts(rng: np.random.Generator) -> Sample:
    """Stand for NQ: a question about the plain world, its answer and a sentence of background."""
    return Sample("facts", "facts", (), (fact_turn(rng),))


def sums(rng: np.random.Generator) -> Sample:
    """Stand for GSM8K."""
    return Sample("sums", "sums", (), (sum_turn(rng),))
