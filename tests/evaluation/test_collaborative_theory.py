"""Formulas of collaborative decoding agree with a simulation of its turns, and with each other."""

from __future__ import annotations

import numpy as np
import pytest

from eval.lib.collaborative.theory import (
    Calls,
    alternating_calls,
    corollary_3_4,
    corollary_3_5,
    one_proposer_calls,
    parallel_speedup,
    speedup,
    theorem_3_1,
    theorem_3_6,
)
from jaxspec.decoding.collaboration.combination import default_proposer, parse_combination


def simulated(alphas: list[float], gammas: list[int], first: int, tokens: int = 60_000) -> Calls:
    """Simulate the turns one by one, with a queue of pending runs and a coin for each proposal."""
    models, emitted, turn = len(alphas), 0, first
    scoring, proposing = np.zeros(models), np.zeros(models)
    queue: list[int] = []  # owners of the pending runs, oldest first
    coins = iter(np.random.default_rng(1).random(40 * tokens))
    while emitted < tokens:
        scoring[turn] += 1
        if len(queue) == models - 1:
            owner = queue.pop(0)
            stands = 0
            while stands < gammas[owner] and next(coins) < alphas[owner]:
                stands += 1
            emitted += min(stands + 1, gammas[owner])
            if stands < gammas[owner]:
                queue, turn = [], first
                continue
        queue.append(turn)
        proposing[turn] += gammas[turn] - 1
        turn = (turn + 1) % models
    return Calls(scoring / emitted, proposing / emitted)


@pytest.mark.parametrize(
    ("alphas", "gammas", "first"),
    [
        ([0.8, 0.6], [5, 1], 0),
        ([0.8, 0.6], [5, 5], 1),
        ([0.5, 0.9], [1, 1], 0),
        ([0.9, 0.7, 0.8], [1, 1, 1], 0),
        ([0.9, 0.7, 0.8], [2, 1, 3], 1),
    ],
)
def test_calls_are_those_of_the_simulated_turns(
    alphas: list[float], gammas: list[int], first: int
) -> None:
    exact, counted = alternating_calls(alphas, gammas, first), simulated(alphas, gammas, first)
    np.testing.assert_allclose(exact.scoring, counted.scoring, rtol=0.02)
    np.testing.assert_allclose(exact.proposing, counted.proposing, rtol=0.02, atol=1e-12)


def test_the_paper_where_it_is_exact_and_where_it_is_not() -> None:
    same = alternating_calls([0.863, 0.863], [1, 1])
    assert speedup(same, [1, 1]) == pytest.approx(theorem_3_6(0.863, 1, 1, 1.0), rel=1e-12)
    assert speedup(same, [0.1, 1]) == pytest.approx(1.844, abs=1e-3)  # simulated: 1.840
    alpha, c = 0.863, 0.1
    assert theorem_3_1(alpha, 5, c) == pytest.approx(
        (1 - alpha**5) * (1 + c) / ((1 - alpha) * (1 + 5 * c))
    )
    assert theorem_3_6(0.863, 1, 1, 0.1) == pytest.approx(1.085, abs=2e-3)
    assert theorem_3_1(0.863, 5, 0.1) == pytest.approx(2.792, abs=5e-3)
    assert speedup(one_proposer_calls(0.863, 5), [0.1, 1]) == pytest.approx(
        theorem_3_1(0.863, 5, 0.1), rel=1e-12
    )


def test_turns_where_all_stands_are_as_fast_as_models_side_by_side() -> None:
    assert parallel_speedup([2.0, 2.0, 2.0]) == 3
    assert parallel_speedup([1.0, 3.0]) == pytest.approx(4 / 3)
    assert speedup(alternating_calls([1, 1, 1], [1, 1, 1]), [2, 2, 2]) == pytest.approx(3)


@pytest.mark.parametrize("c", [0.1, 0.5, 1.0, 3.0])
def test_a_proposer_gains_if_its_weight_is_over_its_share_of_the_cost(c: float) -> None:
    share = c / (1 + c)
    assert corollary_3_4(share - 0.01, c) == 1  # a length of 1 costs nothing, and gains nothing
    assert corollary_3_4(share + 0.01, c) > 1
    for weight in (share - 0.01, share + 0.01, 0.5):
        chosen = default_proposer(parse_combination(f"weighted:{weight},{1 - weight}", 2), (c, 1))
        least = [corollary_3_4(weight, c), corollary_3_4(1 - weight, 1 / c)]
        assert corollary_3_5(weight, c) == least[chosen] >= 1
