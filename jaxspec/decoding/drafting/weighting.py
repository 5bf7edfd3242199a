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
`grid:window=16,measure=tvd`: `str` writes it, `parse_weighting` (`rules.py`) reads it. A field with
a number for each view divides them by `/`, as in `adaboost:errors=0.4/0.5`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decoding.drafting.mixtures import TINY
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Bool, Float, Int

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
"""Smallest and largest values of fields."""
ALL = "all"  # text form of None
Weights = Float[Array, "B R"]
"""Weights of each row's views."""
State = TypeVar("State")  # state of a rule


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
        number = "number" if float in kinds else "whole number"
        return f"; give a {number} or all" if type(None) in kinds else f"; give a {number}"
    if value is not None and 0 < abs(value) < 1 / LARGEST:
        return f"; give 0 or at least {1 / LARGEST:g}"
    if value is None or least <= value <= most:
        return ""
    return f"; give {least:g} or more, up to {most:g}"


def field_text(value: Any) -> str:
    """Return the text of a field's value, which `parse_weighting` reads."""
    if isinstance(value, tuple):
        return "/".join(map(field_text, value))
    return ALL if value is None else str(value).removesuffix(".0")


@dataclass(frozen=True)
class Weighting(ABC, Generic[State]):
    """Choose the weights of each row's next block. No row's weights depend on another row."""

    name: ClassVar[str]
    hard_labels: ClassVar[bool] = False
    """Whether the rule reads only the target's likeliest tokens, as answers record."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for field in fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            if mend := _mend(value, get_args(kind) or (kind,), *RANGES.get(field.name, ())):
                raise InputError(f"weighting {self.name}: {field.name} {value!r}{mend}")

    def __str__(self) -> str:
        settings = [
            f"{f.name}={field_text(value)}"
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default
        ]
        return ":".join(filter(None, [self.name, ",".join(settings)]))

    def first(self, weights: tuple[float, ...], vocabulary: int) -> tuple[float, ...]:
        """Return the first block's weights, given those that were asked for."""
        return weights

    @abstractmethod
    def init(self, weights: Weights) -> State:
        """Return the state before the first block, given the initial weights."""

    @abstractmethod
    def weights(self, state: State, keys: Array) -> Weights:
        """Return the next block's weights, on the simplex.

        keys: Each row's own keys [B], new for each block.
        """

    @abstractmethod
    def observe(
        self,
        state: State,
        weights: Weights,
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> State:
        """Return the state after a verified block.

        Args:
          weights: Weights that the block was drafted with.
          p, view_probs: Target's and views' softmax at the row's temperature (1 for 0), unfiltered.
          valid: Whether each place was verified in context.
        """


@dataclass(frozen=True)
class Static(Weighting[Weights]):
    """Keep the initial weights (IbED)."""

    name = "static"
    hard_labels: ClassVar = True

    def init(self, weights: Weights) -> Weights:
        return weights

    def weights(self, state: Weights, keys: Array) -> Weights:
        return state

    def observe(
        self, state: Weights, weights: Array, p: Array, view_probs: Array, valid: Array
    ) -> Weights:
        return state


@dataclass(frozen=True)
class Random(Static):
    """Draw new weights for each block from the row's own keys, whatever the initial weights.

    `dirichlet` draws evenly from the simplex, as the papers say. `uniform` divides numbers from
    U(0, 1) by their sum, as the released code does, which favours the middle.
    """

    name = "random"
    draw: Literal["dirichlet", "uniform"] = "dirichlet"

    def weights(self, state: Weights, keys: Array) -> Weights:
        # Exponential variates over their sum are Dirichlet(1, ..., 1).
        draw = jax.random.exponential if self.draw == "dirichlet" else jax.random.uniform
        variates = jnp.maximum(jax.vmap(lambda key: draw(key, state.shape[1:]))(keys), TINY)
        return variates / variates.sum(-1, keepdims=True)


class Scores(struct.PyTreeNode):
    """Hold the state of an adaptive rule: O(points) for each row and place of the window."""

    initial: Weights
    weights: Weights
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
        self, p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"], weights: Weights
    ) -> Float[Array, "B J measures points"]:
        """Return the scores of views or mixtures at each place of a block.

        weights: Weights that the block was drafted with.
        """

    @abstractmethod
    def choose(self, scores: Array, initial: Array, vocabulary: int) -> Weights:
        """Return the next weights.

        scores: Sums of the window's scores, [B, measures, points].
        """

    def init(self, weights: Weights) -> Scores:
        batch, views = weights.shape
        p = jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32)
        each = jax.ShapeDtypeStruct((views, batch, 1, 1), jnp.float32)
        shape = jax.eval_shape(self.score, p, each, weights).shape[2:]
        ring = jnp.zeros((batch, self.window or 1, *shape))
        return Scores(weights, weights, jnp.zeros(batch, jnp.int32), ring)

    def weights(self, state: Scores, keys: Array) -> Weights:
        return state.weights

    def observe(
        self, state: Scores, weights: Array, p: Array, view_probs: Array, valid: Array
    ) -> Scores:
        """Add the block's scores to the window's, and choose the next weights by their sums."""
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
            summed = ring.sum(1)
        else:
            # Window 4, 5 places so far, valid [1, 1, 0]: ranks are 1, 2, 2, and the scores go to
            # slots 5 % 4, 6 % 4 and the out-of-range slot 4, so the last write is dropped.
            stays = valid & (rank > added[:, None] - self.window)
            slot = jnp.where(stays, (state.count[:, None] + rank - 1) % self.window, self.window)
            ring = state.ring.at[jnp.arange(len(added))[:, None], slot].set(scores, mode="drop")
            summed = ring.sum(1)
            if self.decay != 1:
                age = (count[:, None] - 1 - jnp.arange(self.window)) % self.window
                summed = (ring * (self.decay**age)[..., None, None]).sum(1)
        next_weights = self.choose(summed, state.initial, p.shape[-1])
        next_weights = jnp.where(count[:, None] > 0, next_weights, state.initial)
        return Scores(state.initial, next_weights, count, ring)
