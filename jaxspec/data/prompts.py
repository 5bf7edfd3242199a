"""Prompts as token ids: the LLaVA-1.5 chat template, image placeholders, and padding to buckets.

A prompt keeps one placeholder id per image; the views (`decoding/views.py`) decide what stands there.
The template, after BOS, with the end-of-sequence token closing every answer:

    USER: <image>\\n{question} ASSISTANT: {answer}</s>USER: {question} ASSISTANT:

Turns are joined as token ids, never by decoding and encoding again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.errors import InputError

PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class Prompt:
    """Token ids with one placeholder id per image, and the images in their order."""

    tokens: np.ndarray
    """int32 [L]."""
    images: tuple[Any, ...] = ()
    """PIL images or uint8 arrays [Y, X, 3]."""


@dataclass(frozen=True)
class PromptEncoder:
    """Turns text into prompts with one tokeniser."""

    tokenizer: Any
    image_token: int
    """Id of the image placeholder in the target's vocabulary."""

    def __post_init__(self) -> None:
        ids = self._ids(PLACEHOLDER)
        if ids != [self.image_token]:
            raise InputError(
                f"tokeniser: {PLACEHOLDER!r} encodes to {ids}, config.json says image_token_index "
                f"{self.image_token}; use the tokeniser that belongs to the model"
            )

    @property
    def eos(self) -> int:
        return self.tokenizer.eos_token_id

    def prompt(self, question: str, images: Sequence[Any] = ()) -> Prompt:
        """The first turn. Images without a placeholder in the question are put in front of it."""
        ids = [*self._bos(), *self._question(question, len(images))]
        return Prompt(np.asarray(ids, np.int32), tuple(images))

    def follow_up(self, prompt: Prompt, answer: Sequence[int], question: str, images: Sequence[Any] = ()) -> Prompt:
        """The next turn: the prompt, the answer's own ids, and another question."""
        answer = [token for token in answer if token != self.image_token]  # a model may write one: no image of ours
        answer = answer if answer and answer[-1] == self.eos else [*answer, self.eos]
        ids = [*prompt.tokens.tolist(), *answer, *self._question(question, len(images))]
        return Prompt(np.asarray(ids, np.int32), (*prompt.images, *images))

    def dialogues(self, conversations: Sequence[Sequence[tuple[str, str]]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Whole conversations for training: ids [L] and the mask [L] of what the assistant wrote.

        All texts go through the tokeniser in one call: one by one it costs more than a training step.
        """
        texts = [text for turns in conversations for q, a in turns for text in (f"USER: {q} ASSISTANT:", a)]
        pieces = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        out = []
        for turns in conversations:
            ids = self._bos()
            mask = [False] * len(ids)
            for _ in turns:
                asked, told = next(pieces), [*next(pieces), self.eos]
                ids += asked + told
                mask += [False] * len(asked) + [True] * len(told)
            out.append((np.asarray(ids, np.int32), np.asarray(mask)))
        return out

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def _question(self, question: str, images: int) -> list[int]:
        return self._ids(f"USER: {place_images(question, images)} ASSISTANT:")

    def _bos(self) -> list[int]:
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def place_images(question: str, images: int) -> str:
    """The question with a placeholder an image, put in front if it holds none; else they must be as many."""
    if images and PLACEHOLDER not in question:
        question = f"{PLACEHOLDER}\n" * images + question
    _check(question.count(PLACEHOLDER), images, question)
    return question


def _check(placeholders: int, images: int, question: str) -> None:
    if placeholders != images:
        raise InputError(
            f"prompt {question[:60]!r}: {placeholders} {PLACEHOLDER} placeholders but {images} images; "
            "give one placeholder an image, or none at all"
        )


def bucket(size: int, buckets: Sequence[int], what: str) -> int:
    """The smallest bucket that holds `size`; one compiled program serves each bucket."""
    for limit in sorted(buckets):
        if size <= limit:
            return limit
    raise InputError(f"{what}: {size} is over the largest bucket {max(buckets)}; shorten it or add a bucket")


def pad_rows(rows: Sequence[np.ndarray], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-pads ragged int rows to [B, width] with zeros; returns them with their lengths [B]."""
    out = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out, np.asarray([len(row) for row in rows], np.int32)
