"""Block efficiency of draft views over the twin sets, against plain decoding in the same run.

For each set and turn the target decodes alone first: its answers are the reference for identity, its time the
baseline of the speed-up, and its first-turn answers the context of the second turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.data.prompts import PLACEHOLDER, Prompt, PromptEncoder
from jaxspec.data.samples import Sample
from jaxspec.decoding.captions import Captioner
from jaxspec.decoding.engine import Engine, LoadedModel, Request, Result
from jaxspec.decoding.replay import RecordedTarget
from jaxspec.decoding.weighting_rules import parse_weighting
from jaxspec.evaluation.config import EvalConfig
from jaxspec.evaluation.metrics import acceptance_metrics, block_fields, predicted_speedup
from jaxspec.evaluation.timing import PassTimes, time_passes

Record = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """One sample of a set at one turn, as a request's prompt."""

    sample: str
    prompt: Prompt


def measure(
    config: EvalConfig, target: LoadedModel, draft: LoadedModel, captioner: Captioner | None = None
) -> tuple[list[Record], list[Record]]:
    """All rows of the table and one record a sample and row.

    Returns (rows, records): a row pools one (dataset, turn, row of the table).
    """
    plain = Engine(target, None, config.plain())
    engines = {row.name: Engine(target, draft, config.engine(row), captioner) for row in config.rows}
    shared = _shared_fields(config)
    rows: list[Record] = []
    records: list[Record] = []
    work = len(config.sets) * len(config.turns) * (1 + len(engines))
    bar = tqdm(total=work, unit="run", desc="block efficiency", delay=1)
    passes: dict[str, PassTimes] = {}
    for dataset in config.sets:
        bar.set_postfix_str(dataset)
        for turn, questions in each_turn(config, plain, dataset):
            requests = [
                Request(q.prompt, config.max_new_tokens, config.temperature, seed=config.seed + i)
                for i, q in enumerate(questions)
            ]
            reference = plain.generate(requests)
            bar.update()
            for row in config.rows:
                engine = engines[row.name]
                results = engine.generate(requests)
                if row.name not in passes and not isinstance(target, RecordedTarget):
                    passes[row.name] = time_passes(engine, requests[: config.batch_size])
                place = {"dataset": dataset, "turn": turn, "row": row.name, "views": list(row.views)}
                place |= {"weighting": str(parse_weighting(row.weighting))} | block_fields(engine.config) | shared
                rows.append(place | _pool(config, results, reference, passes.get(row.name), row.adaptive_gamma))
                records += [
                    place
                    | {"sample": q.sample, "tokens": len(r.tokens), "identical": r.tokens == a.tokens, "text": r.text}
                    | acceptance_metrics([r.stats])
                    | ({"trace": r.trace} if r.trace else {})
                    for q, r, a in zip(questions, results, reference, strict=True)
                ]
                bar.update()
    bar.close()
    return rows, records


def each_turn(config: EvalConfig, plain: Engine, dataset: str) -> Iterator[tuple[int, list[Question]]]:
    """The prompts of each turn asked for; the second follows the target's own answer to the first."""
    encoder = plain.encoder
    if 1 in config.turns:
        yield 1, [first_question(encoder, sample) for sample in config.samples(dataset)]
    if 2 in config.turns:
        samples = config.samples(dataset, turns=2)
        first = [first_question(encoder, sample) for sample in samples]
        answers = plain.generate([Request(q.prompt, config.max_new_tokens) for q in first])
        yield 2, [next_question(encoder, q, a, s.turns[1][0], s) for q, a, s in zip(first, answers, samples)]


def first_question(encoder: PromptEncoder, sample: Sample) -> Question:
    """The sample's first turn, with the images that belong to it."""
    asked = sample.turns[0][0]
    prompt = encoder.prompt(asked, sample.images[: asked.count(PLACEHOLDER)])
    return Question(sample.id, replace(prompt, sample=sample.id))


def next_question(encoder: PromptEncoder, before: Question, answer: Result, asked: str, sample: Sample) -> Question:
    """The next turn after an answer, with the images that the turns before have not shown."""
    shown = len(before.prompt.images)
    new = sample.images[shown : shown + asked.count(PLACEHOLDER)]
    return Question(sample.id, encoder.follow_up(before.prompt, answer.tokens, asked, new))


def _pool(
    config: EvalConfig, results: list[Result], reference: list[Result], passes: PassTimes | None, adaptive: bool
) -> Record:
    """Metrics over all answers; times only of a target that runs (`passes` is None of a recorded one)."""
    metrics = acceptance_metrics([r.stats for r in results])
    same = [r.tokens == a.tokens for r, a in zip(results, reference, strict=True)]
    metrics |= {"samples": len(results), "token_identity_rate": float(np.mean(same))}
    if passes is None:
        return metrics
    length = metrics["mean_acceptance_length"]
    times = {"draft_ms": passes.draft_ms, "verify_ms": passes.verify_ms, "target_ms": passes.target_ms}
    # Eq. (1) is for blocks of one length.
    predicted = {} if length is None or adaptive else {
        "speedup_predicted": predicted_speedup(length, config.gamma, passes.draft_ms, passes.target_ms),
        "speedup_predicted_with_verify": predicted_speedup(
            length, config.gamma, passes.draft_ms, passes.target_ms, passes.verify_ms
        ),
    }  # fmt: skip
    measured = {
        "caption_ms": sum(r.caption_ms for r in results) / len(results),
        "prefill_ms": sum(r.prefill_ms / r.batch for r in results) / len(results),
        "decode_tokens_per_second": _rate(results),
        "speedup_measured": _rate(results) / _rate(reference),
    }
    return metrics | times | predicted | measured


def _rate(results: list[Result]) -> float:
    """Tokens of the loop a second, over all batches."""
    return 1e3 * sum(r.stats.emitted for r in results) / max(sum(r.decode_ms / r.batch for r in results), 1e-9)


def _shared_fields(config: EvalConfig) -> Record:
    return {
        "temperature": config.temperature,
        "dtype": config.dtype,
        "device": jax.devices()[0].device_kind,
        "batch": config.batch_size,
        "seed": config.seed,
    }
