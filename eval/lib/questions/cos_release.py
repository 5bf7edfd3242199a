"""Ask CoS's questions as its released code asks them (github.com/Kamichanw/CoS, main_dataset.py).

The prompts and worked examples are read from a clone of that code, which has no licence: nothing of
it is copied here. Each set is shuffled as it does there, with the permutation of numpy's generator
of seed 42 over the rows in their file's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import numpy as np
from jinja2 import Template

from jaxspec.data.benchmarks import rows_and_samples
from jaxspec.data.rows import DataRow
from jaxspec.data.samples import Sample, text_of
from jaxspec.errors import InputError, reading

SEED = 42
FOLDER = Path("src", "mydatasets")
FEWSHOT = "prompt_fewshot.txt"
SUBJECTS = "mmlu-cot-claude-single.json"
"""MMLU's instruction and worked examples, by subject."""
READ = {
    "gsm8k": [Path("gsm8k", FEWSHOT)],
    "mmlu": [Path("mmlu", FEWSHOT), Path("mmlu", SUBJECTS)],
    "cnn-dm": [Path("cnndm", FEWSHOT)],
}
"""Files below `FOLDER` that a set's prompts are made of."""


def released_samples(name: str, clone: Path, path: Path | None = None) -> Iterator[Sample]:
    """Yield a set's samples in the released order, each with the released prompt as its question.

    Args:
      name: A set of `PROMPTS`.
      clone: Folder of the clone.
      path: Local copy of the set; None reads the hub's.

    Raises InputError for another set, and where the clone lacks a file.
    """
    check_clone(name, clone)
    rows = list(rows_and_samples(name, path))
    folder, write = clone / FOLDER, PROMPTS[name]
    for index in np.random.default_rng(SEED).permutation(len(rows)):
        row, sample = rows[index]
        _, reference = sample.turns[0]
        yield replace(sample, turns=((write(folder, row), reference),))


def check_clone(name: str, clone: Path) -> None:
    """Raise InputError for a set that CoS does not ask, and where the clone lacks a file of it."""
    if name not in PROMPTS:
        raise InputError(f"released: CoS does not ask {name}; its sets are {', '.join(PROMPTS)}")
    for file in READ.get(name, ()):
        _read(clone / FOLDER / file)


def _mmlu(folder: Path, row: DataRow) -> str:
    """Return the subject's instruction and examples, then the question with (A) to (D)."""
    choices = zip(ascii_uppercase, row.values["choices"])
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in choices).strip()
    text = _filled(folder / "mmlu", question=_exact(row, "question"), choices_str=listed)
    subjects = json.loads(_read(folder / "mmlu" / SUBJECTS))
    return f"{subjects[_exact(row, 'subject')]}\n\n{text}"


PROMPTS: dict[str, Callable[[Path, DataRow], str]] = {
    "humaneval": lambda _, row: _exact(row, "prompt"),
    "gsm8k": lambda folder, row: _filled(folder / "gsm8k", question=_exact(row, "question")),
    "mmlu": _mmlu,
    "cnn-dm": lambda folder, row: _filled(folder / "cnndm", article=_exact(row, "article")),
}
"""What writes the prompt of a row, by set."""


def _exact(row: DataRow, column: str) -> str:
    """Return a column's text with its outer spaces; InputError without text."""
    text_of(row, (column,))
    return row.values[column]


def _filled(folder: Path, **values: Any) -> str:
    return Template(_read(folder / FEWSHOT)).render(**values)


def _read(file: Path) -> str:
    with reading(f"released {file}: cannot be read", "give a clone of github.com/Kamichanw/CoS"):
        return file.read_text(encoding="utf-8")
