"""Score the draft's and the target's own answers: accuracy, pass@1, ROUGE-L and METEOR.

    python -m eval.draft_quality mini --limit 20 --out runs/quality
    python -m eval.draft_quality mini --attributes 40
    python -m eval.draft_quality llava15 --sets ocrbench textcaps --text-only
    python -m eval.draft_quality mini --sets read --drafts "pooled=runs/train/mini_pooled/hf:P"
    python -m eval.draft_quality coder --sets humaneval-chat gsm8k --limit 164 --run-code
    python -m eval.draft_quality coder --sets gsm8k --limit 100 --combinations contrastive:mu=0.1

These are IbED's measures of drafts (its Table 12), by plain decoding. rouge-score and nltk compute
them (the `quality` extra); METEOR also needs WordNet (`python -m nltk.downloader wordnet`). With
--attributes the script instead asks picturebook's attribute questions on the test split, to find
out whether a model sees. Writes results.json, records.jsonl, prompts.jsonl and table.md into --out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from tqdm import tqdm

from eval.lib.drafts.command_line import parse_command
from eval.lib.drafts.comparison import Group, first_prompt, requests_of
from eval.lib.drafts.config import EvalConfig
from eval.lib.drafts.loading import load_model, load_models, named_places, split_view
from eval.lib.drafts.published import Published, papers_of, sources
from eval.lib.output.intervals import interval
from eval.lib.output.report import Run, progress
from eval.lib.output.tables import Record, Table, has, mean, number, percent, sample_counts
from eval.lib.questions.prompts import prompt_records
from eval.lib.questions.quality import MEASURES, METRICS, judge, rouge_scorer
from eval.lib.questions.run_code import RunsCode
from eval.lib.standins.replay import RecordedTarget, engine_of
from jaxspec.command import input_errors, script_name
from jaxspec.config import LlavaConfig, text_config, with_text
from jaxspec.decoding.collaboration.combination import parse_combination
from jaxspec.engine.config import Batching
from jaxspec.engine.engine import CollaborationConfig, Engine, EngineConfig, LoadedModel, Request
from jaxspec.errors import InputError
from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.rows import rewrite
from jaxspec.prompts.views import VIEWS
from picturebook import probe_set

PART = 32
"""Answers of a model that are saved together."""


@dataclass(frozen=True)
class Options(RunsCode):
    unread: ClassVar = (
        *("turns", "follow_ups", "each_follow_up", "one_turn"),
        *("captioner", "gamma", "repeats", "times", "trace"),
    )
    out: Path = Path("runs/quality/PRESET")
    """Directory for the results and table.md."""
    attributes: int = 0
    """Number of attribute questions of each kind (what, where, colour, count, sign), asked instead
    of the sets."""
    text_only: bool = False
    """Ask each question a second time without its images, as view T shows prompts."""
    drafts: tuple[str, ...] = ()
    """NAME=DIRECTORY:VIEW of further drafts, and the view in which each sees images, such as P36
    for 36 pooled tokens."""
    combinations: tuple[str, ...] = ()
    """Combinations of target and draft, such as weighted:0.5,0.5 or contrastive:mu=0.1 (the target
    against the draft), that answer as models of their own."""

    def __post_init__(self) -> None:
        if self.attributes < 0:
            raise InputError(f"attributes: {self.attributes}; give a whole number, 0 or more")
        if self.attributes and (self.text_only or self.combinations):
            raise InputError(
                f"attributes: {self.attributes}; asked of single models with their images, so "
                "leave out --text-only and --combinations"
            )
        for combination in self.combinations:
            parse_combination(combination, 2)


def main(args: Sequence[str] | None = None) -> None:
    """Measure the quality of the target's and the draft's own answers."""
    preset, config, options = parse_command(Options, __doc__, args)
    with Run(preset, vars(config) | vars(options), options.out) as run:
        loaded = load_models(replace(config, captioner=None))
        target, draft = loaded.target, loaded.draft
        models = {"target": (target, "M")} | ({"draft": (draft, "M")} if draft else {})
        if options.combinations and (draft is None or isinstance(target, RecordedTarget)):
            raise InputError("combinations: they need the weights of a target and of a draft model")
        paths = named_places("drafts", options.drafts, {*models, *options.combinations})
        for name, entry in paths.items():
            path, view = split_view(entry)
            models[name] = load_model(path, config.dtype, config.tiles, target), view or "M"
        run.restore()
        if options.attributes:
            settings = replace(config.plain(), new_buckets=(32,), batch_size=32)
            for name, model in tqdm(models.items(), "attributes", unit="model"):
                if not has(run.rows, model=name):
                    shares = attribute_accuracy(answering(*model, settings), options.attributes)
                    run.add([{"model": name} | shares])
                run.write(attributes_table(options.attributes, run.rows))
        else:
            parts = measure_quality(config, models, options, run.rows, run.records)
            run.collect(parts, lambda: [quality_table(config, run.rows, paths)])


def attributes_table(per_kind: int, rows: Sequence[Record]) -> Table:
    """Return a line per model and a column per kind of question."""
    kinds = [field for field in rows[0] if field != "model"]
    cells = [[row["model"], *(percent(row[kind], 1) for kind in kinds)] for row in rows]
    return Table(f"Attribute questions, {per_kind} of each kind", ["model", *kinds], cells)


def attribute_accuracy(engine: Engine, per_kind: int = 40) -> dict[str, float]:
    """Return the share of right answers to the test split's attribute questions, by kind."""
    samples = probe_set(per_kind)
    prompts = [engine.encoder.prompt(sample.question(0)) for sample in samples]
    requests = [Request(prompt, max_new_tokens=32) for prompt in prompts]
    right: dict[str, list[bool]] = defaultdict(list)
    for sample, result in zip(samples, engine.generate(requests), strict=True):
        for probe in sample.probes:
            right[probe.kind].append(probe.correct(result.text))
    accuracy = {kind: sum(values) / len(values) for kind, values in right.items()}
    return accuracy | {"all": sum(accuracy.values()) / len(accuracy)}


