"""The weightings that learn, and the names of all.

See `weighting` for what a rule is, and for the table of them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

import jax
import jax.numpy as jnp

from jaxspec.decoding.mixtures import (
    TINY,
    Measure,
    acceptance_gradient,
    measure_mixtures,
    measure_views,
    responsibilities,
    simplex_grid,
)
from jaxspec.decoding.weighting import Adaptive, Random, Rule, Static, Weighting
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Float

ERROR_FLOOR = 1e-11
"""Least accumulated error of a view: the inverse of a perfect one is 1e11, as in the released code."""

CERTAIN = 1e5
"""AdaBoost's log-odds of a view that was always right, as in the released code."""

GridMeasure = Literal["kl", "tvd", "matches", "matches_kl", "matches_tvd"]
GRID_COSTS: dict[str, tuple[Measure, ...]] = {
    "kl": ("kl",),
    "tvd": ("tvd",),
    "matches": ("misses",),
    "matches_kl": ("misses", "kl"),
    "matches_tvd": ("misses", "tvd"),
}


@dataclass(frozen=True)
class Grid(Adaptive):
    """TABED's w-grid: the weights, multiples of 1/steps, whose mixture would have done best.

    `kl` and `tvd` take the least summed divergence, `matches` the most places where the mixture's likeliest token
    is the target's, `matches_kl` and `matches_tvd` among those the least divergence. What is still tied goes to
    the first point of the grid: the least weight on the first view, then on the second.
    """

    measure: GridMeasure = "kl"
    steps: int = 10

    name = "grid"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("measure", tuple(GRID_COSTS))
        self._check_range("steps", 1)

    @property
    def hard_labels(self) -> bool:
        return self.measure == "matches"

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J M C"]:
        candidates = jnp.asarray(simplex_grid(len(view_probs), self.steps))
        return measure_mixtures(GRID_COSTS[self.measure], p, view_probs, candidates)

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        cost = total[:, 0]
        if total.shape[1] > 1:
            cost = jnp.where(cost <= cost.min(-1, keepdims=True), total[:, 1], jnp.inf)
        return jnp.asarray(simplex_grid(initial.shape[1], self.steps))[jnp.argmin(cost, axis=-1)]


@dataclass(frozen=True)
class Hedge(Grid):
    """The mean of the grid, each point weighted by exp(-rate * its summed cost): no ties, no jumps.

    With measure `kl` and rate 1 this is Cover's universal portfolio on a grid: KL being 1-exp-concave in w, over
    any sequence of blocks of one place the summed KL is at most that of the grid's best point plus ln(points).
    The matches of `matches_kl` and `matches_tvd` are added to the divergence, not put before it.
    """

    rate: float = 1.0

    name = "hedge"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rate", 0)

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        share = jax.nn.softmax(-self.rate * total.sum(1), axis=-1)
        grid = jnp.asarray(simplex_grid(initial.shape[1], self.steps))
        return jnp.einsum("BC,CR->BR", share, grid, precision="highest")


@dataclass(frozen=True)
class InverseErrorPower(Adaptive):
    """TABED's released reading of its formula for many views: w_r proportional to E_r^(-1/tau), E_r what view r alone
    cost.

    At tau 1 weights are inverse to errors; tau 0 takes the best view. The released scripts run it beside the grid.
    """

    measure: Literal["kl", "tvd"] = "kl"
    tau: float = 1.0

    name = "inverse_error_power"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("measure", ("kl", "tvd"))
        self._check_range("tau", 0)

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J M C"]:
        return measure_views((self.measure,), p, view_probs)

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        error = jnp.maximum(total[:, 0], ERROR_FLOOR)
        if self.tau == 0:
            return jax.nn.one_hot(jnp.argmin(error, axis=-1), initial.shape[1])
        return jax.nn.softmax(self.logits(error), axis=-1)

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return -jnp.log(error) / self.tau


@dataclass(frozen=True)
class InverseErrorSoftmax(InverseErrorPower):
    """The formula that TABED prints, taken literally: softmax(1 / (tau E)).

    It all but takes the best view while errors are small, and forgets them as they grow. The measure's scale
    matters here: `tvd` is the L1 distance.
    """

    name = "inverse_error_softmax"

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return 1 / (self.tau * error)


@dataclass(frozen=True)
class HardMatch(Adaptive):
    """w_r proportional to the places where view r's likeliest token was the target's; initial where none was."""

    name = "hard_match"

    @property
    def hard_labels(self) -> bool:
        return True

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J M C"]:
        return 1 - measure_views(("misses",), p, view_probs)

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        return _normalised(total[:, 0], initial)


@dataclass(frozen=True)
class AdaBoost(HardMatch):
    """SAMME's log-odds: w_r proportional to ln(a_r / (1 - a_r)) + constant * ln(V - 1), a_r its share of matches.

    Views worse than chance get weight 0, or with `negative`, as in the released code, a negative one: the drafter
    then draws from the positive part of the mixture. At constant 1 the second term (10.4 at 32064 tokens)
    outweighs the first, and weights are near uniform.
    """

    constant: float = 1.0
    negative: bool = False

    name = "adaboost"

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        hits, misses = total[:, 0], places[:, None] - total[:, 0]
        odds = jnp.log(jnp.maximum(hits, 1)) - jnp.log(jnp.maximum(misses, 1))
        value = odds + self.constant * jnp.log(float(max(vocabulary - 1, 1)))
        value = jnp.where(misses <= 0, CERTAIN, jnp.where(hits <= 0, -CERTAIN, value))
        hopeless = (hits <= 0).all(-1, keepdims=True)
        return jnp.where(hopeless, initial, _normalised(value if self.negative else jnp.maximum(value, 0), initial))


