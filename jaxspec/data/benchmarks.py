"""Read the papers' evaluation sets: their paths on the hub, columns and prompts.

The sets of IbED and TABED, and those that AASD and CoS add. The first 100 rows of a set count, as
in picturebook's `test_set`; MMLU's subjects take turns. An unreadable row is an error: if it were
skipped, other rows would be the first hundred. Prompts are TABED's where it prints them,
except for the pair and story sets, which are asked each row's own question; its released code asks
LLaVA-Bench without the printed instruction. Subsets of LMMs-Eval-Lite are read
where TABED's text links them, except POPE, which its code reads whole. IbED names no split of
ChartQA, TextVQA and VQAv2: the splits with public answers are read.

References: TABED, appendix I.1 and its released loader; IbED, appendix A.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from jaxspec.data.hub import hub_rows, on_disk
from jaxspec.data.rows import DataRow, local_rows
from jaxspec.data.samples import Sample, stored_image, text_of
from jaxspec.errors import InputError, located
from jaxspec.prompts.placeholders import place_images

REASON = (
    "For the following question, provide a detailed explanation of your reasoning leading to "
    "the answer.\n"
)
"""TABED's instruction before questions that a word could answer."""

SUMMARISE = "Sum up this article in a few sentences.\n"
DESCRIBE = "Describe this image in detail."
READ = "Describe this image and what is written in it."
PROGRAM = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```python\n{question}\n```"
)
"""EvalPlus's instruction before HumanEval's functions, for models that chat."""


@dataclass(frozen=True)
class Shots:
    """Hold worked examples that a paper puts before every question."""

    split: str
    """Split of the examples; its first rows count."""
    count: int
    by: str = ""
    """Column whose value examples and question share; its values take turns in the set."""


@dataclass(frozen=True)
class Benchmark:
    """Describe an evaluation set: its path on the hub, its columns, and its prompt."""

    name: str
    title: str
    """Name in the papers' tables."""
    hub: str
    split: str
    config: str = "default"
    synthetic: str | None = None
    """The picturebook set that replaces it offline."""
    question: tuple[str, ...] = ("question",)
    """Columns of the question; the first one that a file has counts."""
    answer: tuple[str, ...] = ("answer",)
    """Columns of the reference: text, a number or a list of either."""
    images: str = "image"
    """Pattern of image columns, ordered by their numbers; empty for sets without images."""
    options: str = ""
    """Column of the answers to choose from; the reference is then an index into them."""
    only: tuple[str, str] | None = None
    """Column and value of the set's rows."""
    prompt: str = "{question}"
    short: bool = False
    """Whether references are a few words, so that answers can be judged right or wrong."""
    final: str = ""
    """Mark before the short answer in a long reference."""
    shots: Shots | None = None
    """For `few_shot_samples`."""
    labels: tuple[str, ...] = ()
    """Further text columns to keep."""


def _interleaved(name: str, task: str, title: str, synthetic: str) -> Benchmark:
    """Return a task of LLaVA-NeXT-Interleave-Bench, whose rows have questions with placeholders."""
    source = ("lmms-lab/LLaVA-NeXT-Interleave-Bench", "test", "in_domain", synthetic)
    return Benchmark(name, title, *source, images=r"image_\d+", only=("sub_task", task))


def _short_answers(
    name: str, title: str, hub: str, split: str, synthetic: str, config: str = "default"
) -> Benchmark:
    """Return a set of short answers about an image; IbED and TABED ask for the reasoning."""
    return Benchmark(
        name, title, hub, split, config, synthetic,
        answer=("multiple_choice_answer", "answers", "answer"), prompt=REASON + "{question}",
        short=True,
    )  # fmt: skip


def _humaneval(name: str, prompt: str) -> Benchmark:
    """Return HumanEval, asked with the function's head or with an instruction around it."""
    return Benchmark(
        name, "HumanEval", "openai/openai_humaneval", "test", "openai_humaneval",
        images="", question=("prompt",), answer=("canonical_solution",), prompt=prompt,
        labels=("prompt", "test", "entry_point"),
    )  # fmt: skip