def answering(model: LoadedModel, view: str, config: EngineConfig) -> Engine:
    """Return an engine in which only the model answers, and sees images in the given view."""
    if view == "M":
        return engine_of(model, None, config)
    # Only collaborating models have views of their own; the second, which sees text, has weight 0.
    return combined([model, model], "weighted:1,0", config, (view, "T"))


def combined(
    models: Sequence[LoadedModel],
    combination: str,
    config: EngineConfig,
    views: tuple[str, ...] | None = None,
) -> Engine:
    """Return an engine in which the models write together, a token at a time."""
    shared = {field.name: getattr(config, field.name) for field in fields(Batching)}
    together = CollaborationConfig(
        combination=combination, method="standard", views=views, **shared
    )
    return Engine(models, config=together)


def measure_quality(
    config: EvalConfig,
    models: Mapping[str, tuple[LoadedModel, str]],
    options: Options,
    rows: Sequence[Record],
    answered: Sequence[Record],
) -> Iterator[Group]:
    """Judge plain answers to first turns; yield the records of each part, and the row of each set.

    Args:
      models: Each model by its name in the table, with the view in which it sees images.
      rows: Rows of a stopped run, which are not measured again.
      answered: Records of a stopped run, whose answers are judged already.

    All models have the first one's context length: a draft reads beyond its trained positions, as
    it does when it drafts.
    """
    rouge_scorer()  # fails here, before anything is decoded, if the package is missing
    first, _ = next(iter(models.values()))
    context = text_config(first.config).max_position_embeddings
    engines: list[tuple[str, Engine, bool]] = []
    plain = config.plain()
    for name, (model, view) in models.items():
        wide = _with_context(model, context)
        engines.append((name, answering(wide, view, plain), False))
        if options.text_only:
            engines.append((f"{name}, text-only", answering(wide, "M", plain), True))
    for combination in options.combinations:
        pair = [_with_context(models[name][0], context) for name in ("target", "draft")]
        engines.append((combination, combined(pair, combination, plain), False))
    bar = progress(len(config.sets) * len(engines), "quality", done=len(rows))
    for dataset in config.sets:
        samples = config.samples(dataset)
        for model, engine, blind in engines:
            part_fields = {"dataset": dataset, "turn": 1, "model": model}
            if has(rows, **part_fields):
                continue
            prompts = [first_prompt(engine.encoder, sample) for sample in samples]
            if blind:
                prompts = [without_images(engine.encoder, prompt) for prompt in prompts]
            requests = requests_of(config, prompts, config.temperature)
            records = [record for record in answered if part_fields.items() <= record.items()]
            for start in range(len(records), len(samples), PART):
                part = slice(start, start + PART)
                with config.named(dataset):
                    results = engine.generate(requests[part])
                judged = [
                    part_fields
                    | {"sample": sample.id, "text": result.text, "tokens": len(result.tokens)}
                    | judge(sample, result.text, options.run_code)
                    for sample, result in zip(samples[part], results, strict=True)
                ]
                records += judged
                prompts_read = prompt_records(part_fields, [engine], requests[part])
                yield Group([], judged, [], list(prompts_read))
            bar.update()
            yield Group([part_fields | summary(records)], [], [])
    bar.close()


