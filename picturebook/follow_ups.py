"""Write second turns: another question, a caption, a summary, a story, a fact, a sum.

Each function takes the first sample and returns it with one more turn. Question, caption and story
are about a page of the first turn; after a first turn without pages (facts, sums) they bring a new
page of their own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from picturebook.dialogues import chart_turn, reason_turn
from picturebook.knowledge import fact_turn, sum_turn
from picturebook.phrases import (
    NAMES,
    NOUNS,
    ORDINALS,
    an,
    at,
    bar_at,
    cap,
    caption,
    full,
    join,
    listing,
    rest,
)
from picturebook.rendering import render
from picturebook.samples import IMAGE, Sample
from picturebook.scenes import Chart, Scene, below, pick, sample_scene
from picturebook.sequences import story as tell

PROPER = (*NAMES, "I", "January", "December", "Tuesday", "Saturday")
"""First words of sentences that keep their capital in the middle of another one."""

OPENINGS = (
    "What a", "With pleasure", "Good question", "Here are", "The instruction is", "To get",
    "I found", "The two",
)  # fmt: skip
"""How first sentences begin that say nothing worth keeping."""
SUMMARIES = (
    ("Sum up your answer in short.", "In short,"),
    ("Say that again in fewer words.", "In other words,"),
    ("What is the main point of your answer?", "The main point is this:"),
)
"""How a summary is asked for, and how it begins."""


def _with_page(rng: np.random.Generator, sample: Sample) -> tuple[Sample, str]:
    """Return the sample with a page, and the text to put in front of the next question."""
    if sample.scenes:
        return sample, ""
    scene = sample_scene(rng, count=2 + below(rng, 3))
    return replace(sample, images=(render(scene, rng),), scenes=(scene,)), f"{IMAGE}\n"


def _add(sample: Sample, question: str, answer: str) -> Sample:
    return replace(sample, turns=(*sample.turns, (cap(question), answer)))


def _which(rng: np.random.Generator, sample: Sample, noun: str) -> tuple[int, str]:
    """Choose a page of the sample, and name it: 'the picture', 'the third picture'."""
    if len(sample.scenes) == 1:
        return 0, f"the {noun}"
    i = below(rng, len(sample.scenes))
    return i, f"the {ORDINALS[i]} {noun}"


def question(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask another question about the page; with several pages, what is in a cell of one of them."""
    sample, lead = _with_page(rng, sample)
    if len(sample.scenes) == 1:
        page = sample.scenes[0]
        text, answer = chart_turn(rng, page) if isinstance(page, Chart) else reason_turn(rng, page)
        return _add(sample, lead + text, answer)
    i, name = _which(rng, sample, "picture")
    scene = sample.scenes[i]
    assert isinstance(scene, Scene)
    cell, thing = pick(rng, scene.things)
    remainder = rest(scene, cell)
    more = f"{name} also has {listing(remainder)}." if remainder else f"{name} has nothing else."
    answer = join(f"{an(full(thing))} is {at(cell)} of {name}.", more)
    return _add(sample, f"What is {at(cell)} of {name}?", answer)


def caption_it(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask for a caption of one page."""
    sample, lead = _with_page(rng, sample)
    i, name = _which(rng, sample, pick(rng, NOUNS))
    request, opening = pick(
        rng,
        (
            (f"Write a caption for {name}.", ""),
            (f"Which caption would suit {name}?", "A good caption is: "),
        ),
    )
    text = caption(sample.scenes[i])
    return _add(sample, lead + request, (opening + text if opening else cap(text)) + ".")


def summary(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask for the previous answer in short: its first telling sentence, or its last."""
    sentences = sample.turns[-1][1].replace("! ", ". ").rstrip(".").split(". ")
    if sentences[0].startswith(OPENINGS):
        sentences = sentences[1:]
    gist = sentences[-1:] if sample.dataset == "sums" else sentences[:1]
    if len(sample.images) == 5:
        gist = [sentences[0], sentences[-1]]
    request, opening = pick(rng, SUMMARIES)
    first = gist[0].removeprefix("First, ")
    if first.split(" ")[0] not in PROPER:
        first = first[0].lower() + first[1:]
    return _add(sample, request, ". ".join([f"{opening} {first}", *gist[1:]]) + ".")


def story(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask for a short story about one page, with a name in the question."""
    sample, lead = _with_page(rng, sample)
    name = pick(rng, NAMES)
    i, which = _which(rng, sample, pick(rng, NOUNS))
    page = sample.scenes[i]
    if isinstance(page, Chart):
        steps = [
            f"{word}, {name} climbed the {colour} bar {bar_at(bar)} and counted to {height}."
            for bar, (word, (colour, height)) in enumerate(
                zip(("First", "Then", "In the end"), page.bars, strict=True)
            )
        ]
        answer = join(f"{name} went for a walk on {an(page.background)} page.", *steps)
    else:
        answer = tell(name, page)
    return _add(sample, f"{lead}Tell a short story about {name} and {which}.", answer)


def fact(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask a question about the plain world."""
    return _add(sample, *fact_turn(rng))


def sum_up(rng: np.random.Generator, sample: Sample) -> Sample:
    """Ask for a small sum."""
    return _add(sample, *sum_turn(rng))


FOLLOW_UPS = {
    "question": question,
    "caption": caption_it,
    "summary": summary,
    "story": story,
    "fact": fact,
    "sum": sum_up,
}
"""name -> (rng, first sample) -> the sample with a second turn. Test sets go through them in this
order."""
