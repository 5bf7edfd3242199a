"""The two-sample chi-square test: were two sets of outcomes drawn from one distribution?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from jax.scipy.special import gammaincc


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of homogeneity."""

    statistic: float
    degrees: int
    """Cells that were compared, less one."""
    p_value: float
    """Chance of a statistic at least as large if both samples come from one distribution."""


def two_samples(ours: Sequence[Hashable], theirs: Sequence[Hashable], least: float = 5.0) -> ChiSquare:
    """Compares how often each outcome occurs in either sample.

    An outcome that either sample is expected to hold `least` times is a cell; the others share cells by a hash
    of what they are, as many as can be filled, so that the test sees something where every outcome is rare.
    """
    counts = np.asarray([len(ours), len(theirs)], np.float64)
    share = counts / counts.sum()
    seen = Counter(ours) + Counter(theirs)
    common = {o: i for i, (o, n) in enumerate(seen.most_common()) if n * share.min() >= least}
    rare = sum(n for o, n in seen.items() if o not in common) * share.min()
    bins = int(rare / (2 * least))
    if rare and not bins:  # too few for a cell of their own: they join the least common one
        bins = int(not common)

    def cell(outcome: Hashable) -> int:
        if outcome in common:
            return common[outcome]
        return len(common) + crc32(repr(outcome).encode()) % bins if bins else len(common) - 1

    cells = np.zeros((2, len(common) + bins))
    for sample, outcomes in enumerate((ours, theirs)):
        np.add.at(cells[sample], [cell(outcome) for outcome in outcomes], 1)
    cells = cells[:, cells.sum(0) > 0]
    expected = cells.sum(0) * share[:, None]
    statistic = float((np.square(cells - expected) / expected).sum())
    degrees = cells.shape[1] - 1
    return ChiSquare(statistic, degrees, float(gammaincc(degrees / 2, statistic / 2)) if degrees else 1.0)
