"""How the views of a draft are weighted, and how the weights learn from what the target has
verified.

A rule is a frozen dataclass, static in the compiled program. Its state holds scores, never
distributions: after each block every verified place (the accepted drafts and the corrected one, not
the bonus) adds one score a candidate, and the weights of the next block follow from the scores of
the last `window` places of the same row alone. Before the first block has been verified they are
the given initial weights.

| rule                    | weights of the next block                                      | from                      |
|-------------------------|----------------------------------------------------------------|---------------------------|
| `static`                | the initial ones                                               | IbED                      |
| `random`                | drawn anew                                                     | TABED, IbED               |
| `grid`                  | the point of a simplex grid whose mixture cost least           | TABED's MT*, code's MTCP* |
| `inverse_error_power`   | E^(-1/tau), normalised; E is what the view alone cost          | TABED's code              |
| `inverse_error_softmax` | softmax(1 / (tau E))                                           | TABED's paper: MTCP*      |
| `hard_match`            | how often the view's likeliest token was the target's          | TABED                     |
| `adaboost`              | log-odds of the same                                           | TABED                     |

In text a rule is its name and what differs from its defaults, as `grid:window=16,measure=tvd`:
`str` writes it, `parse_weighting` reads it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decoding.mixtures import TINY, mixture_costs, simplex_grid, view_costs
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Bool, Float, Int

ERROR_FLOOR = 1e-11
"""Least accumulated error of a view: the inverse of a perfect one is 1e11, as in the released
code."""

CERTAIN = 1e5
"""AdaBoost's log-odds of a view that was always right, as in the released code."""

LARGEST = 1e6
"""The largest of a rule's numbers, and the inverse of the least: of others float32 would make
weights that are none."""

RANGES = {
    **{"window": (1, LARGEST), "steps": (1, LARGEST)},
    **{"tau": (0, LARGEST), "constant": (-LARGEST, LARGEST)},
}
"""Least and largest values of fields."""

ALL = "all"
"""How None is written in text."""


def _mend(
    value: Any, kinds: tuple[Any, ...], least: float = -math.inf, most: float = math.inf
) -> str:
    """Return what to give instead of a value that is of no such kind or out of range; nothing where
    it fits."""
    if isinstance(kinds[0], str):
        return "" if value in kinds else f" is unknown; {nearest(str(value), kinds)}"
    if type(value) not in (*kinds, *([int] if float in kinds else [])):
        return "; give a number or all" if type(None) in kinds else "; give a number"
    if value is None or (least <= value <= most and not 0 < abs(value) < 1 / LARGEST):
        return ""
    return (
        f"; give {least:g} or more, up to {most:g}"
        if most == LARGEST
        else f"; give from {least:g} to {most:g}"
    )


