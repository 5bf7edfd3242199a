"""Draft for a recorded target, and count the passes that each draft needs for an answer.

At temperature 0 a block is accepted as far as its drafts equal the target's answer, so a recorded
answer gives the exact number of passes. A source is one view of the next token; a mixture drafts
the token with the highest weighted mean of its sources' probabilities.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from operator import itemgetter

import numpy as np

from eval.lib.recorded.answers import Conversation, Turn
from eval.lib.recorded.config import Method
from eval.lib.recorded.ngrams import IMAGE, Counts, Distribution
from jaxspec.decoding.sources.lookup import COMMON, CONFIDENCE, EARLIER, LONGEST

STEPS = 10
"""Steps of the grid of weights that a learned mixture ranks."""


class Source(ABC):
    """Predict the next token, while one answer is replayed."""

    counts: Counts

    @abstractmethod
    def start(self, conversation: Conversation, turn: int) -> None:
        """Begin the answer of a turn, numbered from 0."""

    def read(self, tokens: Sequence[int], start: int) -> None:  # noqa: B027, most learn nothing
        """Learn from the tokens from `start` on, which the target has verified."""

    def after(self, tokens: Sequence[int]) -> Distribution:
        """Return the distribution of the token after the prompt and part of the answer."""
        return self.counts.after(tokens)


@dataclass
class Lookup(Source):
    """Draft as jaxspec's source `lookup` does by itself (`jaxspec/decoding/sources/lookup.py`)."""

    in_tree: bool
    """Whether nodes match verified tokens only; a chain's tokens match earlier drafts too."""

    def start(self, conversation: Conversation, turn: int) -> None:
        self.successors: dict[tuple[int, ...], list[int]] = {}
        self.frequency: Counter[int] = Counter()
        self.verified = 0
        self.read(conversation.turns[turn].prompt, 0)

    def read(self, tokens: Sequence[int], start: int) -> None:
        for suffix, token in _successions(tokens, start):
            self.successors.setdefault(suffix, []).append(token)
        self.frequency.update(token for token in tokens[start:] if token != IMAGE)
        self.verified = len(tokens)

    def after(self, tokens: Sequence[int]) -> Distribution:
        """Return the tokens behind the latest matches, then all tokens by frequency.

        After [5 6 7 5 8 5] the suffix [5] was last followed by 8, and before that by 6: 8 gets 0.2,
        6 half of 0.2 of the remaining 0.8, and a tenth of the rest is shared by frequency.
        """
        drafted = [] if self.in_tree else list(_successions(tokens, self.verified))
        proposals = []
        for size in range(LONGEST, 0, -1):
            suffix = tuple(tokens[-size:])
            later = [token for before, token in drafted if before == suffix]
            followed = [*self.successors.get(suffix, ()), *later]
            for rank, token in enumerate(islice(dict.fromkeys(reversed(followed)), EARLIER)):
                proposals.append((rank, -size, token, CONFIDENCE[size] / 2**rank))
        after, remaining = dict[int, float](), 1.0
        for *_, token, confidence in sorted(proposals):
            after[token] = after.get(token, 0.0) + remaining * confidence
            remaining *= 1 - confidence
        length = self.frequency.total()
        for token, number in self.frequency.items():
            after[token] = after.get(token, 0.0) + COMMON * remaining * number / length
        total = sum(after.values())
        return {token: after[token] / total for token in sorted(after)}