BENCHMARKS = {
    spec.name: spec
    for spec in (
        Benchmark(
            "llava-bench", "LLaVA-Bench", "lmms-lab/llava-bench-in-the-wild", "train",
            synthetic="describe", question=("question", "text"), answer=("gpt_answer",),
            prompt=REASON + "{question}",
        ),
        _short_answers("docvqa", "DocVQA", "lmms-lab/LMMs-Eval-Lite", "lite", "read", "docvqa_val"),
        _short_answers("pope", "POPE", "lmms-lab/POPE", "test", "exist"),
        Benchmark(
            "mm-vet", "MM-Vet", "lmms-lab/MMVet", "test", synthetic="reason",
            prompt=REASON + "{question}",
        ),
        _interleaved("iedit", "IEdit", "IEdit", "edit"),
        _interleaved("magicbrush", "MagicBrush", "MagicBrush", "brush"),
        _interleaved("spot-the-diff", "Spot-the-Diff", "Spot-the-Difference", "spot"),
        _interleaved("pororosv", "PororoSV", "PororoSV", "saga"),
        _interleaved("vist", "VIST", "VIST", "album"),
        Benchmark(
            "nq", "NQ", "google-research-datasets/nq_open", "validation", "nq_open", "facts",
            images="", short=True,
        ),
        Benchmark(
            "gsm8k", "GSM8K", "openai/gsm8k", "test", "main", "sums", images="", short=True,
            final="####", shots=Shots("train", 4),
        ),
        _humaneval("humaneval", "{question}"),
        _humaneval("humaneval-chat", PROGRAM),
        Benchmark(
            "mmlu", "MMLU", "cais/mmlu", "test", "all", images="", options="choices", short=True,
            shots=Shots("dev", 5, by="subject"),
        ),
        Benchmark(
            "cnn-dm", "CNN/DM", "abisee/cnn_dailymail", "test", "3.0.0", images="",
            question=("article",), answer=("highlights",), prompt=SUMMARISE + "{question}",
            shots=Shots("train", 1),
        ),
        _short_answers("chartqa", "ChartQA", "lmms-lab/ChartQA", "test", "chart"),
        _short_answers("textvqa", "TextVQA", "lmms-lab/textvqa", "validation", "read"),
        _short_answers("vqav2", "VQAv2", "lmms-lab/VQAv2", "validation", "reason"),
        Benchmark(
            "hallusionbench", "HallusionBench", "lmms-lab/HallusionBench", "image",
            synthetic="exist", answer=("gt_answer_details",), prompt=REASON + "{question}",
        ),
        Benchmark("ocrbench", "OCRBench", "echo840/OCRBench", "test", synthetic="read", short=True),
        Benchmark(
            "textcaps", "TextCaps", "lmms-lab/TextCaps", "val", synthetic="read",
            question=(), answer=("caption_str", "reference_strs"), prompt=READ,
        ),
        Benchmark(
            "scienceqa", "ScienceQA", "lmms-lab/ScienceQA", "test", "ScienceQA-IMG", "reason",
            options="choices", prompt=REASON + "{question}", short=True,
        ),
        Benchmark(
            "coco", "COCO captions", "lmms-lab/COCO-Caption2017", "val", synthetic="describe",
            question=(), prompt=DESCRIBE,
        ),
    )
}  # fmt: skip


def benchmark_samples(name: str, path: Path | None = None) -> Iterator[Sample]:
    """Yield all samples of a set in the order of its rows, one at a time.

    Args:
      path: Local copy in the hub's columns: a parquet or JSONL file, or a folder of them, or
        `hub:OWNER/NAME@REVISION/FILE`. In JSONL an image is a path relative to the file's folder or
        its `images/`. None reads the hub's.

    Raises InputError, naming file and row, where a column is missing, an image cannot be decoded,
    or placeholders and images differ in number.
    """
    spec = BENCHMARKS[name]
    for number, row in enumerate(_rows(spec, spec.split, path)):
        yield _sample(spec, number, row)


def rows_and_samples(name: str, path: Path | None = None) -> Iterator[tuple[DataRow, Sample]]:
    """Yield each row of a set in its file's order, with the sample of `benchmark_samples`."""
    spec = BENCHMARKS[name]
    for number, row in enumerate(_file_rows(spec, spec.split, path)):
        yield row, _sample(spec, number, row)


def few_shot_samples(
    name: str, path: Path | None = None, examples: Path | None = None
) -> Iterator[Sample]:
    """Yield `benchmark_samples` with worked examples before each question, as in CoS.

    Four for GSM8K, five of the question's own subject for MMLU, one for CNN/DM: the first rows of
    the split that is not tested. The released code's own are in `eval.lib.questions.cos_release`.

    Args:
      examples: Local copy of the examples' split, like `path`.

    Raises InputError for a set without examples, and for too few of them.
    """
    spec = BENCHMARKS[name]
    shots = spec.shots
    if shots is None:
        have = ", ".join(other.name for other in BENCHMARKS.values() if other.shots)
        raise InputError(f"shots: {name} has no worked examples; sets with them are {have}")
    groups: dict[str, list[str]] = {}
    for row in _rows(spec, shots.split, examples):
        group = groups.setdefault(str(row.values.get(shots.by)), [])
        if len(group) < shots.count:
            question, answer = _sample(spec, 0, row).turns[0]
            group.append(f"Question: {question}\nAnswer: {answer}\n\n")
        elif not shots.by:
            break
    for number, row in enumerate(_rows(spec, spec.split, path)):
        group = groups.get(str(row.values.get(shots.by)), [])
        if len(group) < shots.count:
            source = examples or f"{spec.hub}, split {shots.split}"
            raise InputError(f"shots: {len(group)} rows in {source}; {name} takes {shots.count}")
        sample = _sample(spec, number, row)
        question, answer = sample.turns[0]
        yield replace(sample, turns=((f"{''.join(group)}Question: {question}\nAnswer:", answer),))


