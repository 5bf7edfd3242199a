"""What M models write together follows their combined distribution exactly, whoever proposes; and a
slip is noticed.

The models are tables, so that the law of whole sequences is enumerated, by numpy and without the
library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decoding.collaboration.alternating import Alternating
from jaxspec.decoding.collaboration.combination import parse_combination
from jaxspec.decoding.collaboration.one_proposer import OneProposer
from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.state import DecodeState
from jaxspec.sampling import Sampling
from jaxspec.typing import Params
from tests.decoding import tables
from tests.tiny import QUICK, rarer
from tests.tiny.oracles import goodness_of_fit, numpy_filtered, numpy_softmax

SAMPLED, GREEDY = 25_000, 250
"""Rows of a batch that draw after one prompt, and rows at temperature 0 after many."""

Program = Alternating | OneProposer
Law = Callable[[np.ndarray], np.ndarray]
"""Logits [M, V] -> what the next token is drawn from [V]."""


def weighted(weights: Sequence[float], temperature: float) -> Law:
    return lambda logits: np.einsum(
        "m,mv->v", weights, [numpy_softmax(row, temperature) for row in logits]
    )


def linear(coefficients: Sequence[float], temperature: float) -> Law:
    return lambda logits: numpy_softmax(np.einsum("m,mv->v", coefficients, logits), temperature)


COMBINATIONS: dict[str, Callable[[float], Law]] = {
    "weighted:0.7,0.3": partial(weighted, (0.7, 0.3)),
    "weighted": partial(weighted, (1 / 3, 1 / 3, 1 / 3)),
    "contrastive:mu=0.4": partial(linear, (1.0, -0.4)),
    "logits:0.9,0.6,-0.3": partial(linear, (0.9, 0.6, -0.3)),
}


@partial(jax.jit, static_argnums=(0, 4), compiler_options=QUICK)
def run(program: Program, params: Params, batch: Any, chosen: Sampling, new: int) -> DecodeState:
    return program.decode(params, program.prefill(params, batch, chosen, new)[0], chosen)


def contexts(vocabulary: int) -> np.ndarray:
    """Return the prompts [SAMPLED + GREEDY, ORDER] of a batch."""
    every = np.asarray(list(np.ndindex(*[vocabulary] * tables.ORDER)))
    return every[np.concatenate([np.ones(SAMPLED, int), np.arange(GREEDY) % len(every)])]


def drawn(
    program: Program,
    text: str,
    vocabulary: int,
    new: int,
    temperature: float,
    rounds: int = 1,
    **filters: Any,
) -> tuple[np.ndarray, np.ndarray, CollaborationStats]:
    """Return counts [V, ..., V] of the sampled sequences, the greedy ones [GREEDY, new], and the
    last batch's statistics.
    """
    models = len(program.members)
    params = {
        "models": tuple(tables.tables(models, vocabulary)),
        "combination": parse_combination(text, models),
    }
    batch = tables.prompts(models, contexts(vocabulary))
    heat = np.repeat([temperature, 0.0], [SAMPLED, GREEDY])
    counts, tokens, stats = np.zeros([vocabulary] * new), np.zeros(0), None
    for seed in range(rounds):
        state = run(program, params, batch, tables.options(heat, new, seed, **filters), new)
        tokens, stats = np.asarray(state.tokens)[:, :new], state.stats
        np.add.at(counts, tuple(tokens[:SAMPLED].T), 1)
    assert stats is not None
    return counts, tokens[SAMPLED:], stats


@lru_cache
def joint(
    text: str, models: int, vocabulary: int, new: int, temperature: float, **filters: Any
) -> np.ndarray:
    """Return the exact law of the sampled sequences."""
    law, keep = COMBINATIONS[text](temperature), {"top_k": 0, "top_p": 1.0} | filters
    table = tables.tables(models, vocabulary)
    return tables.joint(
        table, lambda logits: numpy_filtered(law(logits), **keep), contexts(vocabulary)[0], new
    )


def distance(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the total variation between frequencies and law, in units of what draws from the law
    itself are expected to have.
    """
    draws = counts.sum()
    expected = np.sqrt(law * (1 - law) / (2 * np.pi * draws)).sum()
    return float(0.5 * np.abs(counts / draws - law).sum() / expected)


