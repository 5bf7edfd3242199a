"""Weight the views of a draft, and learn the weights from verified tokens.

A rule is a frozen dataclass, static in the compiled program. Its state holds scores, never
distributions. After each block every verified place (the accepted drafts and the corrected one, not
the bonus token) adds one score for each candidate. The next block's weights follow from the scores
of the row's last `window` places. Before any verified place they are the initial weights.

| rule                    | weights of the next block                         | source       |
|-------------------------|---------------------------------------------------|--------------|
| `static`                | the initial weights                               | IbED         |
| `random`                | drawn anew                                        | TABED, IbED  |
| `grid`                  | point of a simplex grid with the cheapest mixture | TABED: MT*   |
| `inverse_error_power`   | E^(-1/tau), normalised; E is the view's own cost  | TABED's code |
| `inverse_error_softmax` | softmax(1 / (tau E))                              | TABED: MTCP* |
| `hard_match`            | share of places whose best token was the target's | TABED        |
| `adaboost`              | log-odds of the same, or fixed by `errors`        | TABED        |

A rule is written as its name and the fields that differ from their defaults, as in
`grid:window=16,measure=tvd`: `str` writes it, `parse_weighting` reads it. A field with a number for
each view divides them by `/`, as in `adaboost:errors=0.4/0.5`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decoding.drafting.mixtures import TINY, mixture_costs, simplex_grid, view_costs
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Bool, Float, Int

ERROR_FLOOR = 1e-11
"""Least accumulated error of a view, as in the released code: a perfect view has weight 1e11."""
CERTAIN = 1e5  # AdaBoost's log-odds of a view that was always right, as in the released code
LARGEST = 1e6
"""Largest value of a field, and inverse of the smallest. Larger values overflow float32."""
COUNT = (1, LARGEST)
RANGES = {
    "window": COUNT,
    "decay": (0, 1),
    "steps": COUNT,
    "tau": (0, LARGEST),
    "constant": (-LARGEST, LARGEST),
    "errors": (0, 1),
}
"""Least and largest values of fields."""
ALL = "all"  # text form of None
Kept = TypeVar("Kept")  # state of a rule


def _mend(
    value: Any, kinds: tuple[Any, ...], least: float = -math.inf, most: float = math.inf
) -> str:
    """Return the mend for a value of the wrong kind or out of range, or nothing if it fits."""
    if kinds[-1] is ...:
        if not isinstance(value, tuple):
            return "; give a number for each view, as 0.4/0.5"
        mends = (_mend(part, kinds[:-1], least, most) for part in value)
        return next(filter(None, mends), "")
    if isinstance(kinds[0], str):
        return "" if value in kinds else f" is unknown; {nearest(str(value), kinds)}"
    if type(value) not in (*kinds, *([int] if float in kinds else [])):
        return "; give a number or all" if type(None) in kinds else "; give a number"
    if value is None or (least <= value <= most and not 0 < abs(value) < 1 / LARGEST):
        return ""
    return f"; give {least:g} or more, up to {most:g}"


@dataclass(frozen=True)
class Weighting(ABC, Generic[Kept]):
    """Choose the weights of each row's next block. No row's weights depend on another row."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if mend := _mend(value, get_args(kind) or (kind,), *RANGES.get(field.name, ())):
                raise InputError(f"weighting {self.name}: {field.name} {value!r}{mend}")

    def __str__(self) -> str:
        settings = [
            f"{f.name}={_write(value)}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return ":".join(filter(None, [self.name, ",".join(settings)]))

    @property
    def hard_labels(self) -> bool:
        """Return whether the rule reads only the target's likeliest tokens, as answers record."""
        return False

    def first(self, weights: tuple[float, ...], vocabulary: int) -> tuple[float, ...]:
        """Return the first block's weights, given those that were asked for."""
        return weights

    @abstractmethod
    def init(self, weights: Float[Array, "B R"]) -> Kept:
        """Return the state before the first block, given the initial weights."""

    @abstractmethod
    def weights(self, state: Kept, keys: Array) -> Float[Array, "B R"]:
        """Return the next block's weights, on the simplex.

        keys: Each row's own keys [B], new for each block.
        """

    @abstractmethod
    def observe(
        self,
        state: Kept,
        weights: Float[Array, "B R"],
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> Kept:
        """Return the state after a verified block.

        Args:
          weights: Weights that the block was drafted with.
          p, view_probs: Target's and views' softmax at the row's temperature (1 for 0), unfiltered.
          valid: Whether each place was verified in context.
        """


@dataclass(frozen=True)
class Static(Weighting[Float[Array, "B R"]]):
    """Keep the initial weights (IbED)."""

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
    """Draw new weights for each block from the row's own keys, whatever the initial weights.

    `dirichlet` draws evenly from the simplex, as the papers say. `uniform` divides numbers from
    U(0, 1) by their sum, as the released code does, which favours the middle.
    """

    name = "random"
    draw: Literal["dirichlet", "uniform"] = "dirichlet"

    def weights(self, state: Float[Array, "B R"], keys: Array) -> Float[Array, "B R"]:
        # Exponential variates over their sum are Dirichlet(1, ..., 1).
        draw = jax.random.exponential if self.draw == "dirichlet" else jax.random.uniform
        variates = jnp.maximum(jax.vmap(lambda key: draw(key, state.shape[1:]))(keys), TINY)
        return variates / variates.sum(-1, keepdims=True)


class Scores(struct.PyTreeNode):
    """Hold the state of an adaptive rule: O(points) for each row and place of the window."""

    initial: Float[Array, "B R"]
    weights: Float[Array, "B R"]
    """Weights of the next block."""
    count: Int[Array, " B"]
    """Number of verified places so far."""
    ring: Float[Array, "B window measures points"]
    """Scores of the window's places; without a window their running sum, decayed, in one slot."""


@dataclass(frozen=True)
class Adaptive(Weighting[Scores]):
    """Learn weights from scores. Subclasses score a place, and choose weights from the sums."""

    window: int | None = None
    """Number of newest verified places that count; None: all."""
    decay: float = 1.0
    """Factor of a place's score for each verified place after it."""

    @abstractmethod
    def score(
        self,
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        weights: Float[Array, "B R"],
    ) -> Float[Array, "B J measures points"]:
        """Return the scores of views or mixtures at each place of a block.

        weights: Weights that the block was drafted with.
        """

    @abstractmethod
    def choose(
        self, scores: Array, places: Array, initial: Array, vocabulary: int
    ) -> Float[Array, "B R"]:
        """Return the next weights.

        Args:
          scores: Sums of the window's scores, [B, measures, points].
          places: Number of the window's places, [B]; with decay, the sum of their factors.
        """

    def init(self, weights: Float[Array, "B R"]) -> Scores:
        batch, views = weights.shape
        p = jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32)
        each = jax.ShapeDtypeStruct((views, batch, 1, 1), jnp.float32)
        shape = jax.eval_shape(self.score, p, each, weights).shape[2:]
        ring = jnp.zeros((batch, self.window or 1, *shape))
        return Scores(weights, weights, jnp.zeros(batch, jnp.int32), ring)

    def weights(self, state: Scores, keys: Array) -> Float[Array, "B R"]:
        return state.weights

    def observe(
        self, state: Scores, weights: Array, p: Array, view_probs: Array, valid: Array
    ) -> Scores:
        scores = self.score(p, view_probs, weights)
        added = valid.sum(1)
        count = state.count + added
        rank = jnp.cumsum(valid, axis=1)
        if self.window is None:
            ring = state.ring
            if self.decay != 1:
                # added = 2, rank 1, 2, 2: the places have 1, 0 and 0 verified ones after them.
                ring = ring * (self.decay**added)[:, None, None, None]
                scores = scores * (self.decay ** (added[:, None] - rank))[..., None, None]
            ring = ring + jnp.where(valid[..., None, None], scores, 0.0).sum(1, keepdims=True)
            summed, places = ring.sum(1), count
        else:
            # Window 4, 5 places so far, valid [1, 1, 0]: ranks are 1, 2, 2, and the scores go to
            # slots 5 % 4, 6 % 4 and the out-of-range slot 4, so the last write is dropped.
            stays = valid & (rank > added[:, None] - self.window)
            slot = jnp.where(stays, (state.count[:, None] + rank - 1) % self.window, self.window)
            ring = state.ring.at[jnp.arange(len(added))[:, None], slot].set(scores, mode="drop")
            summed, places = ring.sum(1), jnp.minimum(count, self.window)
            if self.decay != 1:
                age = (count[:, None] - 1 - jnp.arange(self.window)) % self.window
                summed = (ring * (self.decay**age)[..., None, None]).sum(1)
        if self.decay != 1:  # 1 + decay + decay^2 + ...
            places = (1 - self.decay**places) / (1 - self.decay)
        next_weights = self.choose(summed, places, state.initial, p.shape[-1])
        next_weights = jnp.where(count[:, None] > 0, next_weights, state.initial)
        return Scores(state.initial, next_weights, count, ring)


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

    def score(self, p: Array, view_probs: Array, weights: Array) -> Array:
        measures: Any = tuple(self.measure.replace("matches", "misses").split("_"))
        points = jnp.asarray(simplex_grid(len(view_probs), self.steps))
        return mixture_costs(measures, p, view_probs, points)

    def choose(self, scores: Array, places: Array, initial: Array, vocabulary: int) -> Array:
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

    def choose(self, scores: Array, places: Array, initial: Array, vocabulary: int) -> Array:
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

    @property
    def hard_labels(self) -> bool:
        return True

    def score(self, p: Array, view_probs: Array, weights: Array) -> Float[Array, "B J measures R"]:
        return 1 - view_costs(("misses",), p, view_probs)

    def choose(self, scores: Array, places: Array, initial: Array, vocabulary: int) -> Array:
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
        if not self.errors:
            return weights
        if len(self.errors) != len(weights):
            raise InputError(
                f"weighting {self.name}: errors {_write(self.errors)} are {len(self.errors)} for "
                f"{len(weights)} views; give one for each"
            )

        def value(error: float) -> float:
            if error in (0, 1):
                return CERTAIN * (1 - error)
            chance = self.constant * math.log(max(vocabulary - 1, 1))
            return max(math.log(1 / error - 1) + chance, 0)

        values = [value(error) for error in self.errors]
        return tuple(each / sum(values) for each in values) if any(values) else weights

    def choose(self, scores: Array, places: Array, initial: Array, vocabulary: int) -> Array:
        if self.errors:
            return initial
        hits, misses = scores[:, 0], places[:, None] - scores[:, 0]
        odds = jnp.log(jnp.maximum(hits, 1)) - jnp.log(jnp.maximum(misses, 1))
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


def _write(value: Any) -> str:
    """Return the text that `_read` reads as this value."""
    if isinstance(value, tuple):
        return "/".join(map(_write, value))
    return ALL if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _normalised(values: Float[Array, "B R"], initial: Float[Array, "B R"]) -> Float[Array, "B R"]:
    """Return non-negative values divided by their sum, or the initial weights if that is 0."""
    total = values.sum(-1, keepdims=True)
    return jnp.where(total > 0, values / jnp.where(total > 0, total, 1.0), initial)
