"""Bootstrap gives intervals of rows, and differences of two rows on the same samples."""

from __future__ import annotations

import numpy as np
import pytest

from eval.lib.output.intervals import check_row, interval, interval_table
from eval.lib.output.tables import Record
from eval.lib.times.passes import speed_up
from jaxspec.errors import InputError

LABELS = {"views": "row", "turn": "turn"}


def records(row: str, dataset: str, taus: np.ndarray, steps: int = 10) -> list[Record]:
    place = {"row": row, "dataset": dataset, "turn": 1, "num_spec_steps": steps}
    return [place | {"sample": str(i), "tokens_per_pass": float(tau)} for i, tau in enumerate(taus)]


def bounds(cell: str) -> list[float]:
    return [float(part) for part in cell.split(" to ")]


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    """The interval of a mean of two sets of 400 answers, of standard deviations 1 and 2, is that of
    theory: 1.96 times the root of their variances, halved.
    """
    rng = np.random.default_rng(1)
    answers = [
        *records("M", "a", 3 + rng.standard_normal(400)),
        *records("M", "b", 4 + 2 * rng.standard_normal(400)),
    ]
    ((*names, tau, cell),) = interval_table(answers, LABELS, {"avg": ("a", "b"), "c": ("c",)}).cells
    low, high = bounds(cell)
    assert names == ["M", "1", "avg"]
    assert (low + high) / 2 == pytest.approx(float(tau), abs=0.02)
    assert (high - low) / 2 == pytest.approx(1.96 * np.sqrt(1 / 400 + 4 / 400) / 2, rel=0.15)
    one = np.array([[record["tokens_per_pass"] * 10, 10] for record in answers[:400]])
    assert interval(one) == pytest.approx([3 - 0.1, 3 + 0.1], abs=0.1)


def test_answers_that_no_loop_writes_have_no_speed_up() -> None:
    assert speed_up(np.array([2.0, 6.0, 4.0]), np.array([1.0, 2.0, 2.0])) == 2.0
    assert speed_up(np.zeros(2), np.zeros(2)) is None


def test_a_difference_is_of_the_same_samples() -> None:
    """A difference is certain where answers differ much from each other, but one row is 0.1 above
    the other on each.
    """
    spread = np.random.default_rng(0).uniform(1, 6, 50)
    rows = [
        *records("T", "a", spread),
        *records("M", "a", spread[:40] + 0.1),
        *records("lost", "b", spread),
    ]
    table = interval_table(rows, LABELS, {"avg": ("a",)}, against="T")
    assert table.header[-2:] == ["more than T", "95 % of that"]
    own, other = table.cells
    assert own[-2:] == ["-", "-"]
    assert other[-2:] == ["0.10", "0.10 to 0.10"]
    low, high = bounds(other[-3])
    assert high - low > 0.5


def test_an_unknown_row_is_refused() -> None:
    check_row("", ())
    with pytest.raises(InputError, match=r"against: no row 'MT'; did you mean 'T'"):
        check_row("MT", ("M", "T"))
