"""The cost of collaborative decoding: the exact law of its calls, and the fastest schedule.

Costs are times of one forward pass of each model, in any unit; the baseline, standard collaborative
decoding, pays every model's once a token. A proposal of model m is accepted with probability
alpha_m = 1 - TV(d_m, r), taken as the same at each place and independent between places; for text
this is an approximation, and the only one here.

Reference: Collaborative Decoding via Speculation (arXiv 2502.01662), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np


def acceptance(d: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return alpha = sum_x min(d(x), r(x)) = 1 - TV(d, r) over the last axis (Eq. 7)."""
    return np.minimum(d, r).sum(-1)


def tokens_per_run(alpha: float, gamma: int) -> float:
    """Return the expected tokens of verifying gamma proposals, with replacements, without bonus."""
    return float(sum(alpha**place for place in range(gamma)))


class Calls(NamedTuple):
    """Forward passes of each model a token [M]: those that score, and single steps that propose."""

    scoring: np.ndarray
    proposing: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.scoring + self.proposing


def one_proposer_calls(
    alpha: float, gamma: int, models: int = 2, proposer: int = 0, bonus: bool = False
) -> Calls:
    """Return the calls of `OneProposer`; without bonus this is Theorem 3.1."""
    tokens = tokens_per_run(alpha, gamma + bonus)
    own = np.arange(models) == proposer
    return Calls(~own / tokens, own * (gamma + bonus) / tokens)


def alternating_calls(alphas: Sequence[float], gammas: Sequence[int], first: int = 0) -> Calls:
    """Return the calls of `Alternating`, exactly: the stationary law of its turns.

    Between two rejections the turns go round the ring. The first M - 1 only fill it; from then on
    each scores and verifies the run of the model after it, and goes on with probability
    alpha^gamma. So passes and tokens between rejections are geometric sums over rounds, and by
    renewal their ratio is that of the long run.

    For two models at costs (c, 1) the speed-up of these calls is, with q = 0 first, p = 1, a =
    alpha_q^gq, b = alpha_p^gp and G = `tokens_per_run`,

        (1 + c) (G_q + a G_p) / (1 + c gq - a b c + a (gp - 1 + c)).
    """
    models = len(alphas)
    scoring, proposing = np.zeros(models), np.zeros(models)
    ring = [(first + k) % models for k in range(models)]
    whole = float(np.prod([alphas[m] ** gammas[m] for m in ring]))
    tokens, reached = 0.0, 1.0
    for k, model in enumerate(ring):
        if k < models - 1:  # before there is anything to verify: once between rejections
            scoring[model] += 1 - whole
            proposing[model] += (1 - whole) * (gammas[model] - 1)
    for owner in (
        ring
    ):  # a round of verifications; each round is reached `whole` times as often as the one before
        model = (owner - 1) % models
        whole_run = alphas[owner] ** gammas[owner]
        scoring[model] += reached
        tokens += reached * tokens_per_run(alphas[owner], gammas[owner])
        reached *= whole_run
        proposing[model] += reached * (gammas[model] - 1)
    return Calls(scoring / tokens, proposing / tokens)


def speedup(calls: Calls, costs: Sequence[float], scoring: Sequence[float] | None = None) -> float:
    """Return the speed-up over standard collaborative decoding.

    Args:
      costs: of a pass over one token.
      scoring: of a pass that scores proposals; None takes it for as much, as the paper does.
    """
    spent = calls.proposing @ np.asarray(costs) + calls.scoring @ np.asarray(
        costs if scoring is None else scoring
    )
    return float(sum(costs) / spent)


def parallel_speedup(costs: Sequence[float]) -> float:
    """Return the largest gain of standard decoding from a device for each model.

    It is not built: one compiled program does the same on all its devices, so that other models
    would be programs of their own, and each token a round trip to the host.
    """
    return sum(costs) / max(costs)


@dataclass(frozen=True)
class Schedule:
    """How to decode fastest."""

    alternates: bool
    """Otherwise only the `first` model proposes."""
    first: int
    gammas: tuple[int, ...]
    """Draft length of each model; of one proposer, its own alone."""
    speedup: float
    """Predicted, over standard collaborative decoding."""


def best_schedule(
    alphas: Sequence[float],
    costs: Sequence[float],
    scoring: Sequence[float] | None = None,
    lengths: Iterable[int] = range(1, 9),
) -> Schedule:
    """Return the proposer and draft lengths with the largest predicted speed-up.

    All draft lengths 1 are among the choices, with which alternation never loses (Corollary 3.7).
    """
    models, lengths = len(alphas), tuple(lengths)
    found = []
    for first in range(models):
        for gamma in lengths:
            calls = one_proposer_calls(alphas[first], gamma, models, first)
            found.append(Schedule(False, first, (gamma,), speedup(calls, costs, scoring)))
        for gammas in product(lengths, repeat=models):
            calls = alternating_calls(alphas, gammas, first)
            found.append(Schedule(True, first, gammas, speedup(calls, costs, scoring)))
    return max(found, key=lambda schedule: schedule.speedup)
