"""Does speculation change what the target writes? Greedy answers token for token, sampled ones in distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.config import LvlmConfig
from jaxspec.data.images import to_rgb
from jaxspec.data.prompts import Prompt
from jaxspec.decoding.engine import Engine, EngineConfig, LoadedModel, Request
from jaxspec.decoding.loading import image_inputs
from jaxspec.decoding.views import Captioner, rewrite, stack_rows, which_image
from jaxspec.decoding.weighting import parse_weighting
from jaxspec.evaluation.block_efficiency import Question, each_turn, first_question
from jaxspec.evaluation.config import EvalConfig, Row
from jaxspec.evaluation.metrics import acceptance_metrics, block_fields
from jaxspec.evaluation.statistics import two_samples
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import PromptRows
from jaxspec.typing import Array, Params

Record = dict[str, Any]
PASS = 128
"""Token counts of the divergences' forward passes are rounded up to a multiple of this."""


@dataclass(frozen=True)
class Divergence:
    """Where an answer first leaves the reference."""

    index: int
    """New tokens before it."""
    expected: int | None
    """The reference's token; None if it had ended."""
    found: int | None
    logit_gap: float | None
    """Logit of `expected` less that of `found`, in one full forward pass of the target over all before them."""


def measure_identity(
    config: EvalConfig,
    target: LoadedModel,
    draft: LoadedModel,
    captioner: Captioner | None,
    gammas: Sequence[int],
    batches: Sequence[int],
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Greedy answers of every row of the preset, for all draft lengths and batch sizes, against plain decoding.

    The reference decodes in batches of `batches[0]`. Yields (rows, records) of each row of the preset, gamma and batch
    in turn: a row is a set and turn of it; a record one answer, with its `divergence`.
    """
    plain = Engine(target, None, replace(config.plain(), batch_size=batches[0]))
    variants = [(row, gamma, batch) for row in config.rows for gamma in gammas for batch in batches]
    asked: list[tuple[str, int, list[Question], list[tuple[int, ...]]]] = []
    work = len(config.sets) * len(config.turns) * (1 + len(variants))
    bar = tqdm(total=work, unit="run", desc="identity", delay=1)
    for dataset in config.sets:
        bar.set_postfix_str(f"plain {dataset}", refresh=False)
        for turn, questions in each_turn(config, plain, dataset):
            answers = [result.tokens for result in plain.generate(_requests(config, questions))]
            asked.append((dataset, turn, questions, answers))
            bar.update()

    for row, gamma, batch in variants:
        rows: list[Record] = []
        records: list[Record] = []
        engine = Engine(target, draft, replace(config.engine(row), gamma=gamma, batch_size=batch), captioner)
        for dataset, turn, questions, answers in asked:
            bar.set_postfix_str(f"{row.name} gamma {gamma} batch {batch} {dataset}", refresh=False)
            results = engine.generate(_requests(config, questions))
            apart = [
                divergence(target, question.prompt, answer, result.tokens)
                for question, answer, result in zip(questions, answers, results, strict=True)
            ]
            place = _place(config, row, engine.config) | {"dataset": dataset, "turn": turn, "temperature": 0.0}
            rows.append(
                place
                | {
                    "samples": len(results),
                    "token_identity_rate": sum(found is None for found in apart) / len(apart),
                    "first_divergence": min((found.index for found in apart if found), default=None),
                    "largest_logit_gap": max(
                        (found.logit_gap for found in apart if found and found.logit_gap is not None), default=None
                    ),
                }
                | acceptance_metrics([result.stats for result in results])
            )
            records += [
                place
                | {"sample": question.sample, "tokens": len(result.tokens)}
                | {"divergence": found and vars(found)}
                for question, result, found in zip(questions, results, apart, strict=True)
            ]
            bar.update()
        yield rows, records
    bar.close()


def measure_sampling(
    config: EvalConfig,
    target: LoadedModel,
    draft: LoadedModel,
    captioner: Captioner | None,
    draws: int,
    tokens: int,
    batch: int,
    options: Sequence[tuple[float, float]] = ((1.0, 1.0), (2.0, 1.0), (2.0, 0.9)),
) -> list[Record]:
    """Chi-square tests that the first `tokens` tokens drawn with and without the draft are distributed alike.

    The prompt is the first sample of the first set. Each row of the preset draws `draws` answers with seeds
    that plain decoding, which draws as many, does not use. `options` are pairs (temperature, top-p). Returns a
    record a row and option.
    """
    sample = config.samples(config.sets[0])[0]
    engines = {row: replace(config.engine(row), batch_size=batch) for row in config.rows}
    plain = Engine(target, None, replace(config.plain(), batch_size=batch))
    prompt = first_question(plain.encoder, sample).prompt
    bar = tqdm(total=len(options) * (1 + len(engines)), unit="run", desc="sampling", delay=1)

    def drawn(engine: Engine, temperature: float, top_p: float, seed: int) -> list[tuple[int, ...]]:
        requests = [
            Request(prompt, tokens, temperature, top_p=top_p, seed=config.seed + seed + i) for i in range(draws)
        ]
        bar.update()
        return [result.tokens for result in engine.generate(requests)]

    records = []
    references = {option: drawn(plain, *option, seed=draws) for option in options}
    for row, settings in engines.items():
        engine = Engine(target, draft, settings, captioner)
        for option, reference in references.items():
            test = two_samples(drawn(engine, *option, seed=0), reference)
            records.append(
                _place(config, row, settings)
                | {"dataset": "sampling", "turn": 1, "temperature": option[0], "top_p": option[1]}
                | {"samples": draws, "tokens": tokens, "statistic": test.statistic}
                | {"degrees": test.degrees, "p_value": test.p_value}
            )
    bar.close()
    return records


def divergence(
    target: LoadedModel, prompt: Prompt, expected: Sequence[int], found: Sequence[int]
) -> Divergence | None:
    """Where `found` first leaves `expected`, and how sure the target is there; None where they are equal."""
    for i, (ours, theirs) in enumerate(zip(expected, found)):
        if ours != theirs:
            logits = forward_logits(target, prompt, expected[:i])
            return Divergence(i, ours, theirs, float(logits[ours] - logits[theirs]))
    if len(expected) == len(found):
        return None
    i = min(len(expected), len(found))
    ours, theirs = (tokens[i] if i < len(tokens) else None for tokens in (expected, found))
    return Divergence(i, ours, theirs, None)


def forward_logits(target: LoadedModel, prompt: Prompt, answer: Sequence[int]) -> np.ndarray:
    """The target's logits [V] of what follows the prompt and the answer's tokens: one pass over them all."""
    rows, images, _ = whole_row(target, prompt, answer)
    return np.asarray(_last_logits(LanguageModel(target.config), target.params, rows, images))


def whole_row(
    target: LoadedModel, prompt: Prompt, answer: Sequence[int]
) -> tuple[PromptRows, dict[str, Any] | None, np.ndarray]:
    """A prompt with its answer as inputs of one pass (B = 1), padded to a multiple of `PASS`; and which image each
    slot shows."""
    reader, config = target.images, target.config
    assert reader is not None
    assert isinstance(config, LvlmConfig)
    sizes = [(image.height, image.width) for image in map(to_rgb, prompt.images)]
    shown = [reader.slots(size, None, len(sizes)) for size in sizes]
    whole = rewrite(prompt.tokens, config.image_token_index, shown).followed_by(answer)
    (rows,) = stack_rows([[whole]], -(-len(whole) // PASS) * PASS)
    units = sum(reader.units(size, len(sizes)) for size in sizes)
    images = image_inputs(target, [tuple(map(to_rgb, prompt.images))], units)
    return rows, images, which_image(whole, [len(part.sources) for part in shown])


@partial(jax.jit, static_argnums=0)
def _last_logits(
    model: LanguageModel, params: Params, rows: PromptRows, images: dict[str, Array] | None
) -> Array:
    features = None if images is None else model.encode(params, images)
    embeds = model.embed(params, rows, features)
    return model.prefill(params, embeds, rows, rows.tokens.shape[1])[0][0]


def _requests(config: EvalConfig, questions: Sequence[Question]) -> list[Request]:
    return [Request(question.prompt, config.max_new_tokens) for question in questions]


def _place(config: EvalConfig, row: Row, engine: EngineConfig) -> Record:
    return {
        "row": row.name,
        "views": list(row.views),
        "weighting": str(parse_weighting(row.weighting)),
        **block_fields(engine),
        "dtype": config.dtype,
        "device": jax.devices()[0].device_kind,
        "batch": engine.batch_size,
        "seed": config.seed,
    }
