"""MMSpec: whole conversations, answered by plain decoding and by every row of a preset."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from jaxspec.data.mmspec import Turn
from jaxspec.data.samples import Sample
from jaxspec.data.sets import MMSPEC
from jaxspec.decoding.engine import Engine, LoadedModel, Request, Result
from jaxspec.decoding.replay import RecordedTarget
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.views import Captioner
from jaxspec.evaluation.block_efficiency import Question, first_question, next_question
from jaxspec.evaluation.config import EvalConfig

BASELINE = "baseline"
Answered = list[tuple[Sample, list[Turn]]]


def measure_mmspec(
    config: EvalConfig, target: LoadedModel, draft: LoadedModel, captioner: Captioner | None = None
) -> dict[str, Answered]:
    """Method -> its answers to all turns of the first `limit` conversations. Every turn follows the method's own
    answers to those before it, as in MMSpec; greedy ones are the target's, whoever drafts."""
    samples = config.samples(MMSPEC)
    engines = {BASELINE: Engine(target, None, config.plain())}
    engines |= {row.name: Engine(target, draft, config.engine(row), captioner) for row in config.rows}
    bar = tqdm(engines.items(), unit="method", desc="MMSpec", delay=1)
    return {name: answer_conversations(config, engine, samples) for name, engine in bar}


def answer_conversations(config: EvalConfig, engine: Engine, samples: Sequence[Sample]) -> Answered:
    """All turns of every sample, a turn of all of them at a time."""
    answered: Answered = [(sample, []) for sample in samples]
    asked: dict[int, Question] = {}
    told: dict[int, Result] = {}
    for depth in range(max(len(sample.turns) for sample in samples)):
        open_ = [i for i, sample in enumerate(samples) if len(sample.turns) > depth]
        for i in open_:
            if depth == 0:
                asked[i] = first_question(engine.encoder, samples[i])
            else:
                asked[i] = next_question(engine.encoder, asked[i], told[i], samples[i].turns[depth][0], samples[i])
        results = engine.generate(
            [Request(asked[i].prompt, config.max_new_tokens, config.temperature, seed=config.seed + i) for i in open_]
        )
        told = dict(zip(open_, results, strict=True))
        for i, result in told.items():
            answered[i][1].append(_turn(result, engine))
    return answered


def _turn(result: Result, engine: Engine) -> Turn:
    return Turn(
        text=result.text,
        tokens=result.tokens,
        steps=result.stats.steps,
        accepted=int(result.stats.accepted_at.sum()) if isinstance(engine.program, Speculator) else None,
        wall_time=None
        if isinstance(engine.target, RecordedTarget)
        else (result.prefill_ms + result.decode_ms) / result.batch / 1e3,
    )
