"""Evaluation sets by name: picturebook's twins, the papers' benchmarks, and MMSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from jaxspec.data.benchmarks import BENCHMARKS, benchmark_samples, few_shot_samples
from jaxspec.data.follow_ups import SOURCES, add_follow_ups
from jaxspec.data.mmspec import read_prompts
from jaxspec.data.picturebook import FOLLOW_UPS, TWINS, test_set
from jaxspec.data.samples import Sample
from jaxspec.errors import InputError, nearest

MMSPEC = "mmspec"
SETS = (*TWINS, *BENCHMARKS, MMSPEC)


def evaluation_set(
    name: str,
    limit: int = 100,
    turns: int = 1,
    kinds: Sequence[str] = tuple(FOLLOW_UPS),
    data: Mapping[str, Path] | None = None,
    shots: Mapping[str, Path | None] | None = None,
) -> Sequence[Sample]:
    """The first `limit` samples of a set, with one turn or two.

    Args:
      turns: with 2, sample i gets a follow-up of kind i modulo the number of `kinds`, names of `FOLLOW_UPS`. MMSpec
        brings its own turns: with 2, those of its samples that have a second one.
      shots: the benchmarks to ask with worked examples in front, and where a local copy of these lies; None: the hub's.
      data: where local copies of benchmarks lie; the others are read from the hub. MMSpec lies on no hub.

    Raises InputError for an unknown set with the nearest name, and for data that cannot be read.
    """
    data, shots = data or {}, shots or {}
    check_names((name,))
    if name in TWINS:
        return test_set(name, limit, turns, kinds)
    if name == MMSPEC:
        if name not in data:
            raise InputError(f"set {MMSPEC}: no data; give its prompt file with --data {MMSPEC}=PATH")
        return list(islice((s for s in read_prompts(data[name]) if len(s.turns) >= turns), limit))
    rows = benchmark_samples(name, data.get(name))
    if name in shots:
        rows = few_shot_samples(name, data.get(name), shots[name])
    samples = list(islice(rows, limit))
    if turns == 1:
        return samples
    borrowed = {
        kind: list(islice(benchmark_samples(source, data.get(source)), limit))
        for kind, source in SOURCES.items()
        if kind in kinds
    }
    return add_follow_ups(samples, kinds, borrowed)


def check_names(names: Sequence[str]) -> None:
    """Raises InputError for the first name that is no set's, with the nearest one."""
    for name in names:
        if name not in SETS:
            raise InputError(f"sets: unknown set {name!r}; {nearest(name, SETS)}")
