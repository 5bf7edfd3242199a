"""Make the synthetic sets, the fixed test split, and the endless train split.

Streams: every sample comes from its own generator, seeded by (split, numbers). Train and test never
share a generator; that the same scene is drawn in both is possible and not excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from jaxspec.errors import InputError, nearest
from picturebook import dialogues, knowledge, sequences
from picturebook.attributes import attributes, interview, probe_sample
from picturebook.follow_ups import FOLLOW_UPS
from picturebook.samples import PROBE_KINDS, Sample
from picturebook.scenes import pick

TEST_STREAM, PROBE_STREAM, TRAIN_STREAM = 7001, 7002, 7003


@dataclass(frozen=True)
class SyntheticSet:
    """Describe a set: its dialogues, the papers' sets that it replaces, its number of images."""

    name: str
    stands_for: tuple[str, ...]
    images: int
    sample: Callable[[np.random.Generator], Sample]


SYNTHETIC_SETS = {
    entry.name: entry
    for entry in (
        SyntheticSet("describe", ("LLaVA-Bench", "COCO captions"), 1, dialogues.describe),
        SyntheticSet("read", ("DocVQA", "TextVQA", "OCRBench", "TextCaps"), 1, dialogues.read),
        SyntheticSet("exist", ("POPE", "HallusionBench"), 1, dialogues.exist),
        SyntheticSet("reason", ("MM-Vet", "VQAv2", "ScienceQA"), 1, dialogues.reason),
        SyntheticSet("chart", ("ChartQA",), 1, dialogues.chart),
        SyntheticSet("edit", ("IEdit",), 2, sequences.edit_pair),
        SyntheticSet("brush", ("MagicBrush",), 2, sequences.brush),
        SyntheticSet("spot", ("Spot-the-Difference",), 2, sequences.spot),
        SyntheticSet("saga", ("PororoSV",), 5, sequences.saga),
        SyntheticSet("album", ("VIST",), 5, sequences.album),
        SyntheticSet("facts", ("NQ",), 0, knowledge.facts),
        SyntheticSet("sums", ("GSM8K",), 0, knowledge.sums),
    )
}

MIXTURE = {
    "attributes": 0.45,
    "describe": 0.15,
    "read": 0.05,
    "exist": 0.05,
    "reason": 0.06,
    "chart": 0.05,
    "edit": 0.03,
    "brush": 0.03,
    "spot": 0.03,
    "saga": 0.02,
    "album": 0.02,
    "facts": 0.03,
    "sums": 0.03,
}
"""Share of each kind among training samples. 'attributes' is for training only: short questions, no
set."""

MAKERS = {name: entry.sample for name, entry in SYNTHETIC_SETS.items()} | {
    "attributes": attributes,
    "interview": interview,
    "caption": dialogues.captioned,
}
"""All kinds of training samples. In no mixture: 'interview', long 'attributes', for targets that
train on few rows; and 'caption', for captioners."""

FOLLOW_UP_SHARE = 0.35
"""Share of training samples of these sets that get a second turn."""


def test_set(
    name: str, n: int = 100, turns: int = 1, kinds: Sequence[str] = tuple(FOLLOW_UPS)
) -> list[Sample]:
    """Return the first `n` test samples of a synthetic set, the same on every machine.

    With `turns=2`, sample i gets the follow-up i modulo their number of `kinds`, names of
    `FOLLOW_UPS`; its first turn and pages are those of `turns=1`. Raises InputError for an unknown
    set or kind, or a number of turns other than 1 and 2.
    """
    _check_known("set", name, SYNTHETIC_SETS)
    if turns not in (1, 2):
        raise InputError(f"picturebook: turns={turns} for test set {name!r}; use 1 or 2")
    for kind in kinds:
        _check_known("follow-up", kind, FOLLOW_UPS)
    stream, samples = list(SYNTHETIC_SETS).index(name), []
    for i in range(n):
        sample = SYNTHETIC_SETS[name].sample(np.random.default_rng((TEST_STREAM, stream, i, 1)))
        if turns == 2:
            follow_up = FOLLOW_UPS[kinds[i % len(kinds)]]
            sample = follow_up(np.random.default_rng((TEST_STREAM, stream, i, 2)), sample)
        samples.append(replace(sample, id=f"{name}-test-{i:03d}"))
    return samples


test_set.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name


def _check_known(what: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise InputError(f"picturebook: unknown {what} {name!r}; {nearest(name, tuple(names))}")


def probe_set(n_per_kind: int = 40) -> list[Sample]:
    """Return `n_per_kind` fixed attribute questions of each of `PROBE_KINDS`, each with a probe."""
    samples = []
    for k, kind in enumerate(PROBE_KINDS):
        for i in range(n_per_kind):
            sample = probe_sample(np.random.default_rng((PROBE_STREAM, k, i)), kind)
            samples.append(replace(sample, id=f"probe-{kind}-{i:03d}"))
    return samples


@lru_cache(maxsize=32)
def _shares(
    kinds: tuple[str, ...],
) -> tuple[np.ndarray, tuple[Callable[[np.random.Generator], Sample], ...]]:
    for kind in kinds:
        _check_known("kind of training sample", kind, MAKERS)
    if not kinds:
        raise InputError(f"picturebook: kinds is empty; use some of {', '.join(MAKERS)}")
    edges = np.cumsum([MIXTURE.get(kind, 1.0) for kind in kinds])
    return edges / edges[-1], tuple(MAKERS[kind] for kind in kinds)


def train_sample(seed: int, index: int, kinds: tuple[str, ...] | None = None) -> Sample:
    """Return training sample `index` of the endless split `seed`: a pure function of its arguments.

    `kinds` are names of `MAKERS`, in the proportions of `MIXTURE`; None is the whole mixture. A
    third of the samples of the sets have a second turn, of a random kind. Raises InputError for an
    unknown kind.
    """
    kinds = tuple(MIXTURE) if kinds is None else tuple(kinds)
    edges, makers = _shares(kinds)
    rng = np.random.default_rng((TRAIN_STREAM, seed, index))
    make = makers[min(int(np.searchsorted(edges, rng.random(), side="right")), len(makers) - 1)]
    sample = make(rng)
    if make not in (attributes, interview, dialogues.captioned) and rng.random() < FOLLOW_UP_SHARE:
        sample = pick(rng, list(FOLLOW_UPS.values()))(rng, sample)
    return replace(sample, id=f"{sample.dataset}-train-{seed}-{index}")