def follows(counts: np.ndarray, law: np.ndarray) -> bool:
    return goodness_of_fit(counts, law) > 1e-3 and distance(counts, law) < 1.15


# long enough that a run is extended behind one that was accepted
CASES = [
    (2, (3, 1), "contrastive:mu=0.4", 3, 7, 0.7, {}),
    *rarer(
        (2, (5, 5), "weighted:0.7,0.3", 3, 8, 1.0, {}),
        (2, (1, 1, 1), "weighted", 5, 4, 0.7, {"top_k": 4, "top_p": 0.9}),
        (2, (3, 1, 2), "logits:0.9,0.6,-0.3", 3, 7, 0.7, {}),
    ),
]


@pytest.mark.parametrize(
    ("rounds", "gammas", "text", "vocabulary", "new", "temperature", "filters"), CASES
)
def test_alternating_proposers_follow_the_combination(
    rounds: int,
    gammas: tuple[int, ...],
    text: str,
    vocabulary: int,
    new: int,
    temperature: float,
    filters: dict[str, Any],
) -> None:
    models = len(gammas)
    program = Alternating(tables.members(models, vocabulary), gammas, first=models - 2)
    counts, greedy, stats = drawn(program, text, vocabulary, new, temperature, rounds, **filters)
    assert follows(counts, joint(text, models, vocabulary, new, temperature, **filters))
    check_greedy(greedy, text, models, vocabulary)
    check_statistics(program, stats, new)
    # where all rows are greedy nothing is drawn
    _, alone, stats = drawn(program, text, vocabulary, new, 0.0)
    np.testing.assert_array_equal(alone, greedy)
    np.testing.assert_array_equal(stats.overlap, stats.accepted)


@pytest.mark.parametrize(
    ("gamma", "bonus"),
    [(2, True), *rarer((0, False), (2, False))],
    ids=["bonus", "standard", "naive"],
)
def test_one_proposer_follows_the_combination(gamma: int, bonus: bool) -> None:
    program = OneProposer(tables.members(2, 4), gamma, proposer=1, bonus=bonus)
    counts, greedy, stats = drawn(program, text := "weighted:0.7,0.3", 4, 5, 1.0)
    assert follows(counts, joint(text, 2, 4, 5, 1.0))
    check_greedy(greedy, text, 2, 4)
    check_statistics(program, stats, 5)


def check_greedy(tokens: np.ndarray, text: str, models: int, vocabulary: int) -> None:
    """Check that each row is the path of best tokens; of weights, of their mean at temperature
    1.
    """
    law, table = COMBINATIONS[text](1.0), tables.tables(models, vocabulary)
    for context, found in zip(
        contexts(vocabulary)[SAMPLED:].tolist(), tokens.tolist(), strict=True
    ):
        path = list(context)
        for _ in found:
            path.append(int(np.argmax(law(table[:, tables.state_of(path, vocabulary)]))))
        assert found == path[tables.ORDER :]


def check_statistics(program: Program, stats: CollaborationStats, new: int) -> None:
    """Check that counts add up, and that proposals were accepted as often as their distributions
    said.
    """
    totals = {name: np.asarray(value, float).sum(0) for name, value in vars(stats).items()}
    rows = SAMPLED + GREEDY
    assert totals["emitted"] == rows * (new - 1)
    assert (np.asarray(stats.calls) <= np.asarray(stats.passes)).all()
    tested, accepted, overlap = totals["tested"], totals["accepted"], totals["overlap"]
    assert (accepted <= tested).all()
    used = tested > 0
    assert used.any() or (isinstance(program, OneProposer) and not program.gamma)
    deviation = np.sqrt(tested[used]) / 2  # at most
    assert (np.abs(accepted - overlap)[used] < 4 * deviation).all()
    if isinstance(program, OneProposer):
        assert totals["verified"] <= totals["calls"].min() + 1
        assert (totals["calls"] == totals["verified"] * np.asarray(passes_of(program))).all()


def passes_of(program: OneProposer) -> list[int]:
    """Return the passes of each model in a run."""
    own = program.gamma + (program.bonus or not program.gamma)
    return [own if m == program.proposer else 1 for m in range(len(program.members))]
