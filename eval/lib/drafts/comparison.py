"""Measure the block efficiency of draft views over sets of prompts, against plain decoding in the
same run.

For each set and turn the target first decodes plainly. Its answers are the reference for identity,
its time the baseline of the speed-up, and its first-turn answers the context of the second turn.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from eval.lib.drafts.config import Decoding, EvalConfig
from eval.lib.output.intervals import interval
from eval.lib.output.report import progress
from eval.lib.output.tables import Record, has
from eval.lib.questions.prompts import prompt_records
from eval.lib.standins.replay import RecordedTarget
from eval.lib.times.passes import PassTimes, interleaved, predicted_speedup, speed_up, time_passes
from jaxspec.data.samples import Sample
from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.state import DecodeStats
from jaxspec.engine.engine import Engine, EngineConfig, Request, Result
from jaxspec.engine.metrics import acceptance_metrics, block_fields
from jaxspec.engine.requests import nth_seed
from jaxspec.errors import InputError, first_line
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.placeholders import PLACEHOLDER

Keep = Callable[[Record, Callable[[], Any]], Any]
"""Function of a key and of work with a JSON value, as `Run.keep`."""


class Group(NamedTuple):
    """Hold the results of engines that were measured by turns."""

    rows: list[Record]
    """One row for each engine, pooled over its answers."""
    records: list[Record]
    """One record for each answer."""
    failed: list[Record]
    """Engines that failed, each with its `error`, instead of rows."""
    prompts: Sequence[Record] = ()
    """What each model read, see `prompt_records`."""


def compare(
    config: EvalConfig,
    plain: Engine,
    engines: Mapping[str, Engine],
    before: Sequence[Record] = (),
    keep: Keep = lambda _, work: work(),
) -> Iterator[Group]:
    """Measure engines of one target, by name, and plain decoding of the same requests.

    Yields a group for each part of each set that `before` lacks. If an engine fails, the others are
    still measured.

    Args:
      keep: `Run.keep`, which keeps the answers of a part that is stopped.
    """
    before = [row for row in before if row["gamma"] == config.gamma]
    passes = {row["row"]: times for row in before if (times := PassTimes.of(row))}
    open_parts = [part for part in config.parts() if not has(before, **part)]
    work = len(open_parts) * (1 + len(engines)) * config.repeats
    with progress(work, "block efficiency") as bar:
        for part in open_parts:
            bar.set_postfix_str(part["dataset"], refresh=False)
            with config.named(part["dataset"]):
                prompts = prompts_of(config, plain, part)
                group = _group(config, plain, engines, part, prompts, passes, keep, bar)
            yield group


def _group(
    config: EvalConfig,
    plain: Engine,
    engines: Mapping[str, Engine],
    where: Record,
    prompts: list[Prompt],
    passes: dict[str, PassTimes],
    keep: Keep,
    bar: tqdm,
) -> Group:
    """Run all engines by turns; time the `passes` of each engine once."""
    group = Group([], [], [])
    requests = requests_of(config, prompts, config.temperature)
    key = where | {"gamma": config.gamma}
    kept = Kept(plain, keep, key)
    guarded = [_Guarded(each, keep, key | {"row": name}) for name, each in engines.items()]
    (reference, *answers), rates = interleaved([kept, *guarded], requests, config.repeats, bar)
    for i, (name, guard, results) in enumerate(zip(engines, guarded, answers, strict=True), 1):
        engine, settings = guard.engine, guard.engine.config
        assert isinstance(settings, EngineConfig)
        fields = where | engine_fields(name, engine, config)
        recorded = isinstance(engine.assembly.lead, RecordedTarget)
        if config.times and name not in passes and not recorded:
            times = guard.attempt(time_passes, engine, requests[: config.batch_size])
            passes |= {name: times} if times else {}
        if guard.error is not None:
            group.failed.append(fields | {"error": guard.error})
            continue
        same = [r.tokens == a.tokens for r, a in zip(results, reference, strict=True)]
        row = fields | acceptance_metrics([r.stats for r in results])
        low, high = interval(np.array([[r.stats.emitted, r.stats.steps] for r in results]))
        # Sampled answers follow plain decoding's law, but need not be its answers.
        row |= {
            "samples": len(results),
            "mean_new_tokens": float(np.mean([len(r.tokens) for r in results])),
            "low": low,
            "high": high,
            "token_identity_rate": None if config.temperature else float(np.mean(same)),
        }
        if "C" in (settings.views or ()):
            images = sum(len(prompt.images) for prompt in prompts)
            row["caption_ms_per_image"] = sum(r.caption_ms for r in results) / max(images, 1)
        if name in passes:
            row |= _times(settings, row["tokens_per_pass"], results, passes[name])
            row |= {
                "decode_tokens_per_second": float(np.median(rates.loop[i])),
                "plain_tokens_per_second": float(np.median(rates.loop[0])),
                "speedup_measured": speed_up(rates.loop[i], rates.loop[0]),
                "call_tokens_per_second": float(np.median(rates.call[i])),
                "plain_call_tokens_per_second": float(np.median(rates.call[0])),
                "speedup_call": speed_up(rates.call[i], rates.call[0]),
                "plain_prefill_ms": _prefill_ms(reference),
            }
        group.rows.append(row)
        group.records.extend(
            fields
            | {"sample": prompt.sample, "tokens": len(r.tokens), "text": r.text}
            | ({} if config.temperature else {"identical": equal})
            | acceptance_metrics([r.stats])
            | ({"trace": r.trace} if r.trace else {})
            for prompt, r, equal in zip(prompts, results, same, strict=True)
        )
    able = [plain, *(guard.engine for guard in guarded if guard.error is None)]
    return group._replace(prompts=list(prompt_records(where, able, requests)))


def error_line(error: Exception) -> str:
    """Return one line of an error for the results; print the traceback of a program error."""
    if not isinstance(error, InputError):
        traceback.print_exception(error)
    return first_line(error)


@dataclass
class Kept:
    """Keep an engine's answers of each run, by the fields of its `key`."""

    engine: Engine
    keep: Keep
    key: Record
    runs: int = 0

    def generate(self, requests: list[Request]) -> list[Result]:
        """Answer requests, one a call if batches have one row: answers of a call share its time."""
        self.runs += 1
        key = self.key | {"run": self.runs}
        calls = [requests]
        if self.engine.batcher.config.batch_size == 1:
            calls = [[each] for each in requests]

        def answer() -> list[Record]:
            return [_record(result) for call in calls for result in self.engine.generate(call)]

        return list(map(_result, self.keep(key, answer)))