def _successions(tokens: Sequence[int], start: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield each token from `start` on with the suffixes before it, up to `LONGEST` tokens."""
    for at in range(start, len(tokens)):
        for size in range(1, min(LONGEST, at) + 1):
            suffix = tuple(tokens[at - size : at])
            if IMAGE not in (*suffix, tokens[at]):
                yield suffix, tokens[at]


@dataclass
class History(Source):
    """Count n-grams of the prompt and of the answer so far."""

    order: int

    def start(self, conversation: Conversation, turn: int) -> None:
        self.counts = Counts(self.order)
        self.read(conversation.turns[turn].prompt, 1)

    def read(self, tokens: Sequence[int], start: int) -> None:
        self.counts.add(tokens, start)


@dataclass
class Answers(Source):
    """Count n-grams of the answers in the other folds, each with the end of its prompt as
    context.
    """

    conversations: Sequence[Conversation]
    order: int
    tables: dict[int, Counts] = field(default_factory=dict)

    def start(self, conversation: Conversation, turn: int) -> None:
        fold = conversation.fold
        if fold not in self.tables:
            self.tables[fold] = Counts(self.order)
            for other in self.conversations:
                for answered in other.turns if other.fold != fold else ():
                    _add_answer(self.tables[fold], answered)
        self.counts = self.tables[fold]


@dataclass
class Similar(Answers):
    """Mix the table equally with n-grams of the answers to the most similar prompts in it."""

    nearest: int = field(kw_only=True)
    """Number of similar prompts whose answers count once more."""

    def __post_init__(self) -> None:
        """Compare the last questions of all prompts: cosines of their tokens, weighted by idf."""
        self.turns = [(c, i) for c in self.conversations for i in range(len(c.turns))]
        questions = [_question(*turn) for turn in self.turns]
        column = {token: i for i, token in enumerate(sorted(set().union(*questions)))}
        vectors = np.zeros((len(questions), len(column)), np.float32)
        for vector, question in zip(vectors, questions, strict=True):
            vector[[column[token] for token in question]] = 1.0
        vectors *= np.log(len(questions) / vectors.sum(0))
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)
        ranked = np.argsort(-vectors @ vectors.T, axis=1, kind="stable")
        self.ranked = {(c.id, i): row for (c, i), row in zip(self.turns, ranked, strict=True)}

    def start(self, conversation: Conversation, turn: int) -> None:
        super().start(conversation, turn)
        ranked = (self.turns[at] for at in self.ranked[conversation.id, turn])
        allowed = (c.turns[i] for c, i in ranked if c.fold != conversation.fold)
        self.near = Counts(self.order)
        for answered in islice(allowed, self.nearest):
            _add_answer(self.near, answered)

    def after(self, tokens: Sequence[int]) -> Distribution:
        views = super().after(tokens), self.near.after(tokens)
        union = dict.fromkeys(token for view in views for token in view)
        return {token: sum(view.get(token, 0.0) for view in views) / 2 for token in union}


def _add_answer(counts: Counts, turn: Turn) -> None:
    """Count an answer's tokens, the first ones after the end of its prompt."""
    counts.add([*turn.prompt[-counts.order :], *turn.answer], counts.order)


def _question(conversation: Conversation, turn: int) -> frozenset[int]:
    """Return the tokens of a turn's own question, without earlier turns."""
    before = conversation.turns[turn - 1] if turn else None
    start = len(before.prompt) + len(before.answer) if before else 0
    return frozenset(conversation.turns[turn].prompt[start:])


def mixture_passes(
    sources: Sequence[Source],
    conversation: Conversation,
    turn: int,
    gamma: int,
    learned: bool = False,
) -> int:
    """Return the target passes after prefill with a mixture of sources.

    A static mixture weights all sources equally. A learned one takes, before each block, the point
    of a grid of weights that would have drafted most of the verified tokens of this answer; of
    several such points it takes the mean.
    """
    grid = _grid(len(sources)) if learned else np.full((1, len(sources)), 1 / len(sources))
    matches = np.zeros(len(grid))

    def accepted(tokens: list[int], answer: Sequence[int]) -> int:
        """Return how many tokens of a block the mixture of the sources drafts right."""
        nonlocal matches
        weights = grid[matches == matches.max()].mean(0)
        for drafts, right_token in enumerate(answer[:gamma]):
            views = [source.after(tokens) for source in sources]
            candidates = list(dict.fromkeys(token for view in views for token in view))
            if not candidates:
                return drafts
            probs = np.asarray([[view.get(token, 0.0) for token in candidates] for view in views])
            right = np.asarray(candidates) == right_token
            if learned:
                matches = matches + right[(grid @ probs).argmax(1)]
            if not right[(weights @ probs).argmax()]:
                return drafts
            tokens.append(right_token)
        return min(gamma, len(answer))

    return _passes(sources, conversation, turn, accepted)


def tree_passes(
    sources: Sequence[Source],
    conversation: Conversation,
    turn: int,
    nodes: int,
    depth: int,
    width: int = 0,
) -> int:
    """Return the target passes after prefill with a tree of drafts.

    The sources weigh the same. `nodes` bounds the tree's tokens, and `depth` each path's. Without
    a `width` the tree grows best first; with one, as jaxspec's tree `dynamic:WIDTH:NODES`.
    """
    grow = partial(_grow_levels, width=width) if width else _grow

    def accepted(tokens: list[int], answer: Sequence[int]) -> int:
        paths, drafts = grow(sources, tokens, nodes, depth), 0
        while drafts < len(answer) and tuple(answer[: drafts + 1]) in paths:
            drafts += 1
        return drafts

    return _passes(sources, conversation, turn, accepted)


def _passes(
    sources: Sequence[Source],
    conversation: Conversation,
    turn: int,
    accepted: Callable[[list[int], Sequence[int]], int],
) -> int:
    """Return the target passes after prefill.

    accepted: Returns the number of accepted drafts of a block, from the tokens so far and the
      answer after them.
    """
    for source in sources:
        source.start(conversation, turn)
    prompt, answer = conversation.turns[turn].prompt, conversation.turns[turn].answer
    at, start, passes = 1, len(prompt), 0
    while at < len(answer):
        tokens = [*prompt, *answer[:at]]
        for source in sources:
            source.read(tokens, start)
        start, passes = len(tokens), passes + 1
        at += accepted(tokens, answer[at:]) + 1
    return passes


def _grow(
    sources: Sequence[Source], tokens: Sequence[int], nodes: int, depth: int
) -> set[tuple[int, ...]]:
    """Return the paths to the `nodes` likeliest nodes of the tree after these tokens."""
    paths: set[tuple[int, ...]] = set()
    order = count()  # equal probabilities keep their order
    open_: list[tuple[float, int, tuple[int, ...]]] = [(-1.0, next(order), ())]
    while open_ and len(paths) <= nodes:
        chance, _, path = heapq.heappop(open_)
        paths.add(path)
        if len(path) == depth:
            continue
        for token, prob in _mean(sources, [*tokens, *path]).items():
            heapq.heappush(open_, (chance * prob, next(order), (*path, token)))
    return paths


def _grow_levels(
    sources: Sequence[Source], tokens: Sequence[int], nodes: int, depth: int, width: int
) -> set[tuple[int, ...]]:
    """Return the likeliest of the nodes that `width` nodes of each level and their children give.

    Ties go to the smaller token, and to the earlier node.
    """
    levels: list[list[tuple[float, tuple[int, ...]]]] = [[(-1.0, ())]]
    for _ in range(depth):
        level = []
        for chance, path in sorted(levels[-1], key=itemgetter(0))[:width]:
            after = _mean(sources, [*tokens, *path])
            for token in sorted(after, key=after.__getitem__, reverse=True)[:width]:
                level.append((chance * after[token], (*path, token)))
        levels.append(level)
    drafts = sorted(chain.from_iterable(levels[1:]), key=itemgetter(0))[:nodes]
    return {(), *(path for _, path in drafts)}


def _mean(sources: Sequence[Source], tokens: Sequence[int]) -> Distribution:
    """Return the mean of the sources' distributions of the next token."""
    after: dict[int, float] = {}
    for source in sources:
        for token, prob in source.after(tokens).items():
            after[token] = after.get(token, 0.0) + prob / len(sources)
    return after


def _grid(sources: int) -> np.ndarray:
    """Return all weights in steps of 1 / STEPS that sum to one."""
    points = np.indices((STEPS + 1,) * sources).reshape(sources, -1).T
    return points[points.sum(1) == STEPS] / STEPS


def passes_of(
    method: Method, sources: Mapping[str, Source], conversation: Conversation
) -> list[int]:
    """Return the target passes of each turn with a method."""
    by_name = {**sources, "lookup": Lookup(in_tree=method.nodes > 0)}
    used = [by_name[name] for name in method.sources.split("+")]

    def passes(turn: int) -> int:
        if method.nodes:
            shape = method.nodes, method.gamma, method.width
            return tree_passes(used, conversation, turn, *shape)
        return mixture_passes(used, conversation, turn, method.gamma, method.learned)

    return list(map(passes, range(len(conversation.turns))))
