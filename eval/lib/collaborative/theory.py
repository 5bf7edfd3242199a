"""Compute the cost of collaborative decoding: the exact law of its calls.

Costs are times of one forward pass of each model, in any unit. The baseline, standard
collaborative decoding, pays every model's cost once a token. A proposal of model m is accepted with
probability alpha_m = 1 - TV(d_m, r), assumed equal at each place and independent between places.
For text this is the only approximation.

The paper's own formulas are of two models: a proposer that costs c, and another that costs 1.

Reference: Collaborative Decoding via Speculation (arXiv 2502.01662), sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eval.lib.output.tables import Record
from jaxspec.decoding.collaboration.alternating import Alternating
from jaxspec.decoding.collaboration.combination import Weighted
from jaxspec.decoding.collaboration.one_proposer import OneProposer
from jaxspec.decoding.program import Program
from jaxspec.engine.assembly import Assembly


def acceptance(d: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return alpha = sum_x min(d(x), r(x)) = 1 - TV(d, r) over the last axis (Eq. 7)."""
    return np.minimum(d, r).sum(-1)


def tokens_per_run(alpha: float, gamma: int) -> float:
    """Return the expected tokens of verifying gamma proposals, with replacements, without bonus."""
    return float(sum(alpha**place for place in range(gamma)))


class Calls(NamedTuple):
    """Forward passes of each model a token [M]: scoring passes, and single steps that propose."""

    scoring: np.ndarray
    proposing: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.scoring + self.proposing


def one_proposer_calls(
    alpha: float, gamma: int, models: int = 2, proposer: int = 0, bonus: bool = False
) -> Calls:
    """Return the calls of `OneProposer`; without bonus this is Theorem 3.1."""
    tokens = tokens_per_run(alpha, gamma + bonus)
    proposes = np.arange(models) == proposer
    return Calls(~proposes / tokens, proposes * (gamma + bonus) / tokens)


def alternating_calls(alphas: Sequence[float], gammas: Sequence[int], first: int = 0) -> Calls:
    """Return the calls of `Alternating`, exactly: the stationary law of its turns.

    Between two rejections the turns go round the ring of M models. The first M - 1 turns only fill
    the ring; each later turn scores and verifies the run of the model after it, and continues with
    probability alpha^gamma. Passes and tokens between rejections are therefore geometric sums over
    rounds, and by renewal their ratio is the long-run ratio.

    For two models at costs (c, 1) the speed-up of these calls is, with q = 0 first, p = 1, a =
    alpha_q^gq, b = alpha_p^gp and G = `tokens_per_run`,

    (1 + c) (G_q + a G_p) / (1 + c gq - a b c + a (gp - 1 + c)).
    """
    models = len(alphas)
    scoring, proposing = np.zeros(models), np.zeros(models)
    ring = [(first + k) % models for k in range(models)]
    whole = float(np.prod([alphas[m] ** gammas[m] for m in ring]))
    tokens, reached = 0.0, 1.0
    for k, model in enumerate(ring):
        if k < models - 1:  # before there is anything to verify: once between rejections
            scoring[model] += 1 - whole
            proposing[model] += (1 - whole) * (gammas[model] - 1)
    # A round of verifications; each round is reached `whole` times as often as the one before.
    for owner in ring:
        model = (owner - 1) % models
        whole_run = alphas[owner] ** gammas[owner]
        scoring[model] += reached
        tokens += reached * tokens_per_run(alphas[owner], gammas[owner])
        reached *= whole_run
        proposing[model] += reached * (gammas[model] - 1)
    return Calls(scoring / tokens, proposing / tokens)


def speedup(calls: Calls, costs: Sequence[float], scoring: Sequence[float] | None = None) -> float:
    """Return the speed-up over standard collaborative decoding.

    Args:
      costs: Cost of a pass over one token, for each model.
      scoring: Cost of a pass that scores proposals; None takes `costs`, as the paper does.
    """
    scoring = costs if scoring is None else scoring
    spent = calls.proposing @ np.asarray(costs) + calls.scoring @ np.asarray(scoring)
    return float(sum(costs) / spent)


def law(program: Program, alphas: Sequence[float]) -> tuple[Calls, list[int]]:
    """Return the calls of a program at these mean acceptance rates.

    The list has the tokens that each model reads in a scoring pass.
    """
    models = len(alphas)
    if isinstance(program, Alternating):
        widths = [sum(program.gammas) - gamma + 1 for gamma in program.gammas]
        return alternating_calls(alphas, program.gammas, program.first), widths
    assert isinstance(program, OneProposer)
    gamma, first = program.gamma, program.proposer
    bonus = program.bonus or not gamma  # standard decoding has no proposals, and one token a run
    return one_proposer_calls(alphas[first], gamma, models, first, bonus), [gamma + bonus] * models


LONGEST = 64
"""Longest draft length that the corollaries consider."""


def theorem_3_1(alpha: float, gamma: int, c: float) -> float:
    """Return the paper's speed-up of one proposer."""
    return tokens_per_run(alpha, gamma) * (1 + c) / (1 + c * gamma)


def theorem_3_6(alpha: float, gamma_q: int, gamma_p: int, c: float) -> float:
    """Return the paper's speed-up of alternation, which considers only one cycle.

    It takes one alpha for both models, and every cycle to cost what the first proposer's does.
    """
    return tokens_per_run(alpha, gamma_q) * (1 + c) / (1 + c * gamma_q - alpha**gamma_p * c)


def corollary_3_4(weight: float, c: float) -> float:
    """Return the least speed-up of one proposer of this weight at its best draft length.

    Its proposals are accepted with probability `weight` or more. The speed-up is 1 at length 1,
    and above 1 at a longer one if the weight is over c / (1 + c).
    """
    return max(theorem_3_1(weight, gamma, c) for gamma in range(1, LONGEST + 1))


def corollary_3_5(weight: float, c: float) -> float:
    """Return the least speed-up if the better of two models proposes."""
    return max(corollary_3_4(weight, c), corollary_3_4(1 - weight, 1 / c))


def parallel_speedup(costs: Sequence[float]) -> float:
    """Return the largest possible gain of standard decoding from one device per model.

    jaxspec does not build this: one compiled program runs the same code on all its devices, so
    other models would need programs of their own, and every token a round trip to the host.
    """
    return sum(costs) / max(costs)


def formulas(assembly: Assembly, alphas: Sequence[float], costs: Sequence[float]) -> Record:
    """Return the speed-ups by the paper's formulas for two models; None without a formula."""
    program, combination = assembly.program, assembly.params["combination"]
    assert isinstance(program, Alternating | OneProposer)
    names = "speedup_theorem", "speedup_corollary_3_4", "speedup_corollary_3_5"
    speedups: Record = dict.fromkeys(names)
    if len(costs) != 2:
        return speedups
    q = program.first if isinstance(program, Alternating) else program.proposer
    c = costs[q] / costs[1 - q]
    if isinstance(program, Alternating):
        gammas = program.gammas
        speedups["speedup_theorem"] = theorem_3_6(alphas[q], gammas[q], gammas[1 - q], c)
    elif program.gamma and not program.bonus:
        speedups["speedup_theorem"] = theorem_3_1(alphas[q], program.gamma, c)
    if isinstance(combination, Weighted):
        weight = float(combination.weights[q])
        speedups["speedup_corollary_3_4"] = corollary_3_4(weight, c)
        speedups["speedup_corollary_3_5"] = corollary_3_5(weight, c)
    return speedups
