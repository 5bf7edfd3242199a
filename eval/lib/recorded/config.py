"""Define a replay of recorded answers: presets under `configs/eval/`, and their options."""

from __future__ import annotations

from dataclasses import dataclass

from eval.lib.drafts.config import Data
from eval.lib.questions.sets import MMSPEC
from jaxspec.errors import InputError, check_counts, check_seed


@dataclass(frozen=True)
class Method:
    """Describe a row of the table: a way to draft without the target's hidden states."""

    name: str
    sources: str
    """`lookup`, or sources that are mixed, such as `history+table`."""
    gamma: int
    """Drafted tokens per block; in a tree, of its longest path."""
    nodes: int = 0
    """Tokens of a tree; 0 drafts a chain."""
    width: int = 0
    """Nodes of a level that get as many children, as in `dynamic:WIDTH:NODES`; 0: best first."""
    learned: bool = False
    """Whether the mixture's weights follow the matches; otherwise all sources weigh the same."""
    plotted: bool = False
    """Whether the figure shows it."""


@dataclass(frozen=True, kw_only=True)
class Record(Data):
    """Choose the recorded answers."""

    tokenizer: str
    """Directory of the target's own tokeniser."""
    folds: int = 6
    """Parts of the prompts; drafts that learn from answers see those of the other parts only."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Choose how they are replayed."""

    order: int = 5
    """Longest context of n-grams, in tokens."""
    nearest: int = 48
    """Answers to similar prompts that the source `similar` counts once more."""
    resamples: int = 2000
    """Bootstrap samples of the prompts, for the 95 % intervals."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class RecordedConfig(Record, Replay):
    """Describe a replay of recorded answers with each of the methods."""

    methods: tuple[Method, ...]

    def __post_init__(self) -> None:
        self.check()
        check_counts(order=self.order, nearest=self.nearest, resamples=self.resamples)
        check_seed(self.seed)
        if self.folds < 2:
            raise InputError(f"folds: {self.folds}; give 2 or more")
        if MMSPEC not in self.places:
            raise InputError(f"data: no {MMSPEC}; give the record's folder as {MMSPEC}=FOLDER")
