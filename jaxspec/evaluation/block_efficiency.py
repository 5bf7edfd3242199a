"""Block efficiency of draft views over sets of prompts, against plain decoding in the same run.

For each set and turn the target decodes alone first: its answers are the reference for identity, its time the
baseline of the speed-up, and its first-turn answers the context of the second turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.data.prompts import PLACEHOLDER, Prompt, PromptEncoder
from jaxspec.data.samples import Sample
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.decoding.replay import RecordedTarget
from jaxspec.decoding.views import Captioner
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.evaluation.config import EvalConfig
from jaxspec.evaluation.metrics import acceptance_metrics, block_fields, predicted_speedup
from jaxspec.evaluation.report import Record
from jaxspec.evaluation.timing import PassTimes, interleaved, time_passes


def row_engines(
    config: EvalConfig, target: LoadedModel, draft: LoadedModel, captioner: Captioner | None = None
) -> dict[str, Engine]:
    """Return what decodes the config's rows, by their names."""
    return {row.name: Engine(target, draft, config.engine(row), captioner) for row in config.rows}


def compare(
    config: EvalConfig, plain: Engine, engines: Mapping[str, Engine]
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Measure engines of one target, by their names in the table, beside plain decoding of the same requests.

    Yields (rows, records) of each set of data in turn: a row pools one (dataset, turn, engine), a record is of one
    sample of it.
    """
    work = len(config.sets) * len(config.turns) * (1 + len(engines)) * config.repeats
    bar = tqdm(total=work, unit="run", desc="block efficiency", delay=1)
    passes: dict[str, PassTimes] = {}
    for dataset in config.sets:
        bar.set_postfix_str(dataset, refresh=False)
        rows: list[Record] = []
        records: list[Record] = []
        for turn, prompts in each_turn(config, plain, dataset):
            requests = [
                Request(prompt, config.max_new_tokens, config.temperature, seed=config.seed + i)
                for i, prompt in enumerate(prompts)
            ]
            (reference, *answers), (baseline, *rates) = interleaved(
                [plain, *engines.values()], requests, config.repeats, bar
            )
            for (name, engine), results, rate in zip(engines.items(), answers, rates, strict=True):
                if name not in passes and not isinstance(engine.lead, RecordedTarget):
                    passes[name] = time_passes(engine, requests[: config.batch_size])
                place = {"dataset": dataset, "turn": turn} | engine_fields(name, engine.config, config)
                place |= {"temperature": config.temperature}
                same = [r.tokens == a.tokens for r, a in zip(results, reference, strict=True)]
                row = place | acceptance_metrics([r.stats for r in results])
                row |= {"samples": len(results), "token_identity_rate": float(np.mean(same))}
                if "C" in engine.config.views:
                    images = sum(len(prompt.images) for prompt in prompts)
                    row["caption_ms_per_image"] = sum(r.caption_ms for r in results) / max(images, 1)
                if name in passes:
                    row |= _times(engine.config, row["mean_acceptance_length"], results, passes[name])
                    row |= {
                        "decode_tokens_per_second": float(np.median(rate)),
                        "plain_tokens_per_second": float(np.median(baseline)),
                        "speedup_measured": float(np.median(rate / baseline)),
                    }
                rows.append(row)
                records += [
                    place
                    | {"sample": prompt.sample, "tokens": len(r.tokens), "identical": equal, "text": r.text}
                    | acceptance_metrics([r.stats])
                    | ({"trace": r.trace} if r.trace else {})
                    for prompt, r, equal in zip(prompts, results, same, strict=True)
                ]
        yield rows, records
    bar.close()


def each_turn(config: EvalConfig, plain: Engine, dataset: str) -> Iterator[tuple[int, list[Prompt]]]:
    """Yield the prompts of each turn asked for; the second follows the target's own answer to the first."""
    encoder = plain.encoder
    if 1 in config.turns:
        yield 1, [first_prompt(encoder, sample) for sample in config.samples(dataset)]
    if 2 in config.turns:
        samples = config.samples(dataset, turns=2)
        first = [first_prompt(encoder, sample) for sample in samples]
        answers = plain.generate([Request(prompt, config.max_new_tokens) for prompt in first])
        yield 2, [next_prompt(encoder, p, a, s.turns[1][0], s) for p, a, s in zip(first, answers, samples)]


def first_prompt(encoder: PromptEncoder, sample: Sample) -> Prompt:
    """Return the sample's first turn, with the images that belong to it."""
    asked = sample.turns[0][0]
    return replace(encoder.prompt(asked, sample.images[: asked.count(PLACEHOLDER)]), sample=sample.id)


def next_prompt(encoder: PromptEncoder, before: Prompt, answer: Result, asked: str, sample: Sample) -> Prompt:
    """Return the next turn after an answer, with the images that the turns before have not shown."""
    shown = len(before.images)
    return encoder.follow_up(before, answer.tokens, asked, sample.images[shown : shown + asked.count(PLACEHOLDER)])


def _times(config: EngineConfig, length: float | None, results: list[Result], passes: PassTimes) -> Record:
    """Return times of passes and of what comes before the loop, and the speed-up that Eq. (1) makes of the former."""
    fields = vars(passes) | {
        "caption_ms": sum(r.caption_ms for r in results) / len(results),
        "prefill_ms": sum(r.prefill_ms / r.batch for r in results) / len(results),
    }
    if length is not None and not config.adaptive_gamma:  # Eq. (1) is for blocks of one length
        one = length, config.gamma, passes.draft_ms, passes.target_ms
        fields["speedup_predicted"] = predicted_speedup(*one)
        fields["speedup_predicted_with_verify"] = predicted_speedup(*one, passes.verify_ms)
    return fields


def engine_fields(row: str, engine: EngineConfig, config: EvalConfig) -> Record:
    """Return the fields of a record that say what decoded."""
    return {
        "row": row,
        "views": list(engine.views),
        "weighting": str(parse_weighting(engine.weighting)),
        **block_fields(engine),
        "dtype": config.dtype,
        "device": jax.devices()[0].device_kind,
        "batch": engine.batch_size,
        "seed": config.seed,
    }