def _record(result: Result) -> Record:
    """Return the JSON form of a result."""
    counts = {name: np.asarray(count).tolist() for name, count in vars(result.stats).items()}
    return vars(result) | {"stats": counts}


def _result(record: Record) -> Result:
    """Return the result of its JSON form."""
    counts: Record = {
        name: np.asarray(count) if isinstance(count, list) else count
        for name, count in record["stats"].items()
    }
    kind = DecodeStats if "steps" in counts else CollaborationStats
    return Result(**record | {"tokens": tuple(record["tokens"]), "stats": kind(**counts)})


@dataclass
class _Guarded(Kept):
    """Keep an engine's first error too, and do nothing after it."""

    error: str | None = None

    def attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Return the work's result; None if it fails, or if earlier work failed."""
        if self.error is None:
            try:
                return work(*args)
            except Exception as error:
                self.error = error_line(error)
        return None

    def generate(self, requests: list[Request]) -> list[Result]:
        return self.attempt(super().generate, requests) or []


def prompts_of(config: EvalConfig, plain: Engine, part: Record) -> list[Prompt]:
    """Return the prompts of one of `config.parts`.

    Second turns follow the target's own answers to the first.
    """
    samples = config.samples(**part)
    first = [first_prompt(plain.encoder, sample) for sample in samples]
    if part["turn"] == 1:
        return first
    answers = plain.generate([Request(prompt, config.max_new_tokens) for prompt in first])
    return [
        next_prompt(plain.encoder, prompt, answer, sample)
        for prompt, answer, sample in zip(first, answers, samples, strict=True)
    ]


def requests_of(config: Decoding, prompts: Sequence[Prompt], temperature: float) -> list[Request]:
    """Return requests at a temperature, each with a seed of its own."""
    return [
        Request(prompt, config.max_new_tokens, temperature, seed=nth_seed(config.seed, i))
        for i, prompt in enumerate(prompts)
    ]


def first_prompt(encoder: PromptEncoder, sample: Sample, chat_template: bool = True) -> Prompt:
    """Return the sample's first turn with its images, in the chat template or as bare text."""
    if chat_template:
        prompt = encoder.prompt(sample.question(0))
    else:
        question = sample.turns[0][0]
        prompt = encoder.completion(question, sample.images[: question.count(PLACEHOLDER)])
    return replace(prompt, sample=sample.id)


def next_prompt(encoder: PromptEncoder, before: Prompt, answer: Result, sample: Sample) -> Prompt:
    """Return the next turn after an answer."""
    return encoder.follow_up(before, answer.tokens, sample.question(before.turn))


def _times(
    config: EngineConfig, length: float | None, results: list[Result], passes: PassTimes
) -> Record:
    """Return times of passes, captions and prefill, and the speed-up by Eq. (1)."""
    fields = vars(passes) | {
        "caption_ms": sum(r.caption_ms for r in results) / len(results),
        "prefill_ms": _prefill_ms(results),
    }
    if length is not None:
        terms = length, config.length, passes.draft_ms, passes.target_ms
        fields["speedup_predicted"] = predicted_speedup(*terms)
        fields["speedup_predicted_with_verify"] = predicted_speedup(*terms, passes.verify_ms)
    return fields


def _prefill_ms(results: Sequence[Result]) -> float:
    """Return an answer's share of the milliseconds of prefill, of target and draft."""
    return sum(r.prefill_ms / r.batch for r in results) / len(results)


def engine_fields(row: str, engine: Engine, config: EvalConfig) -> Record:
    """Return the fields of a record that describe the engine."""
    settings = engine.config
    assert isinstance(settings, EngineConfig)
    return {
        "row": row,
        "views": list(engine.assembly.mixture.names),
        "weighting": str(settings.rule),
        **block_fields(settings),
        "dtype": config.dtype,
        "device": config.device,
        "batch": settings.batch_size,
        "temperature": config.temperature,
        "seed": config.seed,
    }