def summary(records: Sequence[Record]) -> Record:
    """Return the means of a model's answers to a set, each measure with its 95 % interval."""
    row = {"samples": len(records), "mean_new_tokens": mean(records, "tokens")}
    for metric in METRICS:
        scores = [record[metric] for record in records if record[metric] is not None]
        sums = np.array([[score, 1] for score in scores])
        row[metric] = mean(records, metric)
        row[f"{metric}_interval"] = interval(sums) if scores else None
    return row


def without_images(encoder: PromptEncoder, prompt: Prompt) -> Prompt:
    """Return the prompt with view T's text in place of each image."""
    replacements = [VIEWS["T"].substitute(encoder, "")] * len(prompt.images)
    tokens = rewrite(prompt.tokens, encoder.image_token, replacements).tokens
    return replace(prompt, tokens=tokens, images=())


def quality_table(
    config: EvalConfig, rows: Sequence[Record], directories: Mapping[str, str] | None = None
) -> Table:
    """Return a line per model and measure, and a column per set.

    Args:
      directories: Directories of --drafts, by name.
    """
    header = ["model", "measure", *config.sets]
    papers = papers_of(config, config.scores)
    cells = []
    for model in dict.fromkeys(row["model"] for row in rows):
        by_set = {row["dataset"]: row for row in rows if row["model"] == model}
        for metric in METRICS:
            line = [scored(by_set.get(name, {}), metric) for name in config.sets]
            if set(line) != {"-"}:
                cells.append([model, metric, *line])
        cells += _printed(config, papers, model, directories or {})
    notes = [
        f"{config.pair}, {config.dtype}. Plain decoding of {sample_counts(rows)} first turns a "
        f"set, temperature {config.temperature:g}, in percent, with bootstrap 95 % intervals over "
        "answers. accuracy: the answer holds an accepted one, in GSM8K as its final number, in "
        "multiple choice as its letter; pass@1: the program passes its tests; rouge_l and meteor: "
        "the best over the references.",
    ]
    described = [row for row in rows if row["rouge_l"] is not None]
    if described and all(row["meteor"] is None for row in described):
        notes.append("meteor is left out: nltk's `wordnet` corpus is not on this machine.")
    programs = [row for row in rows if MEASURES.get(row["dataset"]) == "pass@1"]
    if programs and all(row["pass@1"] is None for row in programs):
        notes.append("pass@1 is left out: only --run-code runs the programs.")
    measured_sets = set(config.sets)
    notes += sources(config, [paper for paper in papers if measured_sets & paper.columns])
    return Table("Quality of plain answers", header, cells, notes)


def _printed(
    config: EvalConfig, papers: Sequence[Published], model: str, directories: Mapping[str, str]
) -> list[list[str]]:
    """Return the papers' lines for a model: one for each measure."""
    name = model.removesuffix(", text-only")
    lines: dict[str, dict[str, float]] = {}
    for paper in papers:
        for row, numbers in paper.numbers[1].items():
            of, _, metric = row.partition(": ")
            if of == model and paper.places.get(name) == directories.get(name):
                lines.setdefault(metric, {}).update(numbers)
    return [
        [f"{model}, paper", metric, *(number(line.get(name), 1) for name in config.sets)]
        for metric, line in lines.items()
        if set(line) & set(config.sets)
    ]


def scored(row: Record, metric: str) -> str:
    """Return a mean and its interval in percent: `70.7 (63.4 to 77.4)`; `-` without one."""
    if row.get(metric) is None:
        return "-"
    low, high = row[f"{metric}_interval"]
    return f"{100 * row[metric]:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _with_context(model: LoadedModel, positions: int) -> LoadedModel:
    if not isinstance(model.config, LlavaConfig):
        return model
    return replace(model, config=with_text(model.config, max_position_embeddings=positions))


if __name__ == "__main__":
    with input_errors(script_name()):
        main()