@dataclass(frozen=True)
class Weighting(ABC):
    """A rule. All its arrays are per row: no row's weights depend on another row."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if mend := _mend(value, get_args(kind) or (kind,), *RANGES.get(field.name, ())):
                raise InputError(f"weighting {self.name}: {field.name} {value!r}{mend}")

    def __str__(self) -> str:
        given = [
            f"{f.name}={_write(value)}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return ":".join(filter(None, [self.name, ",".join(given)]))

    @property
    def hard_labels(self) -> bool:
        """Whether the target's likeliest tokens are all that the rule looks at: it can learn from
        recorded answers."""
        return False

    @abstractmethod
    def init(self, weights: Float[Array, "B R"]) -> Any:
        """Return the state before the first block, with the initial weights."""

    @abstractmethod
    def weights(self, state: Any, keys: Array) -> Float[Array, "B R"]:
        """Return the next block's weights, on the simplex. `keys` [B] are the rows' own, new in
        each block."""

    @abstractmethod
    def observe(
        self,
        state: Any,
        weights: Float[Array, "B R"],
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> Any:
        """Learn from a block that was drafted with these weights.

        `p` and `view_probs` are the target's and the views' softmax at the row's temperature (0
        counts as 1), unfiltered; `valid` marks the places that were verified in context.
        """


@dataclass(frozen=True)
class Static(Weighting):
    """IbED: the initial weights, for good."""

    name = "static"

    @property
    def hard_labels(self) -> bool:
        return True

    def init(self, weights: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return weights

    def weights(self, state: Float[Array, "B R"], keys: Array) -> Float[Array, "B R"]:
        return state

    def observe(
        self, state: Float[Array, "B R"], weights: Array, p: Array, view_probs: Array, valid: Array
    ) -> Float[Array, "B R"]:
        return state


@dataclass(frozen=True)
class Random(Static):
    """Weights drawn anew for each block, the first included, from the row's own keys; initial
    weights play no part.

    `dirichlet` draws evenly from the simplex, as the papers say; `uniform` divides numbers from
    U(0, 1) by their sum, as the released code does, which favours the middle.
    """

    draw: Literal["dirichlet", "uniform"] = "dirichlet"

    name = "random"

    def weights(self, state: Float[Array, "B R"], keys: Array) -> Float[Array, "B R"]:
        # Exponential variates over their sum are Dirichlet(1, ..., 1).
        draw = jax.random.exponential if self.draw == "dirichlet" else jax.random.uniform
        drawn = jnp.maximum(jax.vmap(lambda key: draw(key, state.shape[1:]))(keys), TINY)
        return drawn / drawn.sum(-1, keepdims=True)


class Scores(struct.PyTreeNode):
    """What an adaptive rule remembers of each row: O(points), times the window where there is
    one."""

    initial: Float[Array, "B R"]
    weights: Float[Array, "B R"]
    """Weights of the next block."""
    count: Int[Array, " B"]
    """Verified places so far."""
    ring: Float[Array, "B window measures points"]
    """Scores of the places in the window; their running sum, in one slot, when the window is
    all."""


@dataclass(frozen=True)
class Adaptive(Weighting):
    """A rule that learns; subclasses say what a place scores and what weights the scores of a
    window give."""

    window: int | None = None
    """Verified places that count, the newest ones; None is all."""

    @abstractmethod
    def score(
        self,
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        weights: Float[Array, "B R"],
    ) -> Float[Array, "B J measures points"]:
        """Return the scores of each place, of views or of mixtures; the block was drafted with
        `weights`."""

    @abstractmethod
    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        """Return weights from the window's summed scores [B, measures, points] and the number of
        its places [B]."""

    def init(self, weights: Float[Array, "B R"]) -> Scores:
        batch, views = weights.shape
        p, view_probs = (
            jax.ShapeDtypeStruct((*n, batch, 1, 1), jnp.float32) for n in ((), (views,))
        )
        shape = jax.eval_shape(self.score, p, view_probs, weights).shape[2:]
        ring = jnp.zeros((batch, self.window or 1, *shape))
        return Scores(weights, weights, jnp.zeros(batch, jnp.int32), ring)

    def weights(self, state: Scores, keys: Array) -> Float[Array, "B R"]:
        return state.weights

    def observe(
        self,
        state: Scores,
        weights: Float[Array, "B R"],
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> Scores:
        scores = self.score(p, view_probs, weights)
        added = valid.sum(1)
        count = state.count + added
        if self.window is None:
            ring = state.ring + jnp.where(valid[..., None, None], scores, 0.0).sum(1, keepdims=True)
            places = count
        else:
            # Window 4, 5 places so far, valid [1, 1, 0]: ranks are 1, 2, 2, and the two go to slots
            # 5 % 4 and 6 % 4. What does not stay goes to slot 4, which there is not.
            rank = jnp.cumsum(valid, axis=1)
            stays = valid & (rank > added[:, None] - self.window)
            slot = jnp.where(stays, (state.count[:, None] + rank - 1) % self.window, self.window)
            ring = state.ring.at[jnp.arange(len(added))[:, None], slot].set(scores, mode="drop")
            places = jnp.minimum(count, self.window)
        chosen = self.choose(ring.sum(1), places, state.initial, p.shape[-1])
        return Scores(
            state.initial, jnp.where(count[:, None] > 0, chosen, state.initial), count, ring
        )


@dataclass(frozen=True)
class Grid(Adaptive):
    """TABED's w-grid: the weights, multiples of 1/steps, whose mixture would have done best.

    `kl` and `tvd` take the least summed divergence, `matches` the most places where the mixture's
    likeliest token is the target's, `matches_kl` and `matches_tvd` among those the least
    divergence. What is still tied goes to the first point of the grid: the least weight on the
    first view, then on the second.
    """

    measure: Literal["kl", "tvd", "matches", "matches_kl", "matches_tvd"] = "kl"
    steps: int = 10

    name = "grid"

    @property
    def hard_labels(self) -> bool:
        return self.measure == "matches"

    def score(
        self, p: Array, view_probs: Array, weights: Array
    ) -> Float[Array, "B J measures points"]:
        measures: Any = tuple(self.measure.replace("matches", "misses").split("_"))
        return mixture_costs(
            measures, p, view_probs, jnp.asarray(simplex_grid(len(view_probs), self.steps))
        )

    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        cost = scores[:, 0]
        if scores.shape[1] > 1:
            cost = jnp.where(cost <= cost.min(-1, keepdims=True), scores[:, 1], jnp.inf)
        return jnp.asarray(simplex_grid(initial.shape[1], self.steps))[jnp.argmin(cost, axis=-1)]


@dataclass(frozen=True)
class InverseErrorPower(Adaptive):
    """TABED's released reading of its formula for many views: w_r proportional to E_r^(-1/tau), E_r
    what view r alone cost.

    At tau 1 weights are inverse to errors; tau 0 takes the best view. The released scripts run it
    beside the grid.
    """

    measure: Literal["kl", "tvd"] = "kl"
    tau: float = 1.0

    name = "inverse_error_power"

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        return view_costs((self.measure,), p, view_probs)

    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        error = jnp.maximum(scores[:, 0], ERROR_FLOOR)
        if self.tau == 0:
            return jax.nn.one_hot(jnp.argmin(error, axis=-1), initial.shape[1])
        return jax.nn.softmax(self.logits(error), axis=-1)

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return -jnp.log(error) / self.tau


@dataclass(frozen=True)
class InverseErrorSoftmax(InverseErrorPower):
    """The formula that TABED prints, taken literally: softmax(1 / (tau E)).

    It all but takes the best view while errors are small, and forgets them as they grow. The
    measure's scale matters here: `tvd` is the L1 distance.
    """

    name = "inverse_error_softmax"

    def logits(self, error: Float[Array, "B R"]) -> Float[Array, "B R"]:
        return 1 / (self.tau * error)


@dataclass(frozen=True)
class HardMatch(Adaptive):
    """w_r proportional to the places where view r's likeliest token was the target's; initial where
    none was."""

    name = "hard_match"

    @property
    def hard_labels(self) -> bool:
        return True

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        return 1 - view_costs(("misses",), p, view_probs)

    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        return _normalised(scores[:, 0], initial)


@dataclass(frozen=True)
class AdaBoost(HardMatch):
    """SAMME's log-odds: w_r proportional to ln(a_r / (1 - a_r)) + constant * ln(V - 1), a_r its
    share of matches.

    Views worse than chance get weight 0 (in the released code a negative one, of which no mixture
    is made). At constant 1 the second term (10.4 at 32064 tokens) outweighs the first, and weights
    are near uniform.
    """

    constant: float = 1.0

    name = "adaboost"

    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        hits, misses = scores[:, 0], places[:, None] - scores[:, 0]
        odds = jnp.log(jnp.maximum(hits, 1)) - jnp.log(jnp.maximum(misses, 1))
        value = odds + self.constant * jnp.log(float(max(vocabulary - 1, 1)))
        value = jnp.where(misses <= 0, CERTAIN, jnp.where(hits <= 0, 0.0, value))
        return _normalised(jnp.maximum(value, 0), initial)


RULES: dict[str, type[Weighting]] = {
    rule.name: rule
    for rule in (
        Static,
        Random,
        Grid,
        InverseErrorPower,
        InverseErrorSoftmax,
        HardMatch,
        AdaBoost,
    )
}

PRESETS = {
    "mt-paper": Grid(measure="kl"),
    "mt-release": Grid(measure="matches_kl"),
    "mtcp-paper": InverseErrorSoftmax(measure="kl"),
    "mtcp-release": InverseErrorPower(measure="kl"),
}
"""TABED's rules, each for any number of views.

