"""How well a model answers on its own: accuracy, ROUGE-L and METEOR against a set's references.

IbED judges drafts by it (appendix, OCRBench and TextCaps). The measures are rouge-score's and nltk's own (the
`quality` extra); METEOR needs WordNet's files too, which no package brings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxspec.config import LlavaConfig, text_config
from jaxspec.data.benchmarks import BENCHMARKS
from jaxspec.data.picturebook import SYNTHETIC_SETS
from jaxspec.data.samples import Sample
from jaxspec.decoding.engine import Engine, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.evaluation.block_efficiency import first_question
from jaxspec.evaluation.config import EvalConfig

Record = dict[str, Any]
METRICS = ("accuracy", "rouge_l", "meteor")


def measure_quality(config: EvalConfig, models: Mapping[str, LoadedModel]) -> tuple[list[Record], list[Record]]:
    """Every model's plain answers to first turns, judged: (a row a set and model, a record an answer).

    The models share the first one's context length: a draft reads on past its trained positions, as it does when
    it drafts.
    """
    rouge_scorer()  # where it is not installed, that is told before anything is decoded
    context = text_config(next(iter(models.values())).config).max_position_embeddings
    engines = {
        name: Engine(_with_context(model, context), None, config.plain())
        for name, model in models.items()
    }
    rows, records = [], []
    bar = tqdm(total=len(config.sets) * len(engines), unit="run", desc="quality", delay=1)
    for dataset in config.sets:
        samples = config.samples(dataset)
        for name, engine in engines.items():
            asked = [first_question(engine.encoder, sample).prompt for sample in samples]
            results = engine.generate(
                [
                    Request(p, config.max_new_tokens, config.temperature, seed=config.seed + i)
                    for i, p in enumerate(asked)
                ]
            )
            scores = [judge(sample, result.text) for sample, result in zip(samples, results, strict=True)]
            place = {"dataset": dataset, "turn": 1, "model": name}
            rows.append(
                place
                | {"samples": len(samples), "mean_new_tokens": float(np.mean([len(r.tokens) for r in results]))}
                | {metric: _mean([score[metric] for score in scores]) for metric in METRICS}
            )
            records += [
                place | {"sample": sample.id, "text": result.text} | score
                for sample, result, score in zip(samples, results, scores, strict=True)
            ]
            bar.update()
    bar.close()
    return rows, records


def judge(sample: Sample, answer: str) -> dict[str, float | None]:
    """The measures of one answer to a sample's first question; None where they do not apply."""
    references = sample.accepted or tuple(filter(None, [sample.turns[0][1]]))
    if not references:
        return dict.fromkeys(METRICS)
    accuracy = float(is_right(references, answer)) if sample.dataset in SHORT else None
    return {"accuracy": accuracy, "rouge_l": rouge_l(references, answer), "meteor": meteor(references, answer)}


SHORT = frozenset(known.name for known in BENCHMARKS.values() if known.short) | {
    name for name in SYNTHETIC_SETS if any(known.short and known.synthetic == name for known in BENCHMARKS.values())
}
"""Sets whose answers are right or wrong, and the synthetic sets that stand for them."""


def is_right(accepted: Sequence[str], answer: str) -> bool:
    """Whether the answer holds an accepted one, as whole words in any case and punctuation.

    Where yes or no is accepted, the first of these two words in the answer decides.
    """
    said = f" {_words(answer)} "
    right = [_words(reference) for reference in accepted]
    if {"yes", "no"} & set(right):
        first = re.search(r" (yes|no)(?= )", said)
        return first is not None and first[1] in right
    return any(f" {reference} " in said for reference in right if reference)


def rouge_l(references: Sequence[str], answer: str) -> float:
    """ROUGE-L's F-measure with Porter stems, the best over the references."""
    return float(rouge_scorer().score_multi(references, answer)["rougeL"].fmeasure)


@cache
def rouge_scorer() -> Any:
    """rouge-score's own. Raises InputError where that is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise InputError("quality: rouge-score is not installed; pip install 'jaxspec[quality]'") from error
    return RougeScorer(["rougeL"], use_stemmer=True)


def meteor(references: Sequence[str], answer: str, lexicon: Any | None = None) -> float | None:
    """METEOR as nltk has it, the best over the references; None without WordNet's files (nltk's `wordnet` corpus).

    nltk looks synonyms up by stem, so that those whose stem is no word count as different words.
    """
    from nltk.corpus import wordnet
    from nltk.translate.meteor_score import meteor_score

    if lexicon is None:
        try:
            wordnet.ensure_loaded()
        except LookupError:
            return None
        lexicon = wordnet
    return float(meteor_score([_words(text).split() for text in references], _words(answer).split(), wordnet=lexicon))


def quality_table(config: EvalConfig, rows: Sequence[Record]) -> tuple[str, list[str], list[list[str]], list[str]]:
    """(title, header, cells, notes): a line a model and measure, a column a set."""
    header = ["model", "measure", *config.sets]
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        found = {row["dataset"]: row for row in rows if row["model"] == model}
        for metric in METRICS:
            values = [found[name][metric] for name in config.sets]
            if any(value is not None for value in values):
                cells.append([model, metric, *("-" if v is None else f"{100 * v:.1f}" for v in values)])
    notes = [
        f"Plain decoding of {config.limit} first turns a set, temperature {config.temperature:g}, in percent. "
        "accuracy: the answer holds an accepted one; rouge_l and meteor: the best over the references.",
    ]
    if all(row["meteor"] is None for row in rows):
        notes.append("meteor is left out: nltk's `wordnet` corpus is not on this machine.")
    return "Quality of plain answers", header, cells, notes


def _words(text: str) -> str:
    return " ".join(re.findall(r"[\w']+", text.lower()))


def _mean(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return float(np.mean(told)) if told else None


def _with_context(model: LoadedModel, positions: int) -> LoadedModel:
    if not isinstance(model.config, LlavaConfig):
        return model
    text = replace(model.config.text_config, max_position_embeddings=positions)
    return replace(model, config=replace(model.config, text_config=text))
