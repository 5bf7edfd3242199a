"""Combined distributions equal numpy's in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.collaboration.combination import (
    Combination,
    Custom,
    joint_law,
    parse_combination,
)
from jaxspec.errors import InputError
from jaxspec.sampling import Sampling, filtered
from jaxspec.typing import Array
from tests.tiny import sampling
from tests.tiny.oracles import numpy_filtered, numpy_softmax

RNG = np.random.default_rng(0)
LOGITS = (2 * RNG.normal(size=(3, 4, 7))).astype(np.float32)
TEMPERATURES = [1.0, 0.7, 2.5, 0.0]


def options(**filters: Any) -> Sampling:
    return sampling(4, temperature=TEMPERATURES, **filters)


def combined(combination: Combination, logits: Array, chosen: Sampling) -> Array:
    """Return the distribution that the models together draw the next token from."""
    law, best = joint_law(combination, logits[:, :, None], chosen, None)
    return filtered(law[:, 0], chosen, best[:, 0])


def mean(*weights: float) -> Callable[[np.ndarray, float], np.ndarray]:
    return lambda logits, t: np.einsum(
        "m,mv->v", weights, [numpy_softmax(row, t) for row in logits]
    )


def linear(*coefficients: float) -> Callable[[np.ndarray, float], np.ndarray]:
    return lambda logits, t: numpy_softmax(np.einsum("m,mv->v", coefficients, logits), t)


def plausible(logits: np.ndarray, t: float) -> np.ndarray:
    expert = numpy_softmax(logits[0], 1.0)
    scores = np.where(expert >= 0.2 * expert.max(), 1.5 * logits[0] - 0.5 * logits[1], -np.inf)
    return numpy_softmax(scores, t)


OWN = Custom(lambda probs: jnp.maximum(probs[0], probs[1]))
OWN_LOGITS = Custom(lambda logits: logits[0] + 0.5 * logits[1], of="logits")


def largest(logits: np.ndarray, t: float) -> np.ndarray:
    most = np.maximum(*(numpy_softmax(row, t) for row in logits))
    return most / most.sum()


@pytest.mark.parametrize(
    ("combination", "models", "law"),
    [
        ("weighted", 3, mean(1 / 3, 1 / 3, 1 / 3)),
        ("contrastive", 2, linear(1, -0.1)),
        ("contrastive:beta=0.5,plausibility=0.2", 2, plausible),
        (OWN, 2, largest),
        (OWN_LOGITS, 2, linear(1, 0.5)),
    ],
)
@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.8}], ids=["all", "filtered"])
def test_combined_distributions(
    combination: str | Combination,
    models: int,
    law: Callable[[np.ndarray, float], np.ndarray],
    filters: dict[str, Any],
) -> None:
    known = parse_combination(combination, models) if isinstance(combination, str) else combination
    found = np.asarray(combined(known, jnp.asarray(LOGITS[:models]), options(**filters)))
    narrow = {"top_k": 0, "top_p": 1.0} | filters
    for row, temperature in enumerate(TEMPERATURES):
        told = law(LOGITS[:models, row].astype(np.float64), temperature or 1.0)
        expected = numpy_filtered(told, **narrow) if temperature else np.eye(7)[np.argmax(told)]
        np.testing.assert_allclose(found[row], expected, atol=1e-6)


@pytest.mark.parametrize("text", ["contrastive:mu=0.3", "contrastive:beta=1,plausibility=0.2"])
def test_a_token_that_a_model_cannot_know_is_not_written(text: str) -> None:
    """A token that one model cannot know is not written, even if it is the expert's likeliest: the
    law is that of the other tokens.
    """
    logits = LOGITS[:2].copy()
    logits[0, :, -1] = 9.0
    logits[0, :, 0] = logits[1, :, -1] = -np.inf
    law = parse_combination(text, 2)
    found = np.asarray(combined(law, jnp.asarray(logits), options()))
    others = np.asarray(combined(law, jnp.asarray(logits[..., 1:-1]), options()))
    np.testing.assert_allclose(found, np.pad(others, ((0, 0), (1, 1))), atol=1e-6)
    alone = combined(parse_combination("logits:0,1", 2), jnp.asarray(logits), options())
    expected = numpy_softmax(logits[1, 0].astype(np.float64), TEMPERATURES[0])
    np.testing.assert_allclose(alone[0], expected, atol=1e-6)  # what has no weight bans nothing


@pytest.mark.parametrize("text", ["contrastive:mu=0.1,mu=0.9", "weighted:greedy=mean,greedy=vote"])
def test_an_option_that_is_there_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is there twice; give it once"):
        parse_combination(text, 2)


def test_two_readings_of_temperature_zero() -> None:
    """At temperature 0 a sure minority wins the mean; the majority wins the vote, and of equal
    votes the mean decides.
    """
    logits = jnp.log(jnp.asarray([[0.9, 0.1, 1e-6], [0.4, 0.6, 1e-6], [0.4, 0.6, 1e-6]]))[:, None]
    greedy = sampling(1)

    def best(text: str, chosen: Any = logits) -> int:
        return int(jnp.argmax(combined(parse_combination(text, 3), chosen, greedy)))

    assert best("weighted:0.4,0.3,0.3") == 0
    assert best("weighted:0.4,0.3,0.3,greedy=vote") == 1
    assert best("weighted:0.5,0.2,0.3,greedy=vote") == 0  # 0.2 + 0.3 may round to more than 0.5
    tied = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.15, 0.3, 0.55]]))[:, None]
    assert best("weighted:0.33,0.34,0.33,greedy=vote", tied) == 1
    # of 0 and 2 the likelier in the mean
    assert best("weighted:0.4,0.2,0.4,greedy=vote", tied) == 2


def test_one_place_needs_no_rule_for_vmap() -> None:
    """A user's function that has no rule for `vmap`, as one that calls the host, combines one
    place.
    """

    def called(logits: Array) -> Array:
        kind = jax.ShapeDtypeStruct(logits.shape[1:], jnp.float32)
        return jax.pure_callback(lambda x: np.asarray(x).sum(0, np.float32), kind, logits)

    logits, chosen = jnp.asarray(LOGITS[:2]), options()
    ours, same = (Custom(function, of="logits") for function in (called, lambda x: x.sum(0)))
    np.testing.assert_allclose(
        combined(ours, logits, chosen), combined(same, logits, chosen), rtol=1e-6
    )
