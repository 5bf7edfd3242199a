"""Join a dialogue with its pages, and make probes: questions whose answer can be judged right or
wrong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxspec.data import samples
from picturebook.rendering import render
from picturebook.scenes import (
    BACKGROUNDS,
    COLOURS,
    KINDS,
    MAX_HEIGHT,
    PLACES,
    SIGN,
    SIZES,
    WORDS,
    Chart,
    Scene,
)

IMAGE = "<image>"
COUNT_WORDS = ("no", "one", "two", "three", "four")

VALUES = {
    "what": (*KINDS, SIGN, "nothing"),
    "where": PLACES,
    "colour": COLOURS,
    "count": COUNT_WORDS,
    "sign": tuple(word.lower() for word in WORDS),
    "size": SIZES,
    "background": BACKGROUNDS,
    "height": tuple(str(height) for height in range(1, MAX_HEIGHT + 1)),
}
"""All the values an attribute can take: what an answer may say rightly or wrongly."""

PROBE_KINDS = ("what", "where", "colour", "count", "sign")
"""The attributes that accuracy is reported on; the others of `VALUES` are trained and not
reported."""

_COUNT_SPELLINGS = {"none": "no", "zero": "no"} | {
    str(count): word for count, word in enumerate(COUNT_WORDS)
}


def mentioned(kind: str, text: str) -> frozenset[str]:
    """Return the values of attribute `kind` that occur in `text`, as whole words in any case.

    Plurals count ("boxes" mentions "box"); for counts, digits and "none" and "zero" count as the
    words of `COUNT_WORDS`.
    """
    text = text.lower()
    if kind == "count":
        text = re.sub(r"\w+", lambda match: _COUNT_SPELLINGS.get(match[0], match[0]), text)
    return frozenset(match[1] for match in _pattern(kind).finditer(text))


@cache
def _pattern(kind: str) -> re.Pattern[str]:
    plural = "(?:s|es)?" if kind == "what" else ""
    return re.compile(rf"\b({'|'.join(VALUES[kind])}){plural}\b")


@dataclass(frozen=True)
class Probe:
    """Hold the right value of an attribute question, and the values that would be wrong."""

    kind: str
    expected: str
    alternatives: tuple[str, ...]

    @classmethod
    def of(cls, kind: str, expected: str, reference: str) -> Probe:
        """Return a question's probe: values that its reference answer does not name are wrong."""
        right = {expected, *mentioned(kind, reference)}
        return cls(kind, expected, tuple(value for value in VALUES[kind] if value not in right))

    def correct(self, answer: str) -> bool:
        """Return whether `answer` says the expected value and no wrong one.

        Said means: occurs in the sense of `mentioned`. A value of the same attribute that the
        reference answer itself mentions besides the expected one is neither asked for nor held
        against the answer. Words about other attributes are not judged.
        """
        values = mentioned(self.kind, answer)
        return self.expected in values and not values.intersection(self.alternatives)


@dataclass(frozen=True)
class Sample(samples.Sample):
    """Hold a conversation about pages (uint8 [48, 48, 3] each).

    `scenes` are what the images show, one each. `probes` judge the answers of an attribute
    conversation, one a turn; other samples have none.
    """

    probes: tuple[Probe, ...] = ()
    scenes: tuple[Scene | Chart, ...] = ()


def drawn(
    name: str,
    rng: np.random.Generator,
    pages: Sequence[Scene | Chart],
    turns: Sequence[tuple[str, str]],
    probes: tuple[Probe, ...] = (),
) -> Sample:
    """Return the sample of pages, which are drawn here; the first question has their marks."""
    images = tuple(render(page, rng) for page in pages)
    return Sample(name, name, images, tuple(turns), probes, tuple(pages))
