"""Collaborative decoding measured: every method on every set, and a grid of combinations for the best of them.

All methods of one pairing decode the same requests by turns, so that what else the machine does slows them alike;
the speed-up is the fastest run over the fastest of standard collaborative decoding, since what else runs only slows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec.data.samples import Sample
from jaxspec.decoding.collaboration import Collaboration, MemberCounts, Method
from jaxspec.decoding.combination import parse_combination
from jaxspec.decoding.loading import LoadedModel
from jaxspec.decoding.requests import Request, Result
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.evaluation.collaborative_theory import (
    Calls,
    alternating_calls,
    one_proposer_calls,
    parallel_speedup,
    plan,
    speedup,
)
from jaxspec.evaluation.config import CollaborativeEvalConfig, Pairing
from jaxspec.evaluation.held_out import HeldOut, read_answers
from jaxspec.evaluation.metrics import collaboration_metrics
from jaxspec.evaluation.timing import by_turns, time_members

Record = dict[str, Any]
Answers = list[Result[MemberCounts]]
METHODS: tuple[tuple[str, Method, bool], ...] = (
    ("standard", "standard", False),
    ("naive", "naive", True),
    ("speculative", "speculative", True),
    ("CoS", "alternating", True),
    ("CoS, 1 each", "alternating", False),
)
"""Rows of a pairing: name, method, and whether with the pairing's draft lengths or with 1 each."""


def measure(config: CollaborativeEvalConfig) -> Iterator[tuple[list[Record], list[Record], list[Record]]]:
    """Yields of each pairing (rows of methods, rows of the grid, a record an answer); a row pools a set and a method.

    Only one pairing's models are held at a time.
    """
    loaded: dict[str, LoadedModel] = {}
    ways = sum(len(_methods_of(pairing)) + 2 * len(pairing.dial) for pairing in config.pairings)
    work = ways * len(config.sets) * config.repeats
    bar = tqdm(total=work, unit="run", desc="collaboration", delay=1)
    for pairing in config.pairings:
        rows, dial, records = [], [], []
        loaded = {name: model for name, model in loaded.items() if name in pairing.models}
        for name in pairing.models:
            if name not in loaded:
                loaded[name] = LoadedModel.load(
                    name, jnp.dtype(config.dtype), beside=next(iter(loaded.values()), None)
                )
        models = [loaded[name] for name in pairing.models]
        programs = {
            name: Collaboration(models, config.collaboration(pairing, method, gammas))
            for name, (method, gammas) in _methods_of(pairing).items()
        }
        for dataset in config.sets:
            bar.set_postfix_str(f"{pairing.name}, {dataset}", refresh=False)
            samples = config.samples(dataset, max(config.limit, config.held_out))
            held = read_answers(programs["standard"], samples[: config.held_out], config.max_new_tokens)
            found, answers = _methods(config, pairing, programs, held, dataset, samples, bar)
            rows += found
            records += answers
            dial += _dial(config, pairing, models, held, dataset, samples, bar)
        yield rows, dial, records
    bar.close()


def _methods_of(pairing: Pairing) -> dict[str, tuple[Method, tuple[int, ...]]]:
    """Method and draft lengths by the row's name; rows that would be the same but for their names are one."""
    ones = (1,) * len(pairing.models)
    return {
        name: (method, pairing.gammas if own else ones)
        for name, method, own in METHODS
        if own or pairing.gammas != ones or method == "standard"
    }


def _methods(
    config: CollaborativeEvalConfig,
    pairing: Pairing,
    programs: Mapping[str, Collaboration],
    held: HeldOut,
    dataset: str,
    samples: Sequence[Sample],
    bar: tqdm,
) -> tuple[list[Record], list[Record]]:
    requests = _requests(config, pairing, programs["standard"], samples)
    answers, rates = _by_turns(programs, requests, config.repeats, bar)
    combination = programs["standard"].params["combination"]
    quality = {"held_out_nats": held.nats(combination), "held_out_nats_alone": held.nats_alone()}
    pooled = collaboration_metrics([a.stats for every in answers.values() for a in every])["alpha"]
    alphas = [0.0 if alpha is None else alpha for alpha in pooled]
    widths = {name: _scoring_widths(c) for name, c in programs.items()}
    times = time_members(programs["CoS"], requests[0], [1, *(w for pair in widths.values() for w in pair)])
    rows, records = [], []
    for name, collaboration in programs.items():
        place = _place(config, pairing, dataset, name, collaboration)
        metrics = collaboration_metrics([a.stats for a in answers[name]])
        calls = _predicted_calls(collaboration, alphas)
        scoring = [times[width][m] for m, width in enumerate(widths[name])]
        best = plan(alphas, times[1], None, range(1, 7))
        rows.append(
            place
            | metrics
            | quality
            | {
                "samples": len(requests),
                "pass_ms": times[1],
                "scoring_pass_ms": scoring,
                "calls_per_token_predicted": calls.total.tolist(),
                "speedup_predicted": speedup(calls, times[1]),
                "speedup_predicted_with_verify": speedup(calls, times[1], scoring),
                "speedup_parallel_at_most": parallel_speedup(times[1]),
                "plan": {"alternates": best.alternates, "first": best.first, "gammas": best.gammas},
                "decode_tokens_per_second": rates[name],
                "speedup_measured": rates[name] / rates["standard"],
                "accuracy": _accuracy(samples, answers[name]),
                "token_identity_rate": _identity(answers[name], answers["standard"])
                if pairing.temperature == 0
                else None,
            }
        )
        records += [
            place | {"sample": sample.id, "tokens": len(a.tokens), "text": a.text} | collaboration_metrics([a.stats])
            for sample, a in zip(samples, answers[name])
        ]
    return rows, records


