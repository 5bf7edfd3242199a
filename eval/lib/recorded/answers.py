"""Read MMSpec's conversations with the recorded answers of a model, as tokens of its own
vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.lib.questions.sets import read_prompts
from eval.lib.recorded.ngrams import IMAGE
from eval.lib.standins.replay import answers_of
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.checkpoints.processors import load_tokenizer
from jaxspec.data.rows import local_rows
from jaxspec.errors import InputError, reading

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. "
)
"""System prompt of LLaVA's reference code."""
PROMPTS = "mmspec.jsonl"
ANSWERS = "llava15_7b_greedy.jsonl"
PUBLISHED = "llava15_7b_published.jsonl"


@dataclass(frozen=True)
class Turn:
    """Hold a prompt and its recorded answer."""

    prompt: list[int]
    """All tokens before the answer, with one `IMAGE` in place of an image."""
    answer: list[int]
    """New tokens, with EOS if the target reached it."""
    exact: bool
    """Whether the tokeniser gives the recorded number of tokens."""


@dataclass(frozen=True)
class Conversation:
    """Hold a prompt of MMSpec with the target's answers to its turns."""

    id: str
    topic: str
    turns: tuple[Turn, ...]
    fold: int
    """A draft for this conversation learns only from the other folds."""


def read_conversations(
    folder: Path, tokenizer: str, folds: int, limit: int
) -> tuple[Conversation, ...]:
    """Read the first `limit` prompts of the folder, with their recorded answers.

    Folds take a topic's prompts in turn. A prompt that shares its image with an earlier one joins
    that one's fold, so that no draft learns from an answer about a test image.
    """
    tokens = load_tokenizer(locate(tokenizer, files=SMALL))
    answers = dict(answers_of(row) for row in local_rows(folder / ANSWERS))
    conversations = []
    fold_of: dict[str, int] = {}
    topics: Counter[str] = Counter()
    for sample in read_prompts(folder / PROMPTS):
        if len(conversations) == limit:
            break
        if sample.id not in answers:
            raise InputError(f"{folder / ANSWERS}: no answer to {sample.id}; record it")
        topic = dict(sample.labels)["topic"]
        key = hashlib.sha256(sample.images[0].content).hexdigest() if sample.images else sample.id
        fold = fold_of.setdefault(key, topics[topic] % folds)
        topics[topic] += 1
        questions = [question for question, _ in sample.turns]
        what = f"{folder / ANSWERS}: not an answer to each question of {sample.id}"
        with reading(what, "record them"):
            turns = tuple(_turns(tokens, questions, answers[sample.id]))
        conversations.append(Conversation(sample.id, topic, turns, fold))
    return tuple(conversations)


def _turns(
    tokenizer: Any,
    questions: Sequence[str],
    answers: Sequence[tuple[str, list[int] | None, int | None]],
) -> Iterator[Turn]:
    """Yield the turns of a conversation in Vicuna's form, `USER: ... ASSISTANT: ...</s>`."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tokens = [tokenizer.bos_token_id, *encode(SYSTEM)]
    for question, (text, _, count) in zip(questions, answers, strict=True):
        before, image, after = question.rpartition("<image>")
        tokens = [*tokens, *encode(f"USER: {before}"), *[IMAGE] * bool(image)]
        tokens += encode(f"{after} ASSISTANT:")
        answer = encode(text)
        if len(answer) != count:
            answer.append(tokenizer.eos_token_id)
        yield Turn(tokens, answer, count in (None, len(answer)))
        tokens = [*tokens, *answer]


@dataclass(frozen=True)
class Published:
    """Hold the counts of another method on one conversation, by turn."""

    new_tokens: list[int]
    passes: list[int]
    """Target passes after prefill."""
    identical: list[bool]
    """Whether the answer equals the target's own."""


def read_published(folder: Path) -> dict[str, dict[str, Published]]:
    """Return other methods' counts, by method and conversation."""
    published: dict[str, dict[str, Published]] = {}
    for row in local_rows(folder / PUBLISHED):
        values = row.values
        with reading(f"{row.origin}: lacks a column", "give it"):
            counts = Published(values["new_tokens"], values["idxs"], values["identical"])
            published.setdefault(values["method"], {})[values["question_id"]] = counts
    return published


def repeated_answers(conversations: Sequence[Conversation]) -> int:
    """Return how many answers occur word for word in another fold."""
    folds: dict[tuple[int, ...], set[int]] = {}
    answers = [
        (tuple(turn.answer), conversation.fold)
        for conversation in conversations
        for turn in conversation.turns
    ]
    for answer, fold in answers:
        folds.setdefault(answer, set()).add(fold)
    return sum(len(folds[answer]) > 1 for answer, _ in answers)
