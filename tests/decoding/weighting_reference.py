"""These weightings repeat the library's in float64 NumPy, as the papers and facts about the
released code tell them.

One request at a time, full histories of distributions, everything computed anew after each block.
`p` and `q` hold the verified places of the window in order: p [T, V], q [T, R, V]; `factors` [T]
what each place counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

TINY = 1e-30


def log(x: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(x, TINY))


def kl(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * (log(p) - log(q))).sum())


def l1(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.abs(p - q).sum())


def miss(p: np.ndarray, q: np.ndarray) -> float:
    return float(np.argmax(p) != np.argmax(q))


def apart(p: np.ndarray, q: np.ndarray) -> float:
    """Return the chance that two tokens differ, one drawn from each."""
    chances = np.outer(p, q)
    return float(chances.sum() - np.trace(chances))


DIVERGENCE = {"kl": kl, "tvd": l1, "matches": miss, "sampled": apart}


def simplex(views: int, steps: int) -> np.ndarray:
    """Return all vectors with step 1/steps that sum to 1, in lexicographic order."""
    points = [c for c in itertools.product(range(steps + 1), repeat=views) if sum(c) == steps]
    return np.asarray(points, np.float64) / steps


def summed(measure: str, p: np.ndarray, q: np.ndarray, w: np.ndarray, factors: np.ndarray) -> float:
    return sum(f * DIVERGENCE[measure](pt, w @ qt) for f, pt, qt in zip(factors, p, q))


def static(p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return initial


def grid(measure: str = "kl", steps: int = 10) -> Callable[..., np.ndarray]:
    def weights(
        p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray
    ) -> np.ndarray:
        points = simplex(q.shape[1], steps)
        first, _, then = measure.partition("_")
        cost = np.asarray([summed(first, p, q, w, factors) for w in points])
        if then:
            tied = cost == cost.min()
            cost = np.asarray(
                [summed(then, p, q, w, factors) if t else np.inf for w, t in zip(points, tied)]
            )
        return points[np.argmin(cost)]

    return weights


def errors(measure: str, p: np.ndarray, q: np.ndarray, factors: np.ndarray) -> np.ndarray:
    return np.maximum([summed(measure, p, q, one, factors) for one in np.eye(q.shape[1])], 1e-11)


def inverse_error_power(measure: str = "kl", tau: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(
        p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray
    ) -> np.ndarray:
        error = errors(measure, p, q, factors)
        if tau == 0:
            return np.eye(len(error))[np.argmin(error)]
        power = (error / error.min()) ** (-1 / tau)
        return power / power.sum()

    return weights


def inverse_error_softmax(measure: str = "kl", tau: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(
        p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray
    ) -> np.ndarray:
        value = 1 / (tau * errors(measure, p, q, factors))
        power = np.exp(value - value.max())
        return power / power.sum()

    return weights


def hits(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return q.argmax(-1) == p.argmax(-1)[:, None]


def hard_match(
    p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray
) -> np.ndarray:
    right = factors @ hits(p, q)
    return right / right.sum() if right.any() else initial


def adaboost(constant: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(
        p: np.ndarray, q: np.ndarray, initial: np.ndarray, factors: np.ndarray
    ) -> np.ndarray:
        value = []
        for right, wrong in zip(factors @ hits(p, q), factors @ ~hits(p, q)):
            if right and wrong:
                value.append(np.log(right / wrong) + constant * np.log(p.shape[1] - 1))
            else:
                value.append(1e5 if right else -1e5)
        kept = np.maximum(value, 0)
        return kept / kept.sum() if kept.any() else initial

    return weights


class Reference:
    """Hold a request's history under one rule; `observe` takes a block's verified places."""

    def __init__(
        self,
        rule: Callable[..., np.ndarray],
        initial: np.ndarray,
        window: int | None,
        decay: float = 1.0,
    ):
        self.rule, self.initial, self.window, self.decay = rule, initial, window, decay
        self.weights = initial
        self.p: list[np.ndarray] = []
        self.q: list[np.ndarray] = []

    def observe(self, p: np.ndarray, q: np.ndarray) -> None:
        self.p.extend(p)
        self.q.extend(q)
        if self.p:
            last = slice(-(self.window or len(self.p)), None)
            p, q = np.asarray(self.p[last]), np.asarray(self.q[last])
            factors = self.decay ** np.arange(len(p) - 1.0, -1, -1)
            self.weights = self.rule(p, q, self.initial, factors)
