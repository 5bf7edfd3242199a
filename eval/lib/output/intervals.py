"""Bootstrap intervals of ratios, and compare two rows on the same samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np

from eval.lib.output.tables import Record, Table, grouped, number
from jaxspec.errors import InputError, nearest

RESAMPLES = 2000
PASSES = "tokens_per_pass", "num_spec_steps"
"""Fields of a record: a ratio and its denominator."""
CYCLES = "tokens_per_cycle", "num_cycles"


def interval(sums: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of a ratio of sums, of the parts [samples, 2]."""
    return _bounds(_ratios(sums, resamples, np.random.default_rng(seed)))


def set_interval(line: Sequence[Record], name: str) -> tuple[float, float]:
    """Return the bootstrap 95 % interval of a line's tokens per pass on one set."""
    means = _draw(line, [name], PASSES)
    assert means is not None, f"no records of {name}"
    return _bounds(means)


def _ratios(sums: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Return the ratio of the parts' sums, then the ratio of each resampling of the parts."""
    counts = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), resamples)
    totals = np.concatenate([sums.sum(0)[None], counts @ sums])
    return totals[:, 0] / np.maximum(totals[:, 1], 1)


def _bounds(samples: np.ndarray) -> tuple[float, float]:
    """Return the 95 % interval of the resamplings behind the first value."""
    low, high = np.percentile(samples[1:], [2.5, 97.5])
    return float(low), float(high)


def check_row(against: str, names: Sequence[str]) -> None:
    """Raise InputError if `against` names no row."""
    if against and against not in names:
        raise InputError(f"against: no row {against!r}; {nearest(against, tuple(names))}")


def interval_table(
    records: Sequence[Record],
    labels: Mapping[str, str],
    groups: Mapping[str, Sequence[str]],
    against: str = "",
    fields: tuple[str, str] = PASSES,
) -> Table:
    """Return each line's mean over the sets of each group, with its bootstrap 95 % interval.

    Args:
      records: One for each answer.
      labels: First columns by name, each a field that a line's records share; the first is the row.
      groups: Sets by the name of their mean; a line without one of the sets has none.
      against: A row; the other lines also show how much more they have on the same samples.
      fields: The ratio that a record has, and its denominator.
    """
    lines = grouped(records, lambda record: tuple(str(record[name]) for name in labels.values()))
    header = [*labels, "over", fields[0].replace("_", " "), "95 %"]
    header += [f"more than {against}", "95 % of that"] if against else []
    cells = []
    for group, sets in groups.items():
        means_of = {name: _draw(line, sets, fields) for name, line in lines.items()}
        for name, means in means_of.items():
            if means is None:
                continue
            line = [*name, group, *_cells(means)]
            if against:
                base = lines.get((against, *name[1:]), []) if name[0] != against else []
                line += _difference(lines[name], base, sets, fields)
            cells.append(line)
    note = (
        f"95 %: bootstrap over the samples of each set, {RESAMPLES} times; differences are of the "
        "same samples."
    )
    return Table("Intervals", header, cells, [note])


def _difference(
    line: Sequence[Record], base: Sequence[Record], sets: Sequence[str], fields: tuple[str, str]
) -> list[str]:
    """Return how much more a line has than another on the samples of both, and its interval."""
    common = set(map(_answer, line)) & set(map(_answer, base))
    mine, other = (
        _draw([record for record in each if _answer(record) in common], sets, fields)
        for each in (line, base)
    )
    return ["-", "-"] if mine is None or other is None else _cells(mine - other)


def _answer(record: Record) -> tuple[str, str | None, str]:
    """Return what two rows' records of the same answer share."""
    return record["dataset"], record.get("follow_up"), record["sample"]


def _draw(
    line: Sequence[Record], sets: Sequence[str], fields: tuple[str, str]
) -> np.ndarray | None:
    """Return the mean over sets of the answers, then the mean of each resampling.

    The same samples of a set are drawn for each line and kind of second turn.
    """
    ratio, over = fields
    means = []
    for name in sets:
        parts: dict[str | None, list[tuple[float, float]]] = {}
        for record in line:
            if record["dataset"] == name:
                whole = record[over]
                part = (record[ratio] or 0.0) * whole, whole
                parts.setdefault(record.get("follow_up"), []).append(part)
        if not parts:
            return None
        each = []
        for sums in map(np.asarray, parts.values()):
            rng = np.random.default_rng([0, crc32(name.encode())])
            each.append(_ratios(sums, RESAMPLES, rng))
        means.append(np.mean(each, axis=0))
    return np.mean(means, axis=0)


def _cells(samples: np.ndarray) -> list[str]:
    """Return the value of the answers themselves, and the interval of the resamplings."""
    low, high = _bounds(samples)
    return [number(float(samples[0])), f"{number(low)} to {number(high)}"]
