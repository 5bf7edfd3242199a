"""List the rules that learn weights, with the presets of TABED, and read their texts."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxspec.decoding.drafting.mixtures import mixture_costs, simplex_grid, view_costs
from jaxspec.decoding.drafting.weighting import ALL, Adaptive, Random, Static, Weighting, field_text
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Float

ERROR_FLOOR = 1e-11
"""Minimum accumulated error of a view, as in the released code: a perfect view has weight 1e11."""
MOST_POINTS = 100_000
"""Maximum mixtures of a grid: each is compared at every verified token, and keeps a score there."""
CERTAIN = 1e5  # AdaBoost's log-odds of a view that was always right, as in the released code


@dataclass(frozen=True)
class Grid(Adaptive):
    """Choose the multiples of 1/steps whose mixture would have done best (TABED's w-grid).

    `kl` and `tvd` minimise the summed divergence. `matches` maximises the places where the
    mixture's likeliest token is the target's; `matches_kl` and `matches_tvd` break its ties by
    divergence. Other ties go to the first point of the grid: the least weight on the first view,
    then on the second.

    `sampled` maximises the places where tokens drawn from both are the same, as TABED counts them
    above temperature 0, but in expectation over the draws. That is linear in the weights, so one
    view gets all of it.
    """

    name = "grid"
    measure: Literal["kl", "tvd", "matches", "matches_kl", "matches_tvd", "sampled"] = "kl"
    steps: int = 10

    @property
    def hard_labels(self) -> bool:
        return self.measure == "matches"

    def first(self, weights: tuple[float, ...], vocabulary: int) -> tuple[float, ...]:
        views = len(weights)
        if (points := math.comb(self.steps + views - 1, views - 1)) > MOST_POINTS:
            raise InputError(
                f"weighting {self.name}: steps {self.steps} make {points} mixtures of {views} "
                f"views, over {MOST_POINTS}; give fewer"
            )
        return weights

    def score(self, p: Array, view_probs: Array, weights: Array) -> Array:
        measures: Any = tuple(self.measure.replace("matches", "misses").split("_"))
        points = jnp.asarray(simplex_grid(len(view_probs), self.steps))
        return mixture_costs(measures, p, view_probs, points)

    def choose(self, scores: Array, initial: Array, vocabulary: int) -> Array:
        cost = scores[:, 0]
        if scores.shape[1] > 1:
            cost = jnp.where(cost <= cost.min(-1, keepdims=True), scores[:, 1], jnp.inf)
        return jnp.asarray(simplex_grid(initial.shape[1], self.steps))[jnp.argmin(cost, axis=-1)]


@dataclass(frozen=True)
class InverseErrorPower(Adaptive):
    """Weight view r in proportion to E_r^(-1/tau), with E_r its own cost (TABED's released code).

    At tau 1 weights are inverse to errors; tau 0 takes the best view. The released scripts run this
    rule next to the grid.
    """

    name = "inverse_error_power"
    measure: Literal["kl", "tvd"] = "kl"
    tau: float = 1.0

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        return view_costs((self.measure,), p, view_probs)

    def choose(self, scores: Array, initial: Array, vocabulary: int) -> Array:
        error = jnp.maximum(scores[:, 0], ERROR_FLOOR)
        if self.tau == 0:
            return jax.nn.one_hot(jnp.argmin(error, axis=-1), initial.shape[1])
        return jax.nn.softmax(self.logits(error), axis=-1)

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return -jnp.log(error) / self.tau


@dataclass(frozen=True)
class InverseErrorSoftmax(InverseErrorPower):
    """Weight the views by softmax(1 / (tau E)), the formula that TABED prints.

    It nearly takes the best view while errors are small, and tends to uniform weights as they grow.
    The scale of the measure matters here: `tvd` is the L1 distance.
    """

    name = "inverse_error_softmax"

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return 1 / (self.tau * error)


@dataclass(frozen=True)
class HardMatch(Adaptive):
    """Weight view r in proportion to the places where its likeliest token was the target's.

    The initial weights hold while no view has a match.
    """

    name = "hard_match"
    hard_labels: ClassVar = True

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        return 1 - view_costs(("misses",), p, view_probs)

    def choose(self, scores: Array, initial: Array, vocabulary: int) -> Array:
        return _normalised(scores[:, 0], initial)


@dataclass(frozen=True)
class AdaBoost(HardMatch):
    """Weight view r by SAMME's log-odds, ln(a_r / (1 - a_r)) + constant * ln(V - 1).

    a_r is its share of matches. Views worse than chance get weight 0; the released code gives them
    a negative weight, which makes no mixture. At constant 1 the second term (10.4 at 32064 tokens)
    outweighs the first, and weights are nearly uniform.

    With `errors`, each view's 1 - a_r, the weights are fixed by them, as the paper writes.
    """

    name = "adaboost"
    constant: float = 1.0
    errors: tuple[float, ...] = ()

    def first(self, weights: tuple[float, ...], vocabulary: int) -> tuple[float, ...]:
        """Return the weights that `errors` fix, or those that were asked for."""
        if not self.errors:
            return weights
        if len(self.errors) != len(weights):
            raise InputError(
                f"weighting {self.name}: errors {field_text(self.errors)} are {len(self.errors)} "
                f"for {len(weights)} views; give one for each"
            )

        def value(error: float) -> float:
            if error in (0, 1):
                return CERTAIN * (1 - error)
            chance = self.constant * math.log(max(vocabulary - 1, 1))
            return max(math.log(1 / error - 1) + chance, 0)

        values = [value(error) for error in self.errors]
        return tuple(each / sum(values) for each in values) if any(values) else weights

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        hits = super().score(p, view_probs, weights)
        return jnp.concatenate([hits, 1 - hits], axis=2)

    def choose(self, scores: Array, initial: Array, vocabulary: int) -> Array:
        if self.errors:
            return initial
        hits, misses = scores[:, 0], scores[:, 1]
        odds = jnp.log(jnp.where(hits > 0, hits, 1)) - jnp.log(jnp.where(misses > 0, misses, 1))
        value = odds + self.constant * jnp.log(float(max(vocabulary - 1, 1)))
        value = jnp.where(misses <= 0, CERTAIN, jnp.where(hits <= 0, 0.0, value))
        return _normalised(jnp.maximum(value, 0), initial)


_RULES = (Static, Random, Grid, InverseErrorPower, InverseErrorSoftmax, HardMatch, AdaBoost)
RULES: dict[str, type[Weighting]] = {rule.name: rule for rule in _RULES}

PRESETS = {
    "mt-paper": Grid(measure="kl"),
    "mt-release": Grid(measure="matches_kl"),
    "mtcp-paper": InverseErrorSoftmax(measure="kl"),
    "mtcp-release": InverseErrorPower(measure="kl"),
}
"""TABED's rules, each for any number of views.

`mt-paper` and `mtcp-paper` are MT* (views M, T) and MTCP* (M, T, C, P) of the paper's appendix B.2.
It names no measure for the grid of MT*; we take KL, its measure elsewhere. `mt-release` and
`mtcp-release` are the same rules as the released code writes them. Its scripts run every mixture by
this grid, by inverse KL and by inverse L1 (`inverse_error_power:measure=tvd`), and do not say which
one was printed."""


def parse_weighting(text: str) -> Weighting:
    """Return the rule of a name or preset with its fields: `grid:steps=5`, `mt-paper:window=16`.

    Raises InputError for an unknown name, field or value, with the nearest one.
    """
    name, _, options = text.partition(":")
    if name not in PRESETS and name not in RULES:
        raise InputError(f"weighting: {name!r} is unknown; {nearest(name, (*RULES, *PRESETS))}")
    rule = PRESETS.get(name) or RULES[name]()
    names = [field.name for field in fields(rule)]
    settings: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        field, _, value = part.partition("=")
        if field not in names:
            mend = nearest(field, names) if names else "the rule has no fields"
            raise InputError(f"weighting {name}: field {field!r} is unknown; {mend}")
        if field in settings:
            raise InputError(f"weighting {name}: {field} is there twice; give it once")
        settings[field] = _read(value)
    return replace(rule, **settings)


def _read(text: str) -> Any:
    """Return the value of a field's text: None for `ALL`, a number, several, or a choice."""
    if text == ALL:
        return None
    if "/" in text:
        return tuple(map(_read, text.split("/")))
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _normalised(values: Float[Array, "B R"], initial: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Return non-negative values divided by their sum, or the initial weights if that is 0."""
    total = values.sum(-1, keepdims=True)
    return jnp.where(total > 0, values / jnp.where(total > 0, total, 1.0), initial)
