"""The weightings once more, in float64 NumPy, as the papers and facts about the released code tell
them.

One request at a time, full histories of distributions, everything computed anew after each block.
`p` and `q` hold the verified places of the window in order: p [T, V], q [T, R, V].
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


DIVERGENCE = {"kl": kl, "tvd": l1, "matches": miss}


def simplex(views: int, steps: int) -> np.ndarray:
    """All vectors with step 1/steps that sum to 1, in lexicographic order."""
    points = [c for c in itertools.product(range(steps + 1), repeat=views) if sum(c) == steps]
    return np.asarray(points, np.float64) / steps


def summed(measure: str, p: np.ndarray, q: np.ndarray, w: np.ndarray) -> float:
    return sum(DIVERGENCE[measure](pt, w @ qt) for pt, qt in zip(p, q))


def static(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
    return initial


def grid(measure: str = "kl", steps: int = 10) -> Callable[..., np.ndarray]:
    def weights(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
        points = simplex(q.shape[1], steps)
        first, _, then = measure.partition("_")
        cost = np.asarray([summed(first, p, q, w) for w in points])
        if then:
            tied = cost == cost.min()
            cost = np.asarray(
                [summed(then, p, q, w) if t else np.inf for w, t in zip(points, tied)]
            )
        return points[np.argmin(cost)]

    return weights


def errors(measure: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.maximum([summed(measure, p, q, one) for one in np.eye(q.shape[1])], 1e-11)


def inverse_error_power(measure: str = "kl", tau: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
        error = errors(measure, p, q)
        if tau == 0:
            return np.eye(len(error))[np.argmin(error)]
        power = (error / error.min()) ** (-1 / tau)
        return power / power.sum()

    return weights


def inverse_error_softmax(measure: str = "kl", tau: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
        value = 1 / (tau * errors(measure, p, q))
        power = np.exp(value - value.max())
        return power / power.sum()

    return weights


def hits(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (q.argmax(-1) == p.argmax(-1)[:, None]).sum(0).astype(np.float64)


def hard_match(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
    right = hits(p, q)
    return right / right.sum() if right.any() else initial


def adaboost(constant: float = 1.0) -> Callable[..., np.ndarray]:
    def weights(p: np.ndarray, q: np.ndarray, initial: np.ndarray) -> np.ndarray:
        value = []
        for accuracy in hits(p, q) / len(p):
            if accuracy in (0, 1):
                value.append(1e5 if accuracy else -1e5)
            else:
                value.append(np.log(accuracy / (1 - accuracy)) + constant * np.log(p.shape[1] - 1))
        kept = np.maximum(value, 0)
        return kept / kept.sum() if kept.any() else initial

    return weights


class Reference:
    """A request's history under one rule; `observe` takes a block's verified places."""

    def __init__(self, rule: Callable[..., np.ndarray], initial: np.ndarray, window: int | None):
        self.rule, self.initial, self.window = rule, initial, window
        self.weights = initial
        self.p: list[np.ndarray] = []
        self.q: list[np.ndarray] = []

    def observe(self, p: np.ndarray, q: np.ndarray) -> None:
        self.p.extend(p)
        self.q.extend(q)
        if self.p:
            last = slice(-(self.window or len(self.p)), None)
            self.weights = self.rule(
                np.asarray(self.p[last]), np.asarray(self.q[last]), self.initial
            )