`mt-paper` and `mtcp-paper` are MT* (views M, T) and MTCP* (M, T, C, P) as the paper's appendix B.2
writes them; it names the grid of MT* but no measure, which is read as KL, its measure elsewhere.
`mt-release` and `mtcp-release` are the same kinds of rule in the form of the released code. Its
scripts run every mixture, MT* and MTCP* alike, by that grid, by that inverse KL and by inverse L1
(`inverse_error_power:measure=tvd`); no file of it says which was printed."""


def parse_weighting(text: str) -> Weighting:
    """Return the rule that a text names: `adaboost`, `grid:window=16,measure=tvd`, or a preset such
    as `mt-paper`.

    Raises InputError for an unknown name, field or value, with the nearest one.
    """
    if text in PRESETS:
        return PRESETS[text]
    name, _, options = text.partition(":")
    if name not in RULES:
        raise InputError(f"weighting: {name!r} is unknown; {nearest(name, (*RULES, *PRESETS))}")
    rule = RULES[name]
    known = [field.name for field in fields(rule)]
    given: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        field, _, value = part.partition("=")
        if field not in known:
            mend = nearest(field, known) if known else "it has no fields"
            raise InputError(f"weighting {name}: field {field!r} is unknown; {mend}")
        given[field] = _read(value)
    return rule(**given)


def _read(text: str) -> Any:
    """Return a field's value from its text: `ALL`, a number, or a choice."""
    if text == ALL:
        return None
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _write(value: Any) -> str:
    """Return what `_read` reads as this value."""
    return ALL if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _normalised(values: Float[Array, "B R"], initial: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Return values, 0 or more, divided by their sum; the initial weights where that is 0."""
    total = values.sum(-1, keepdims=True)
    return jnp.where(total > 0, values / jnp.where(total > 0, total, 1.0), initial)
