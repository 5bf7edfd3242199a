"""Combine several models' logits to the one distribution that they write from.

| text                   | distribution, with l_m the logits of model m and T the temperature  |
|------------------------|---------------------------------------------------------------------|
| `weighted:0.6,0.4`     | sum_m w_m softmax(l_m / T): any number of models, weights sum to 1  |
| `contrastive:mu=0.1`   | softmax((l_0 - mu l_1) / T): 0 is the expert, 1 the amateur (CoS)   |
| `contrastive:beta=0.5` | softmax(((1 + beta) l_0 - beta l_1) / T) (O'Brien and Lewis 2023)   |
| `...,plausibility=0.1` | the same of tokens with p_0(x) >= 0.1 max p_0 only (Li et al. 2023) |
| `logits:1.5,-0.5`      | softmax(sum_m a_m l_m / T): realignment (Liu et al. 2024)           |

A coefficient belongs to a model by its index in the list, whatever the model's current role. The
temperature enters as above; top-k and top-p filter the *combined* distribution (the released CoS
code filters each model's before averaging). All is float32. Model 0 at temperature 1 decides which
tokens are plausible.

At temperature 0 the combined distribution is one-hot at the argmax of the combined logits or, for
`weighted`, of sum_m w_m softmax(l_m), as in the released code. `weighted:0.6,0.4,greedy=vote` is
the other reading: each model's argmax gets its weight as votes, and the first rule breaks ties.

Processors (`decoding.processors`) change the combined distribution r: T log r are its scores, whose
likeliest token is that of temperature 0. A row without any keeps the law above to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.decoding.processors import History, processed
from jaxspec.decoding.settings import Settings
from jaxspec.errors import InputError, nearest
from jaxspec.sampling import Sampling, argmax, by_place, tempered
from jaxspec.typing import Array, Float, Int

GreedyRule = Literal["mean", "vote"]
Logits = Float[Array, "M B V"]
"""Logits of each model."""


class Combination(Protocol):
    """Combine distributions. A pytree: its numbers are traced, so a new weight compiles nothing."""

    def soft(self, logits: Logits, temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
        """Return the combined distribution before top-k and top-p; temperature 0 counts as 1."""
        ...

    def best(self, logits: Logits, soft: Float[Array, "B V"]) -> Int[Array, " B"]:
        """Return the token at temperature 0, given `soft` at temperature 1."""
        ...


def default_proposer(combination: Combination, costs: Sequence[float]) -> int:
    """Return the number of the model that should propose, given what a pass of each costs.

    In a weighted mean it is the one with the largest weight for its cost. A proposal of weight w
    is accepted with probability w or more. If two models cost the same, w is then 0.5 or more
    (Corollary 3.3). If they cost c and c', w is c / (c + c') or more, so there is a draft length
    at which proposals cost no time (Corollary 3.5). Other combinations have no bound, and the
    cheapest model proposes, as in the paper.
    """
    weights = combination.weights if isinstance(combination, Weighted) else np.ones(len(costs))
    return int(np.argmax(np.asarray(weights) / np.asarray(costs)))


def check_settings(combination: object, settings: Settings) -> None:
    """Raise InputError for a setting that changes scores, which votes do not have."""
    changed = [name for name in settings.changed if name != "min_p"]  # it filters probabilities
    if changed and getattr(combination, "greedy", None) == "vote":
        value = getattr(settings, changed[0])
        raise InputError(
            f"{changed[0]}: {value!r:.60} changes scores, which greedy=vote does not have; "
            "leave out one of them"
        )


def joint_law(
    combination: Combination,
    logits: Float[Array, "M B T V"],
    options: Sampling,
    history: History | None,
) -> tuple[Float[Array, "B T V"], Int[Array, "B T"]]:
    """Return the combined distribution at T places before filters, and the greedy tokens.

    Votes have no scores; `check_settings` refuses requests that would change them.

    history: Tokens before the places; None without processors.
    """

    def of_place(logits: Logits) -> tuple[Float[Array, "B V"], Int[Array, " B"]]:
        soft = combination.soft(logits, options.temperature)
        return soft, combination.best(logits, soft)

    if logits.shape[2] == 1:  # a function of the user's may have no rule for `vmap`
        soft, best = (x[:, None] for x in of_place(logits[:, :, 0]))
    else:
        soft, best = jax.vmap(of_place, in_axes=2, out_axes=1)(logits)
    processors = options.processors
    if history is None or processors is None:
        return soft, best
    warmth = jnp.where(options.temperature > 0, options.temperature, 1.0)[:, None, None]
    scores = processed(warmth * jnp.log(soft), history, processors)
    neutral = processors.neutral[:, None]
    law = by_place(lambda scores: tempered(scores, options.temperature))(scores)
    return jnp.where(neutral[..., None], soft, law), jnp.where(neutral, best, argmax(scores))


class Weighted(struct.PyTreeNode):
    """Average probabilities: sum_m w_m softmax(l_m / T)."""

    weights: Float[Array, " M"]
    greedy: GreedyRule = struct.field(pytree_node=False, default="mean")

    def soft(self, logits: Logits, temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
        return _sum(self.weights, tempered(logits, temperature))

    def best(self, logits: Logits, soft: Float[Array, "B V"]) -> Int[Array, " B"]:
        if self.greedy == "vote":
            ballots = jax.nn.one_hot(argmax(logits), logits.shape[-1])
            votes = _sum(self.weights, ballots)
            # Equal up to rounding: 0.2 + 0.3 against 0.5.
            soft = jnp.where(votes > votes.max(-1, keepdims=True) - 1e-6, soft, -1.0)
        return argmax(soft)


class Linear(struct.PyTreeNode):
    """Add logits: softmax(sum_m a_m l_m / T) of tokens with p_0(x) >= plausibility * max p_0.

    A token that a model with a coefficient cannot know (l_m = -inf) is never written: there
    l_0 - mu l_1 would be infinite.
    """

    coefficients: Float[Array, " M"]
    plausibility: Float[Array, ""]
    """0 keeps all tokens."""

    def soft(self, logits: Logits, temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
        return tempered(self._logits(logits), temperature)

    def best(self, logits: Logits, soft: Float[Array, "B V"]) -> Int[Array, " B"]:
        return argmax(self._logits(logits))  # in `soft` small differences may round away

    def _logits(self, logits: Float[Array, "M B V"]) -> Float[Array, "B V"]:
        logits = logits.astype(jnp.float32)
        unknown = logits == -jnp.inf
        shared = ~jnp.any(unknown & (self.coefficients[:, None, None] != 0), axis=0)
        total = _sum(self.coefficients, jnp.where(unknown, 0.0, logits))
        expert = jnp.where(shared, logits[0], -jnp.inf)
        plausible = expert >= expert.max(-1, keepdims=True) + jnp.log(self.plausibility)
        return jnp.where(plausible & shared, total, -jnp.inf)


class Custom(struct.PyTreeNode):
    """Apply your own traced function [M,B,V] -> [B,V]."""

    function: Callable[[Array], Array] = struct.field(pytree_node=False)
    of: Literal["probs", "logits"] = struct.field(pytree_node=False, default="probs")
    """Argument: `probs`, softmax(l_m / T), with the result scaled to sum 1; or `logits`, l_m."""

    def soft(self, logits: Logits, temperature: Float[Array, " B"]) -> Float[Array, "B V"]:
        if self.of == "logits":
            return tempered(self.function(logits.astype(jnp.float32)), temperature)
        mass = self.function(tempered(logits, temperature))
        return mass / mass.sum(-1, keepdims=True)

    def best(self, logits: Logits, soft: Float[Array, "B V"]) -> Int[Array, " B"]:
        return argmax(soft)


KINDS = ("weighted", "contrastive", "logits")
LARGEST = 1e6
"""Largest number of a combination: sums of logits stay finite in float32."""


def parse_combination(text: str, models: int) -> Combination:
    """Return the combination that a text names (see the table above) for this many models.

    Raises InputError for unknown kinds and options, and for numbers that do not fit.
    """
    kind, _, fields = text.partition(":")
    parts = [part.strip() for part in fields.split(",") if part.strip()]
    numbers = [_number(text, part) for part in parts if "=" not in part]
    if kind == "weighted":
        options = _options(text, parts, ("greedy",))
        return weighted(numbers or [1 / models] * models, models, options.get("greedy", "mean"))
    if kind == "logits":
        options = _options(text, parts, ("plausibility",))
        return linear(text, numbers, models, _number(text, options.get("plausibility", "0")))
    if kind != "contrastive":
        raise InputError(f"combination {text!r}: {kind!r} is unknown; {nearest(kind, KINDS)}")
    options = _options(text, parts, ("mu", "beta", "plausibility"))
    if numbers or ("mu" in options and "beta" in options):
        raise InputError(f"combination {text!r}: give mu or beta by name, as contrastive:mu=0.1")
    if models != 2:
        raise InputError(
            f"combination {text!r}: takes an expert and an amateur, not {models} models; give 2"
        )
    amateur = _number(text, options.get("beta", options.get("mu", "0.1")))
    expert = 1 + amateur if "beta" in options else 1.0
    return linear(text, [expert, -amateur], models, _number(text, options.get("plausibility", "0")))


def weighted(weights: list[float], models: int, greedy: str = "mean") -> Weighted:
    """Return the weighted combination, or raise InputError for wrong weights."""
    listing = ",".join(f"{w:g}" for w in weights)
    if len(weights) != models:
        raise InputError(
            f"weights: {listing} are {len(weights)} for {models} models; give one for each"
        )
    if min(weights) < 0 or not abs(sum(weights) - 1) <= 1e-6:
        raise InputError(
            f"weights: {listing} sum to {sum(weights):g}; give non-negative numbers that sum to 1"
        )
    if greedy not in get_args(GreedyRule):
        raise InputError(
            f"weights: greedy={greedy!r} is unknown; {nearest(greedy, get_args(GreedyRule))}"
        )
    return Weighted(np.asarray(weights, np.float32), greedy)  # type: ignore[arg-type]


def linear(text: str, coefficients: list[float], models: int, plausibility: float = 0.0) -> Linear:
    """Return the linear combination, or raise InputError, which cites `text`."""
    if len(coefficients) != models:
        raise InputError(
            f"combination {text!r}: {len(coefficients)} numbers for {models} models; "
            "give one for each"
        )
    if not 0 <= plausibility <= 1:
        raise InputError(
            f"combination {text!r}: plausibility {plausibility:g}; give 0 (all tokens) to 1"
        )
    numbers: Any = np.asarray(coefficients, np.float32)
    return Linear(numbers, np.float32(plausibility))  # type: ignore[arg-type]


def _sum(weights: Float[Array, " M"], of: Float[Array, "M B V"]) -> Float[Array, "B V"]:
    """Return the weighted sum, without an einsum, which accelerators round to fewer bits."""
    return (of * weights[:, None, None]).sum(0)


def _options(text: str, parts: Sequence[str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options by name; InputError for one that is unknown or there twice."""
    options: dict[str, str] = {}
    for name, _, value in (part.partition("=") for part in parts if "=" in part):
        if name not in names:
            raise InputError(f"combination {text!r}: no option {name!r}; {nearest(name, names)}")
        if name in options:
            raise InputError(f"combination {text!r}: {name} is there twice; give it once")
        options[name] = value
    return options


def _number(text: str, part: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise InputError(f"combination {text!r}: {part!r} is not a number; give one") from None
    if not abs(value) <= LARGEST:
        raise InputError(f"combination {text!r}: {part!r}; give a number of at most {LARGEST:g}")
    return value
