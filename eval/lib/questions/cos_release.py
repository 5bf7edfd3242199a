"""Ask CoS's questions as its released code asks them (github.com/Kamichanw/CoS, main_dataset.py).

The prompts and worked examples are read from a clone of that code, which has no licence: nothing of
it is copied here. Each set is shuffled as it does there, with the permutation of numpy's generator
of seed 42 over the rows in their file's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import ascii_uppercase
from typing import NamedTuple

import numpy as np
from jinja2 import Template

from jaxspec.data.benchmarks import rows_and_samples
from jaxspec.data.rows import DataRow
from jaxspec.data.samples import Sample, text_of
from jaxspec.errors import InputError, reading

SEED = 42
FOLDER = Path("src", "mydatasets")


class Asking(NamedTuple):
    """Say how the released code asks a set."""

    files: tuple[str, ...]
    """Files below `FOLDER` that its prompts are made of."""
    write: Callable[[Sequence[str], DataRow], str]
    """Returns the prompt of a row, from the texts of these files."""


def released_samples(name: str, clone: Path, path: Path | None = None) -> Iterator[Sample]:
    """Yield a set's samples in the released order, each with the released prompt as its question.

    Args:
      name: A set of `SETS`.
      clone: Folder of the clone.
      path: Local copy of the set; None reads the hub's.

    Raises InputError for another set, and where the clone lacks a file.
    """
    texts = read_clone(name, clone)
    rows = list(rows_and_samples(name, path))
    for index in np.random.default_rng(SEED).permutation(len(rows)):
        row, sample = rows[index]
        _, reference = sample.turns[0]
        yield replace(sample, turns=((SETS[name].write(texts, row), reference),))


def read_clone(name: str, clone: Path) -> list[str]:
    """Return the texts of a set's files; InputError for a set that CoS does not ask, and where the
    clone lacks a file.
    """
    if name not in SETS:
        raise InputError(f"released: CoS does not ask {name}; its sets are {', '.join(SETS)}")
    return [_read(clone / FOLDER / file) for file in SETS[name].files]


def _mmlu(texts: Sequence[str], row: DataRow) -> str:
    """Return the subject's instruction and worked examples, then the question with (A) to (D)."""
    form, subjects = texts
    choices = zip(ascii_uppercase, row.values["choices"])
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in choices).strip()
    text = Template(form).render(question=_exact(row, "question"), choices_str=listed)
    return f"{json.loads(subjects)[_exact(row, 'subject')]}\n\n{text}"


def _filled(column: str) -> Callable[[Sequence[str], DataRow], str]:
    """Return what puts a row's column into the form of its set."""
    return lambda texts, row: Template(texts[0]).render({column: _exact(row, column)})


SETS = {
    "humaneval": Asking((), lambda _, row: _exact(row, "prompt")),
    "gsm8k": Asking(("gsm8k/prompt_fewshot.txt",), _filled("question")),
    "mmlu": Asking(("mmlu/prompt_fewshot.txt", "mmlu/mmlu-cot-claude-single.json"), _mmlu),
    "cnn-dm": Asking(("cnndm/prompt_fewshot.txt",), _filled("article")),
}
"""The sets that CoS asks."""


def _exact(row: DataRow, column: str) -> str:
    """Return a column's text with its outer spaces; InputError without text."""
    text_of(row, (column,))
    return row.values[column]


def _read(file: Path) -> str:
    with reading(f"released {file}: cannot be read", "give a clone of github.com/Kamichanw/CoS"):
        return file.read_text(encoding="utf-8")
