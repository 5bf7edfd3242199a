"""Evaluation sets by name: picturebook's twins, the papers' benchmarks, MMSpec, and files of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from jaxspec.data.benchmarks import BENCHMARKS, benchmark_samples, few_shot_samples
from jaxspec.data.follow_ups import SOURCES, add_follow_ups
from jaxspec.data.mmspec import read_prompts
from jaxspec.data.own import own_samples
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
    images: Path | None = None,
) -> Sequence[Sample]:
    """The first `limit` samples of a set, with one turn or two.

    Args:
      turns: with 2, sample i gets a follow-up of kind i modulo the number of `kinds`, names of `FOLLOW_UPS`. MMSpec and
        one's own sets bring their turns: with 2, those of their samples that have a second one.
      shots: the benchmarks to ask with worked examples in front, and where a local copy of these lies; None: the hub's.
      data: where local copies of benchmarks lie; the others are read from the hub. MMSpec lies on no hub. Any other
        name is a set of one's own, in the form that `own` tells.
      images: folder of the images of one's own sets; None: beside their files.

    Raises InputError for an unknown set with the nearest name, and for data that cannot be read.
    """
    data, shots = data or {}, shots or {}
    check_names((name,), tuple(data))
    if name in TWINS:
        return test_set(name, limit, turns, kinds)
    if name == MMSPEC:
        if name not in data:
            raise InputError(f"set {MMSPEC}: no data; give its prompt file with --data {MMSPEC}=PATH")
        return _with_turns(read_prompts(data[name]), name, turns, limit)
    if name not in BENCHMARKS:
        return _with_turns(own_samples(name, data[name], images), name, turns, limit)
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


def _with_turns(samples: Iterable[Sample], name: str, turns: int, limit: int) -> list[Sample]:
    """The first samples that have so many turns."""
    found = list(islice((sample for sample in samples if len(sample.turns) >= turns), limit))
    if not found:
        what = "samples" if turns == 1 else "sample with a second turn"
        raise InputError(f"set {name}: no {what} in its file; add one, or give other --sets or --turns")
    return found


def check_names(names: Sequence[str], own: Sequence[str] = ()) -> None:
    """Raises InputError for the first name that is no set's, nor among one's own, with the nearest one."""
    for name in names:
        if name not in SETS and name not in own:
            known = (*SETS, *own, "NAME=FILE.jsonl")
            raise InputError(f"sets: unknown set {name!r}; {nearest(name, known)}")
