"""How the views of a draft are weighted, and how the weights learn from what the target has verified.

A rule is a frozen dataclass, static in the compiled program. Its state holds scores, never distributions: after
each block every verified place (the accepted drafts and the corrected one, not the bonus) adds one score a
candidate, and the weights of the next block follow from the scores of the last `window` places of the same row
alone. Before the first block has been verified they are the given initial weights.

| rule                    | weights of the next block                                      | from                      |
|-------------------------|----------------------------------------------------------------|---------------------------|
| `static`                | the initial ones                                               | IbED                      |
| `random`                | drawn anew                                                     | TABED, IbED               |
| `grid`                  | the point of a simplex grid whose mixture cost least           | TABED's MT*, code's MTCP* |
| `inverse_error_power`   | E^(-1/tau), normalised; E is what the view alone cost          | TABED's code              |
| `inverse_error_softmax` | softmax(1 / (tau E))                                           | TABED's paper: MTCP*      |
| `hard_match`            | how often the view's likeliest token was the target's          | TABED                     |
| `adaboost`              | log-odds of the same                                           | TABED                     |
| `hedge`                 | mean of the grid, each point weighted by exp(-rate * its cost) | here                      |
| `exponentiated_gradient`| the initial ones times exp(rate * summed acceptance gradient)  | here                      |
| `em`                    | one damped EM step for min_w KL(p, sum_r w_r q_r) a place      | here                      |

In text a rule is its name and what differs from its defaults, as `grid:window=16,measure=tvd`: `str` writes it,
`parse_weighting` of `weighting_rules`, where the adaptive rules are, reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decoding.mixtures import TINY
from jaxspec.errors import InputError, nearest
from jaxspec.typing import Array, Bool, Float, Int


class Weighting(Protocol):
    """What a speculator asks of a rule. All arrays are per row: no row's weights depend on another row."""

    @property
    def hard_labels(self) -> bool:
        """Whether the target's likeliest tokens are all that the rule looks at: it can learn from recorded answers."""
        ...

    def init(self, weights: Float[Array, "B R"]) -> Any:
        """The state before the first block, with the initial weights."""
        ...

    def weights(self, state: Any, keys: Array) -> Float[Array, "B R"]:
        """The next block's weights, on the simplex. `keys` [B] are the rows' own, new in each block."""
        ...

    def observe(
        self,
        state: Any,
        weights: Float[Array, "B R"],
        p: Float[Array, "B J V"],
        view_probs: Float[Array, "R B J V"],
        valid: Bool[Array, "B J"],
    ) -> Any:
        """Learns from a block that was drafted with these weights. `p` and `view_probs` are the target's and the
        views' softmax at the row's temperature (0 counts as 1), unfiltered; `valid` marks the places that were verified
        in context."""
        ...


LARGEST = 1e6
"""The largest of a rule's rates, temperatures and counts; the least one that is not 0 is its inverse."""


@dataclass(frozen=True)
class Rule:
    """What all rules share: a name, a text form, and checks of their fields."""

    name: ClassVar[str]

    @property
    def hard_labels(self) -> bool:
        return False

    def __str__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        given = ",".join(f"{name}={_write(value)}" for name, value, default in values if value != default)
        return f"{self.name}:{given}" if given else self.name

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise InputError(f"weighting {self.name}: {field} {value!r} is unknown; {nearest(value, choices)}")

    def _check_range(self, field: str, least: float, most: float = float("inf")) -> None:
        value = getattr(self, field)
        # Numbers of which float32 makes 0 or infinity would make weights that are no numbers.
        if not least <= value <= min(most, LARGEST) or 0 < value < 1 / LARGEST:
            upwards = f"from {least:g} to {most:g}" if most < float("inf") else f"{least:g} or more, up to {LARGEST:g}"
            raise InputError(f"weighting {self.name}: {field} {value:g}; give {upwards}")


@dataclass(frozen=True)
class Static(Rule):
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


Draw = Literal["dirichlet", "uniform"]


@dataclass(frozen=True)
class Random(Static):
    """Weights drawn anew for each block, the first included, from the row's own keys; initial weights play no part.

    `dirichlet` draws evenly from the simplex, as the papers say; `uniform` divides numbers from U(0, 1) by their
    sum, as the released code does, which favours the middle.
    """

    draw: Draw = "dirichlet"

    name = "random"

    def __post_init__(self) -> None:
        self._check_choice("draw", get_args(Draw))

    def weights(self, state: Float[Array, "B R"], keys: Array) -> Float[Array, "B R"]:
        # Exponential variates over their sum are Dirichlet(1, ..., 1).
        draw = jax.random.exponential if self.draw == "dirichlet" else jax.random.uniform
        drawn = jnp.maximum(jax.vmap(lambda key: draw(key, state.shape[1:]))(keys), TINY)
        return drawn / drawn.sum(-1, keepdims=True)


class Scores(struct.PyTreeNode):
    """What an adaptive rule remembers of each row: O(candidates), times the window where there is one."""

    initial: Float[Array, "B R"]
    weights: Float[Array, "B R"]
    """Weights of the next block."""
    seen: Int[Array, " B"]
    """Verified places so far."""
    kept: Float[Array, "B H M C"]
    """Scores of the last H places, a ring; their running sum, H being 1, when the window is all."""


@dataclass(frozen=True)
class Adaptive(Rule, ABC):
    """A rule that learns; subclasses say what a place scores and what weights the scores of a window give."""

    window: int | None = None
    """Verified places that count, the newest ones; None is all."""

    def __post_init__(self) -> None:
        if self.window is not None:
            self._check_range("window", 1)

    @abstractmethod
    def score(
        self, p: Float[Array, "B J V"], view_probs: Float[Array, "R B J V"], weights: Float[Array, "B R"]
    ) -> Float[Array, "B J M C"]:
        """M scores of C candidates at each place; `weights` are those that the block was drafted with."""

    @abstractmethod
    def choose(
        self, total: Float[Array, "B M C"], places: Int[Array, " B"], initial: Float[Array, "B R"], vocabulary: int
    ) -> Float[Array, "B R"]:
        """Weights from the window's summed scores and how many places it holds."""

    def init(self, weights: Float[Array, "B R"]) -> Scores:
        views, batch = weights.shape[1], weights.shape[0]
        probs = jax.ShapeDtypeStruct((batch, 1, 1), jnp.float32)
        scores = jax.eval_shape(self.score, probs, jax.ShapeDtypeStruct((views, batch, 1, 1), jnp.float32), weights)
        kept = jnp.zeros((batch, self.window or 1, *scores.shape[2:]))
        return Scores(weights, weights, jnp.zeros(batch, jnp.int32), kept)

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
        seen = state.seen + added
        if self.window is None:
            kept = state.kept + jnp.where(valid[..., None, None], scores, 0.0).sum(1, keepdims=True)
            places = seen
        else:
            rank = jnp.cumsum(valid, axis=1)
            stays = valid & (rank > added[:, None] - self.window)
            slot = jnp.where(stays, (state.seen[:, None] + rank - 1) % self.window, self.window)
            kept = state.kept.at[jnp.arange(len(added))[:, None], slot].set(scores, mode="drop")
            places = jnp.minimum(seen, self.window)
        chosen = self.choose(kept.sum(1), places, state.initial, p.shape[-1])
        return Scores(state.initial, jnp.where(seen[:, None] > 0, chosen, state.initial), seen, kept)


def _write(value: Any) -> str:
    if value is None:
        return "all"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
