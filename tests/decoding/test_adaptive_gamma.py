"""Chosen block lengths: the choice against its formula, and answers that do not depend on it."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec.decoding.adaptive_gamma import (
    MEMORY,
    PATIENCE,
    PRIOR,
    ROUNDS,
    gammas_up_to,
    init_gamma,
    measure_costs,
    update_prior,
)
from jaxspec.decoding.compile_cache import Held
from jaxspec.decoding.engine_config import EngineConfig
from jaxspec.decoding.running import decode_on, run_prefill
from jaxspec.decoding.state import Pause, rewound, snapshot
from jaxspec.errors import InputError

from tests import tiny

LENGTHS = gammas_up_to(5)
NEW = 25
TARGET, PARAMS = tiny.lvlm(16, 2, seed=3)
GOOD, BAD = tiny.noisy(PARAMS, 0.02), tiny.noisy(PARAMS, 3.0)


def test_lengths():
    assert LENGTHS == (0, 1, 2, 3, 5)
    assert gammas_up_to(1) == (0, 1)
    assert gammas_up_to(4) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("alpha", [0.05, 0.4, 0.7, 0.95])
@pytest.mark.parametrize("draft_cost", [0.02, 0.3, 0.9])
def test_the_choice_has_the_best_rate(alpha, draft_cost):
    costs = np.asarray([1.0] + [g * draft_cost + 1.12 for g in LENGTHS[1:]], np.float32)
    much = 1e6  # tried tokens, beside which the start is nothing
    length = init_gamma(costs, 2).replace(accepted=jnp.asarray([alpha * much, 0.0]), tried=jnp.full(2, much))
    chosen = int(length.choose(LENGTHS, jnp.asarray([False, True])))
    rates = [sum(alpha**i for i in range(g + 1)) / cost for g, cost in zip(LENGTHS, costs)]
    assert chosen == int(np.argmax(rates))


def test_memory_fades():
    length = init_gamma(np.ones(2), 3)
    for _ in range(2):
        length = length.observe(5, jnp.asarray([5, 2, 0]), jnp.asarray([False, False, True]))
    np.testing.assert_allclose(length.accepted, [MEMORY * 5 + 5, MEMORY * 2 + 2, 0])
    np.testing.assert_allclose(length.tried, [MEMORY * 5 + 5, MEMORY * 3 + 3, 0])


def test_rows_start_out_with_what_earlier_answers_accepted():
    length = init_gamma(np.ones(2), 2).replace(accepted=jnp.asarray([3.0, 1.0]), tried=jnp.asarray([6.0, 4.0]))
    earlier = update_prior(np.asarray([100.0, 200.0]), length)
    np.testing.assert_allclose(earlier, [MEMORY * 100 + 4, MEMORY * 200 + 10])
    start = (earlier[0] + PRIOR[0]) / (earlier[1] + PRIOR[1])
    costs = np.asarray([1.0, 1.9, 2.7])  # by one token, 1 + alpha is to be over 1.9
    for found, expected in ((start, 0), (0.95, 2)):
        length = init_gamma(costs, 1, earlier).replace(start=jnp.float32(found))
        assert int(length.choose((0, 1, 2), jnp.asarray([False]))) == expected
    np.testing.assert_allclose(init_gamma(costs, 1, earlier).start, start, rtol=1e-6)


def test_one_rejected_block_does_not_end_the_drafts():
    """At costs at which drafts gain a third, as those of a mini model at batch 1."""
    costs = np.asarray([0.67, 1.17, 1.65, 1.82, 2.24])
    length, never = init_gamma(costs, 1), jnp.asarray([False])
    for block in range(3):
        assert int(length.choose(LENGTHS, never)) > 0, block
        length = length.observe(5, jnp.asarray([0]), never)
    for _ in range(5):
        length = length.observe(1, jnp.asarray([0]), never)
    assert int(length.choose(LENGTHS, never)) == 0


def test_drafts_that_were_given_up_are_tried_again():
    costs = np.asarray([1.0, 1.7])
    earlier = np.asarray([20.0, 100.0])
    chosen = []
    for _ in range(100):
        length = init_gamma(costs, 1, earlier)
        chosen.append(int(length.choose((0, 1), jnp.asarray([False]))))
        earlier = update_prior(earlier, length)  # nothing was tried
    assert chosen[0] == 0
    assert chosen[-1] == 1


def test_costs_are_the_least_of_each_length_alone():
    seen = []

    def run(costs: np.ndarray) -> tuple[float, int]:
        seen.append(int(costs.argmin()))
        return 10.0 * (seen[-1] + 1) + len(seen), 5

    costs = measure_costs((0, 1, 3), run)
    assert seen == [0, 1, 2] * ROUNDS
    np.testing.assert_allclose(costs, [11 / 5, 22 / 5, 33 / 5])


def test_slow_blocks_are_timed_in_fewer_rounds():
    times = iter([PATIENCE / 2, PATIENCE / 4, 4.0, PATIENCE])
    np.testing.assert_allclose(measure_costs((0, 1), lambda _: (next(times), 2)), [2, PATIENCE / 8])


def test_a_block_costs_no_more_than_a_longer_one():
    times = iter([3.0, 9.0, 4.0, 6.0] * ROUNDS)
    np.testing.assert_allclose(measure_costs((0, 1, 2, 3), lambda _: (next(times), 1)), [3, 4, 4, 6])


@pytest.fixture(scope="module")
def decode():
    """One compiled program for all drafts and costs: (draft, costs) -> (tokens of each row, histogram)."""
    program = replace(tiny.speculator(TARGET, TARGET, ("M", "T"), 5), gammas=LENGTHS)
    batch = tiny.prompts([5, 3, 7], [1, 0, 2], ("M", "T"))
    options = tiny.sampling(3, new=[NEW, 9, NEW])

    def run(draft, costs):
        params = {"target": PARAMS, "drafter": draft}
        chosen = batch.replace(gamma=init_gamma(np.asarray(costs), 3))
        state = tiny.run_speculative(program, params, chosen, options, NEW)
        return tiny.outputs(state), np.asarray(state.stats.histogram), state

    plain = tiny.run_plain(TARGET, {"target": PARAMS}["target"], batch, options, NEW)
    return run, tiny.outputs(plain)


COSTS = {"equal": [1, 1, 1, 1, 1], "drafts cost": [1, 2, 3, 4, 6], "plain is free": [1e-9, 1, 1, 1, 1]}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("draft", ["good", "bad"])
def test_answers_are_the_targets(decode, costs, draft):
    run, plain = decode
    answers, histogram, state = run(GOOD if draft == "good" else BAD, COSTS[costs])
    assert answers == plain
    drafted = np.asarray(state.stats.drafted_at).sum(0)
    if costs == "plain is free":
        assert drafted.sum() == 0
    elif costs == "equal" and draft == "good":
        assert drafted[4] > 0
        assert histogram[:, 2:].sum() > 0
    elif costs == "drafts cost" and draft == "bad":
        assert drafted[0] < np.asarray(state.stats.steps).sum()  # given up along the way


def test_trees_have_no_length_to_choose():
    with pytest.raises(InputError, match="adaptive_gamma: chooses the length of chains, and tree is '2'"):
        EngineConfig(tree="2", adaptive_gamma=True)


GIVEN_UP = init_gamma(np.asarray([1, 9, 9, 9, 5]), 3).replace(
    accepted=np.asarray([1e6, 0, 1e6], np.float32), tried=np.full(3, 1e6, np.float32)
)
"""Drafts do not pay because of the second row, and would again once that is done."""


@pytest.mark.parametrize("length", [init_gamma(np.ones(5), 3), GIVEN_UP], ids=["drafts", "given up"])
def test_a_loop_can_pause_and_start_again_from_where_its_rows_were(length):
    """On the state that another loop left: its caches are longer, and all that counts is as it was."""
    program = replace(tiny.speculator(TARGET, TARGET, ("M", "T"), 5), gammas=LENGTHS)
    batch = tiny.prompts([5, 3, 7], [1, 0, 2], ("M", "T")).replace(gamma=length)
    options = tiny.sampling(3, new=[NEW, 9, NEW])
    params = {"target": PARAMS, "drafter": GOOD}
    held = Held(program, None, params)

    def decode(state, count=NEW + 1):
        return decode_on(held, state, options, Pause(jnp.int32(3), jnp.int32(count)))[0]

    state = run_prefill(program, params, batch, options, NEW)
    start = snapshot(state)
    first = decode(state)
    answers, steps = tiny.outputs(first), np.array(first.stats.steps)
    assert state.count.is_deleted()
    for pauses in ([], range(2, NEW)):
        state = rewound(first, start).replace(gamma=batch.gamma)
        assert not np.any(state.done)
        for count in pauses:
            state = decode(state, count)
            assert not np.all(state.done) or count > 9
        first = decode(state)
        assert tiny.outputs(first) == answers
        np.testing.assert_array_equal(first.stats.steps, steps)
