"""Second turns for sets that have none: the kinds of TABED's two-turn runs, under picturebook's names.

`question` is the next sample's own, with its images; `caption`, `summary` and `story` are requests about the first
turn; `fact` and `sum` bring a question of NQ and of GSM8K. Where TABED's wording is not printed in the paper, it is
this project's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxspec.data.picturebook import FOLLOW_UPS
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, nearest

REQUESTS = {
    "caption": "Write a detailed caption for {what}.",
    "summary": "Sum up your previous answer.",
    "story": "Write a long story for children that is built on what you have answered so far.",
}
SOURCES = {"fact": "nq", "sum": "gsm8k"}
"""Kinds that ask a question of another set: kind -> its name in the registry."""

BORROWED = {
    "fact": "{question}? Explain at length, with the reasons and the background.",
    "sum": "{question} Explain the solution in detail, step by step.",
}


def add_follow_ups(
    samples: Sequence[Sample], kinds: Sequence[str], borrowed: Mapping[str, Sequence[Sample]]
) -> list[Sample]:
    """The samples with a second turn: sample i gets kind i modulo their number.

    Args:
      kinds: names among `FOLLOW_UPS`. Samples without images pass over `caption`.
      borrowed: samples of the sets in `SOURCES` by kind; sample i asks question i modulo their number.
    """
    if unknown := [kind for kind in kinds if kind not in FOLLOW_UPS]:
        raise InputError(f"follow-ups: unknown kind {unknown[0]!r}; {nearest(unknown[0], tuple(FOLLOW_UPS))}")
    out = []
    for i, sample in enumerate(samples):
        possible = [kind for kind in kinds if kind != "caption" or sample.images]
        if not possible:
            raise InputError(f"follow-ups: {sample.dataset} has no images to caption; use another kind than caption")
        kind = possible[i % len(possible)]
        if kind == "question":
            following = samples[(i + 1) % len(samples)]
            sample = replace(sample, images=(*sample.images, *following.images))
            turn = following.turns[0]
        elif kind in BORROWED:
            asked, reference = borrowed[kind][i % len(borrowed[kind])].turns[0]
            turn = (BORROWED[kind].format(question=_sentence(asked) if kind == "fact" else asked), reference)
        else:
            what = "this image" if len(sample.images) == 1 else f"these {len(sample.images)} images"
            turn = (REQUESTS[kind].format(what=what), "")
        out.append(replace(sample, turns=(*sample.turns, turn)))
    return out


def _sentence(question: str) -> str:
    """NQ's questions are lower case and without a question mark; the template adds that."""
    return question.rstrip(" ?").capitalize()