@dataclass(frozen=True)
class ExponentiatedGradient(Adaptive):
    """w_r proportional to its initial weight times exp(rate * the summed gradient of the acceptance in w_r).

    Kivinen and Warmuth 1997 on sum_v min(p, q_w), the chance that a sampled draft is accepted, which is concave in w
    and has gradients in [0, 1]. O(R) state and no grid. Gradients are taken at the weights that each block was
    drafted with.
    """

    rate: float = 2.0

    name = "exponentiated_gradient"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rate", 0)

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J M C"]:
        return self.rate * acceptance_gradient(p, view_probs, weights)[:, :, None]

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        return jax.nn.softmax(jnp.log(initial) + total[:, 0], axis=-1)


@dataclass(frozen=True)
class Em(Adaptive):
    """EM for min_w sum KL(p, sum_r w_r q_r), one damped step a place: w_r times 1 + rate * (E_p[q_r / q_w] - 1).

    KL is convex in w, so the steps lead to the best mixture without a grid (Helmbold et al. 1997, EM_eta: rate 1 is
    EM itself, which jumps to what explains the last place; smaller rates average over about 1/rate places).
    O(R) state.
    """

    rate: float = 0.3

    name = "em"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("rate", 0, 1)  # beyond 1 a step could make weights negative

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J M C"]:
        factor = 1 + self.rate * (responsibilities(p, view_probs, weights) - 1)
        return jnp.log(jnp.maximum(factor, TINY))[:, :, None]

    def choose(self, total: Array, places: Array, initial: Array, vocabulary: int) -> Float[Array, "B R"]:
        return jax.nn.softmax(jnp.log(initial) + total[:, 0], axis=-1)


RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        Static,
        Random,
        Grid,
        InverseErrorPower,
        InverseErrorSoftmax,
        HardMatch,
        AdaBoost,
        Hedge,
        ExponentiatedGradient,
        Em,
    )
}

PRESETS = {
    "mt-paper": Grid(measure="kl"),
    "mt-release": Grid(measure="matches_kl"),
    "mtcp-paper": InverseErrorSoftmax(measure="kl"),
    "mtcp-release": InverseErrorPower(measure="kl"),
}
"""TABED's rules, each for any number of views.

`mt-paper` and `mtcp-paper` are MT* (views M, T) and MTCP* (M, T, C, P) as the paper's appendix B.2 writes them; it
names the grid of MT* but no measure, which is read as KL, its measure elsewhere. The scripts of the released code run
every mixture, MT* and MTCP* alike, with the same three rules: first `mt-release`, the grid; then inverse KL, which is
`mtcp-release`; then inverse L1 (`inverse_error_power:measure=tvd`). So the released MTCP* is `mt-release` over four
views. None of its files says which of the three gave the published numbers."""


def parse_weighting(text: str) -> Weighting:
    """The rule that a text names: `em`, `grid:window=16,measure=tvd`, or a preset such as `mt-paper`.

    Raises InputError for an unknown name, field or value, with the nearest one.
    """
    if text in PRESETS:
        return PRESETS[text]
    name, _, options = text.partition(":")
    if name not in RULES:
        raise InputError(f"weighting: {name!r} is unknown; {nearest(name, (*RULES, *PRESETS))}")
    rule = RULES[name]
    types = get_type_hints(rule)
    known = [field.name for field in fields(rule)]
    given: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        field, _, value = part.partition("=")
        if field not in known:
            mend = nearest(field, known) if known else "it has no fields"
            raise InputError(f"weighting {name}: field {field!r} is unknown; {mend}")
        given[field] = _read(name, field, value, types[field])
    made = rule(**given)
    assert isinstance(made, (Static, Adaptive))
    return made


def _read(rule: str, field: str, text: str, kind: Any) -> Any:
    """A field's value from its text, by the field's type: int, float, bool, a choice of words, or all."""
    kinds = get_args(kind) or (kind,)
    words = {"all": None} if type(None) in kinds else {"true": True, "false": False} if bool in kinds else {}
    if text in words:
        return words[text]
    number = int if int in kinds else float if float in kinds else None
    if number is None and not words:
        return text  # a choice: the rule checks it
    if number is not None:
        with suppress(ValueError):
            return number(text)
    wanted = [*(["a number"] if number else []), *words]
    raise InputError(f"weighting {rule}: {field} {text!r}; give {' or '.join(wanted)}")


def _normalised(values: Float[Array, "B R"], initial: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Divided by their sum; the initial weights where that is 0, or signed values cancel but for rounding."""
    total = values.sum(-1, keepdims=True)
    nothing = jnp.abs(total) <= 1e-6 * jnp.abs(values).sum(-1, keepdims=True)
    return jnp.where(nothing, initial, values / jnp.where(nothing, 1.0, total))