def _rows(spec: Benchmark, split: str, path: Path | None) -> Iterator[DataRow]:
    """Yield the rows of a split, at least one; the groups of examples take turns."""
    rows = _file_rows(spec, split, path)
    yield from _in_turns(rows, spec.shots.by) if spec.shots and spec.shots.by else rows


def _file_rows(spec: Benchmark, split: str, path: Path | None) -> Iterator[DataRow]:
    """Yield the rows of a split in its file's order, at least one, in the columns that matter."""
    filtered = spec.only[0] if spec.only else ""
    shared = spec.shots.by if spec.shots else ""
    columns = [*spec.question, *spec.answer, *spec.labels, spec.images, spec.options]
    pattern = re.compile("|".join(filter(None, [*columns, filtered, shared])))
    if path is None:
        rows = hub_rows(spec.hub, spec.config, split, pattern, spec.only)
    else:
        rows = local_rows(on_disk(path), pattern, spec.only)
    empty = True
    for row in rows:
        if spec.only is None or row.values.get(spec.only[0]) == spec.only[1]:
            empty = False
            yield row
    if empty:
        condition = f" with {spec.only[0]} {spec.only[1]!r}" if spec.only else ""
        where = path or spec.hub
        raise InputError(
            f"benchmark {spec.name}: no rows{condition} in {where}; give this set's data"
        )


def _in_turns(rows: Iterator[DataRow], column: str) -> Iterator[DataRow]:
    """Yield rows of the column's values in turn, so that the first hundred rows have all values."""
    groups: dict[str, list[DataRow]] = {}
    for row in rows:
        groups.setdefault(str(row.values.get(column)), []).append(row)
    for turn in zip_longest(*groups.values()):
        yield from filter(None, turn)


def _sample(spec: Benchmark, number: int, row: DataRow) -> Sample:
    with located(row.origin):
        return _sample_of(spec, number, row)


def _sample_of(spec: Benchmark, number: int, row: DataRow) -> Sample:
    """Return the sample of a row; InputError for a row that lacks its images or answer."""
    columns = sorted(filter(re.compile(spec.images).fullmatch, row.values), key=_column_number)
    images = tuple(stored_image(row, column, row.values[column]) for column in columns)
    if spec.images and not images:
        raise InputError(f"no image in column {spec.images!r}, of {list(row.values)}")
    question = text_of(row, spec.question) if spec.question else ""
    answers = _texts(
        next((row.values[column] for column in spec.answer if column in row.values), None)
    )
    reference = answers[0] if answers else ""
    if spec.options:  # ["cat", "dog"] and answer 1: accepts "dog", and refers to "B. dog"
        cell = row.values.get(spec.options)
        listed = cell if isinstance(cell, list) else []
        options = ["" if option is None else str(option).strip() for option in listed]
        count = min(len(options), len(ascii_uppercase))
        if len(answers) != 1 or not answers[0].isdecimal() or int(answers[0]) >= count:
            raise InputError(f"answer {answers!r:.60} is no index into the {count} options")
        lettered = [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options)]
        question, right = "\n".join([question, *lettered]), int(answers[0])
        answers, reference = [options[right]], lettered[right]
    question = place_images(spec.prompt.format(question=question), len(images))
    accepted = answers
    if spec.final:  # "3 + 4 = 7 #### 7" -> "7"
        accepted = [answer.rpartition(spec.final)[2].strip() for answer in answers]
    accepted = tuple(dict.fromkeys(accepted)) if spec.short else ()
    labels = tuple((column, text_of(row, (column,))) for column in spec.labels)
    name, turns = f"{spec.name}-{number:03d}", ((question, reference),)
    return Sample(name, spec.name, images, turns, accepted=accepted, labels=labels)


def _texts(value: Any) -> list[str]:
    """Return all answers in a cell: text, a number, VQA's {answer, confidence}, or a list."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return _texts(value.get("answer"))
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    return [str(value).strip()] if str(value).strip() else []


def _column_number(column: str) -> int:
    digits = re.search(r"\d+$", column)
    return int(digits[0]) if digits else 0
