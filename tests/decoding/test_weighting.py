"""The compiled, batched, score-keeping rules equal a reference that keeps whole histories, block
after block.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.drafting.rules import PRESETS, RULES, parse_weighting
from jaxspec.decoding.drafting.weighting import Adaptive, Weighting
from jaxspec.errors import InputError
from tests.decoding import weighting_reference as reference

B, J, V, BLOCKS = 4, 3, 7, 6

RULE_CASES: dict[str, Any] = {
    "grid": reference.grid(),
    "grid:measure=tvd,steps=4,window=4": reference.grid("tvd", 4),
    "grid:measure=matches": reference.grid("matches"),
    "grid:measure=matches_kl,window=4": reference.grid("matches_kl"),
    "grid:measure=matches_tvd,steps=13": reference.grid("matches_tvd", 13),
    "grid:measure=sampled": reference.grid("sampled"),
    "inverse_error_power:window=4": reference.inverse_error_power(),
    "inverse_error_power:measure=tvd,tau=0.5": reference.inverse_error_power("tvd", 0.5),
    "inverse_error_power:tau=0,window=4": reference.inverse_error_power("kl", 0),
    "inverse_error_power:decay=0.8": reference.inverse_error_power(),
    "inverse_error_softmax:measure=tvd": reference.inverse_error_softmax("tvd"),
    "inverse_error_softmax:tau=2,window=4": reference.inverse_error_softmax("kl", 2.0),
    "inverse_error_softmax:tau=2,decay=0.8,window=4": reference.inverse_error_softmax("kl", 2.0),
    "hard_match": reference.hard_match,
    "adaboost:window=4": reference.adaboost(),
    "adaboost:constant=0": reference.adaboost(0.0),
    "adaboost:constant=0.1,window=4": reference.adaboost(0.1),
    "adaboost:window=1": reference.adaboost(),
    "adaboost:window=16": reference.adaboost(),
    "adaboost:decay=0.9": reference.adaboost(),
    "adaboost:decay=0.9,window=4": reference.adaboost(),
}
"""Rules with their windows and decays, of which the references know nothing. A new rule adds its
own lines.
"""


def distributions(rng: np.random.Generator, views: int) -> tuple[np.ndarray, np.ndarray]:
    """Return p [B, J, V] and q [R, B, J, V]: peaked, alike now and then, with zeros in the
    views.
    """
    logits = rng.normal(0, 2, (B, J, V))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    apart = rng.choice([0.1, 1.0, 3.0], (views, B, J, 1))
    q = (
        np.exp(logits + apart * rng.normal(0, 1, (views, B, J, V)))
        * (rng.random((views, B, J, V)) > 0.05)
        + 1e-9
    )
    q = np.where(q < 1e-8, 0, q / q.sum(-1, keepdims=True))
    return p.astype(np.float32), q.astype(np.float32)


@partial(jax.jit, static_argnums=0)
def observe(rule: Weighting, state: Any, p: jax.Array, q: jax.Array, valid: jax.Array) -> Any:
    return rule.observe(
        state, rule.weights(state, jax.random.split(jax.random.key(0), len(p))), p, q, valid
    )


def history(
    rng: np.random.Generator, views: int, blocks: int = BLOCKS
) -> list[tuple[np.ndarray, ...]]:
    """Return blocks of (p, q, valid): each row of its own length, 0 for one that is done."""
    lengths = rng.integers(0, J + 1, (blocks, B))
    lengths[:, 0] = np.maximum(lengths[:, 0], 1)
    return [(*distributions(rng, views), np.arange(J) < n[:, None]) for n in lengths]


def weights_after(
    rule: Weighting, initial: np.ndarray, blocks: list[tuple[np.ndarray, ...]]
) -> list[np.ndarray]:
    """Return the weights [B, R] before the first block and after each."""
    keys = jax.random.split(jax.random.key(0), len(initial))
    state = rule.init(jnp.asarray(initial, jnp.float32))
    found = [rule.weights(state, keys)]
    for block in blocks:
        state = observe(rule, state, *map(jnp.asarray, block))
        found.append(rule.weights(state, keys))
    return [np.asarray(w) for w in found]


def initial_weights(rng: np.random.Generator, views: int) -> np.ndarray:
    return rng.dirichlet(np.full(views, 3.0), B)


def test_every_rule_has_a_case() -> None:
    assert {text.partition(":")[0] for text in RULE_CASES} == {*RULES} - {"static", "random"}


@pytest.mark.parametrize("text", RULE_CASES)
def test_rules_equal_the_reference(text: str) -> None:
    views = 3 if "window=4" in text else 2
    rng = np.random.default_rng(len(text) * 100 + views)
    known, rule = RULE_CASES[text], parse_weighting(text)
    assert isinstance(rule, Adaptive)
    blocks, initial = history(rng, views), initial_weights(rng, views)
    rows = [reference.Reference(known, w, rule.window, rule.decay) for w in initial]
    found = weights_after(rule, initial, blocks)
    np.testing.assert_allclose(found[0], initial, rtol=1e-6)
    for (p, q, valid), ours in zip(blocks, found[1:]):
        for b, row in enumerate(rows):
            n = int(valid[b].sum())
            row.observe(p[b, :n].astype(np.float64), np.moveaxis(q, 0, 2)[b, :n].astype(np.float64))
            # float32 sums of a few dozen nats; tau 1/2 squares their relative error.
            np.testing.assert_allclose(ours[b], row.weights, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("grid", reference.grid()),
        ("grid:measure=tvd,steps=4", reference.grid("tvd", 4)),
        ("inverse_error_power", reference.inverse_error_power()),
        ("inverse_error_softmax:tau=2", reference.inverse_error_softmax("kl", 2.0)),
        ("adaboost", reference.adaboost()),
    ],
)
def test_tokens_that_the_draft_rules_out_cost_much_and_not_everything(
    text: str, known: Any
) -> None:
    """A view that rules out the target's one-hot token pays much, but weights stay finite and equal
    the reference's.
    """
    p = np.zeros((B, J, V), np.float32)
    p[..., 2] = 1
    q = np.zeros((2, B, J, V), np.float32)
    q[0, ..., 3] = 1
    q[1, ..., 3:5] = 0.5
    q[1, :, 0, 2:5] = 0.5, 0.5, 0
    row = reference.Reference(known, np.full(2, 0.5), None)
    _, *found = weights_after(
        parse_weighting(text), np.full((B, 2), 0.5), [(p, q, np.ones((B, J), bool))] * 3
    )
    for weights in found:
        row.observe(p[0].astype(np.float64), np.moveaxis(q, 0, 2)[0].astype(np.float64))
        np.testing.assert_allclose(
            weights, np.broadcast_to(row.weights, (B, 2)), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(
    ("draw", "variance"), [("dirichlet", 1 / 12), ("uniform", 0.75 - np.log(2))]
)
def test_random_weights_are_the_rows_own(draw: str, variance: float) -> None:
    """Random weights are each row's own, and have the law of their draw: Dirichlet(1, 1) of two
    views is uniform, of variance 1/12; U / (U + U') has 3/4 - ln 2.
    """
    rule = parse_weighting(f"random:draw={draw}")
    state, keys = jnp.full((4000, 2), 0.5), jax.random.split(jax.random.key(1), 4000)
    weights = np.asarray(rule.weights(rule.observe(state, *[jnp.zeros(1)] * 4), keys))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert weights.mean(0) == pytest.approx([0.5, 0.5], abs=0.02)
    assert weights[:, 0].var() == pytest.approx(variance, rel=0.06)
    np.testing.assert_array_equal(rule.weights(state[:3], keys[7:10]), weights[7:10])


@pytest.mark.parametrize(
    "text",
    [
        *RULE_CASES,
        *PRESETS,
        *RULES,
        "grid:window=16,steps=4",
        "random:draw=uniform",
        "adaboost:constant=0.5,errors=0.25/0",
        "hard_match:decay=0.9999999",
    ],
)
def test_text_forms_are_read_back(text: str) -> None:
    rule = parse_weighting(text)
    assert parse_weighting(str(rule)) == rule
    assert hash(rule) == hash(parse_weighting(text))


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ("constant=0,errors=0.2/0.4", [np.log(4), np.log(1.5)]),
        ("errors=0.2/0.4", [np.log(4) + np.log(V - 1), np.log(1.5) + np.log(V - 1)]),
        ("constant=0,errors=0.2/0.6", [1, 0]),  # worse than chance
        ("constant=0,errors=1/1", [0.3, 0.7]),  # those that were asked for
        ("errors=0/0", [1, 1]),
    ],
)
def test_given_error_rates_fix_the_weights(options: str, weights: list[float]) -> None:
    """Given error rates fix the weights to TABED's Eq. (2), ln(1 / e - 1) + C ln(K - 1), whatever
    is verified.
    """
    rule = parse_weighting(f"adaboost:{options}")
    first = rule.first((0.3, 0.7), V)
    assert first == pytest.approx(np.asarray(weights) / sum(weights), rel=1e-4)
    blocks = history(np.random.default_rng(0), 2, blocks=2)
    for after in weights_after(rule, np.tile(first, (B, 1)), blocks):
        np.testing.assert_array_equal(after, np.tile(np.float32(first), (B, 1)))
    with pytest.raises(InputError, match="2 for 3 views; give one for each"):
        rule.first((0.2, 0.3, 0.5), V)


def test_a_grid_has_no_more_mixtures_than_fit_in_memory() -> None:
    assert parse_weighting("grid:steps=82").first((0.25,) * 4, V) == (0.25,) * 4
    assert parse_weighting("grid").first((0.1,) * 10, V) == (0.1,) * 10
    message = "steps 1000000 make 166667666668500001 mixtures of 4 views, over 100000; give fewer"
    with pytest.raises(InputError, match=message):
        parse_weighting("grid:steps=1000000").first((0.25,) * 4, V)


def test_a_preset_takes_other_fields() -> None:
    # type: ignore[call-arg]
    assert parse_weighting("mt-release:window=4") == replace(PRESETS["mt-release"], window=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird", "'gird' is unknown; did you mean 'grid'?"),
        ("", "use one of static, random, grid"),
        ("grid:windwo=3", "field 'windwo' is unknown; did you mean 'window'?"),
        ("grid:measure=klt", "measure 'klt' is unknown; did you mean 'kl'?"),
        ("grid:window=0", "window 0; give 1 or more"),
        ("grid:window=2.5", "window 2.5; give a whole number or all"),
        ("grid:window=4,window=8", "window is there twice; give it once"),
        ("inverse_error_power:tau=1e-7", "tau 1e-07; give 0 or at least 1e-06"),
        ("adaboost:errors=0.4", "errors 0.4; give a number for each view, as 0.4/0.5"),
        ("adaboost:errors=0.4/1.5", "errors (0.4, 1.5); give 0 or more, up to 1"),
    ],
)
def test_wrong_texts_are_answered_with_the_mend(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_weighting(text)
    assert message in str(error.value)
    assert str(error.value).startswith("weighting")