def _dial(
    config: CollaborativeEvalConfig,
    pairing: Pairing,
    models: Sequence[LoadedModel],
    held: HeldOut,
    dataset: str,
    samples: Sequence[Sample],
    bar: tqdm,
) -> list[Record]:
    """Quality, and speed of alternation with 1 proposal each, over the pairing's grid of combinations."""
    rows = []
    for value, text in pairing.dial:
        pair = {
            method: Collaboration(models, config.collaboration(pairing, method, (1,) * len(models), text))
            for method in ("standard", "alternating")
        }
        requests = _requests(config, pairing, pair["standard"], samples)
        answers, rates = _by_turns(pair, requests, config.repeats, bar)
        combination = parse_combination(text, len(models))
        times = time_members(pair["alternating"], requests[0], [1, len(models)])
        alphas = held.alphas(combination, pairing.temperature)
        calls = alternating_calls(alphas, (1,) * len(models), pairing.proposer)
        rows.append(
            _place(config, pairing, dataset, "dial", pair["alternating"])
            | collaboration_metrics([a.stats for a in answers["alternating"]])
            | {
                "value": value,
                "combine": text,
                "samples": len(requests),
                "held_out_nats": held.nats(combination),
                "held_out_alpha": alphas,
                "accuracy": _accuracy(samples, answers["standard"]),
                "speedup_predicted": speedup(calls, times[1]),
                "speedup_predicted_with_verify": speedup(calls, times[1], times[len(models)]),
                "speedup_measured": rates["alternating"] / rates["standard"],
            }
        )
    return rows


def _requests(
    config: CollaborativeEvalConfig, pairing: Pairing, collaboration: Collaboration, samples: Sequence[Sample]
) -> list[Request]:
    return [
        Request(
            first_question(collaboration.encoder, sample).prompt,
            config.max_new_tokens,
            pairing.temperature,
            seed=config.seed + i,
        )
        for i, sample in enumerate(samples[: config.limit])
    ]


def _by_turns(
    programs: Mapping[str, Collaboration], requests: Sequence[Request], repeats: int, bar: tqdm
) -> tuple[dict[str, Answers], dict[str, float]]:
    """Each program's answers, and its tokens of the loop a second in its fastest run."""
    answers, rates = by_turns(list(programs.values()), requests, repeats, bar)
    return dict(zip(programs, answers)), dict(zip(programs, rates.max(axis=1).tolist()))


def _scoring_widths(collaboration: Collaboration) -> list[int]:
    """Tokens that each model reads in a pass that scores."""
    _, gammas = collaboration.config.checked(len(collaboration.models))
    method = collaboration.config.method
    if method == "alternating":
        return [sum(gammas) - gamma + 1 for gamma in gammas]
    run = 1 if method == "standard" else gammas[collaboration.config.proposer] + (method == "speculative")
    return [run] * len(gammas)


def _predicted_calls(collaboration: Collaboration, alphas: Sequence[float]) -> Calls:
    """By the theory, at these mean chances of acceptance."""
    config, models = collaboration.config, len(alphas)
    _, gammas = config.checked(models)
    if config.method == "standard":
        return Calls(np.ones(models), np.zeros(models))
    if config.method == "alternating":
        return alternating_calls(alphas, gammas, config.proposer)
    gamma, bonus = gammas[config.proposer], config.method == "speculative"
    return one_proposer_calls(alphas[config.proposer], gamma, models, config.proposer, bonus)


def _place(
    config: CollaborativeEvalConfig, pairing: Pairing, dataset: str, row: str, collaboration: Collaboration
) -> Record:
    given = collaboration.config
    return {
        "dataset": dataset,
        "turn": 1,
        "pairing": pairing.name,
        "row": row,
        "models": [os.path.relpath(name) if os.path.isabs(name) else name for name in pairing.models],
        "combine": given.combine,
        "method": given.method,
        "gammas": list(given.checked(len(pairing.models))[1]),
        "proposer": given.proposer,
        "views": [view.name for view in collaboration.views],
        "temperature": pairing.temperature,
        "dtype": config.dtype,
        "device": jax.devices()[0].device_kind,
        "batch": 1,
        "seed": config.seed,
    }


def _identity(answers: Answers, reference: Answers) -> float:
    return float(np.mean([a.tokens == b.tokens for a, b in zip(answers, reference, strict=True)]))


def _accuracy(samples: Sequence[Sample], answers: Answers) -> float | None:
    """The share of answers whose final number is the accepted one; None where answers are no numbers."""
    pairs = [(final_number(s.accepted[0]), final_number(a.text)) for s, a in zip(samples, answers) if s.accepted]
    if not pairs or any(accepted is None for accepted, _ in pairs):
        return None
    return float(np.mean([accepted == given for accepted, given in pairs]))


def final_number(text: str) -> str | None:
    """GSM8K's answer in a text: the number after the last ####, else the last number; without commas."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text.rpartition("####")[2])
    return numbers[-1].replace(",", "") if numbers else None
