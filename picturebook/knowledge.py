"""Ask without pages: plain facts (a closed list) and small sums, worked step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from picturebook.phrases import NAMES, cap, plural
from picturebook.samples import Sample
from picturebook.scenes import KINDS, below, other, pick

_LINES = Path(__file__).with_name("facts.txt").read_text(encoding="utf-8").splitlines()
FACTS = tuple(zip(_LINES[::2], _LINES[1::2], strict=True))
"""(question in small letters, answer: what was asked, then one sentence of background)."""


WAYS = (
    ("", ""),
    ("Here is a question: ", "Here is the answer: "),
    ("Please tell me, ", "With pleasure. "),
    ("I want to know, ", "Good question. "),
)
"""What comes before a question about a fact, and before its answer."""
STEPS = (
    ("", ""),
    (" Work step by step.", "Step by step: "),
    (" Explain your steps.", "Here are the steps. "),
)
"""What comes after a question for a sum, and before its answer."""


def fact_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Ask for a fact in one of four ways, each with its way of answering."""
    question, answer = pick(rng, FACTS)
    before, reply = pick(rng, WAYS)
    return cap(before + question), reply + answer


PLURALS = tuple(plural(kind) for kind in KINDS if kind not in ("fish", "moon"))


def sum_turn(rng: np.random.Generator) -> tuple[str, str]:
    """Pose a word problem of one or two steps, with numbers up to 50; the answer works it out."""
    name = pick(rng, NAMES)
    friend, what = other(rng, NAMES, name), pick(rng, PLURALS)
    steps, lead = pick(rng, STEPS)
    form = below(rng, 6)
    if form == 0:
        a, b = 2 + below(rng, 29), 2 + below(rng, 19)
        story, ask = f"{a} {what} and finds {b} more", f"does {name} have now"
        total = a + b
        work = f"{name} starts with {a} {what} and gets {b} more. {a} + {b} = {total}"
    elif form == 1:
        a = 10 + below(rng, 41)
        b = 1 + below(rng, a - 1)
        story, ask = f"{a} {what} and gives {b} of them to {friend}", "are left"
        total = a - b
        work = f"{name} starts with {a} {what} and gives {b} away. {a} - {b} = {total}"
    elif form == 2:
        a, b = 2 + below(rng, 6), 2 + below(rng, 6)
        story, ask = f"{a} bags with {b} {what} in each", f"does {name} have"
        total = a * b
        work = f"There are {a} bags with {b} {what} each. {a} x {b} = {total}"
    elif form == 3:
        a, b = 2 + below(rng, 19), 2 + below(rng, 14)
        c = 1 + below(rng, a + b - 1)
        story, ask = f"{a} {what}, finds {b} more and loses {c}", f"does {name} have now"
        total = a + b - c
        work = f"First, {a} + {b} = {a + b}. Then {a + b} - {c} = {total}"
    elif form == 4:
        a, b, c = 2 + below(rng, 4), 2 + below(rng, 5), 1 + below(rng, 20)
        story, ask = f"{a} bags with {b} {what} in each and {c} more in a box", "are there"
        total = a * b + c
        work = f"First, {a} x {b} = {a * b}. Then {a * b} + {c} = {total}"
    else:
        a, b = 2 + below(rng, 19), 1 + below(rng, 10)
        story, ask = f"{a} {what} and {friend} has {b} more", "do they have together"
        total = a + a + b
        work = f"First, {friend} has {a} + {b} = {a + b}. Then {a} + {a + b} = {total}"
    question = f"{name} has {story}. How many {what} {ask}?"
    return question + steps, f"{lead}{work}. The answer is {total}."


def facts(rng: np.random.Generator) -> Sample:
    """Stand for NQ: a question about the plain world, its answer and a sentence of background."""
    return Sample("facts", "facts", (), (fact_turn(rng),))


def sums(rng: np.random.Generator) -> Sample:
    """Stand for GSM8K."""
    return Sample("sums", "sums", (), (sum_turn(rng),))
