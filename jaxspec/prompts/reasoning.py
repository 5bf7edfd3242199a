"""Tell an answer's reasoning from the answer, by the tokens around it.

    <think>\\nIt has wings.\\n</think>\\n\\nA bird.        Qwen3
    <|channel>thought\\nIt has wings.<channel|>A bird.   Gemma 4

A prompt may end within reasoning, or behind an empty one, as a chat template has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Part = Literal["reasoning", "answer", "mark"]


@dataclass(frozen=True)
class Marks:
    """Hold the tokens before and after reasoning.

    Attributes:
      label: Text behind the first mark that is no part of the reasoning.
    """

    begin: str
    end: str
    label: str = ""

    def around(self, text: str) -> str:
        """Return reasoning as a model writes it."""
        return f"{self.begin}{self.label}{text}{self.end}"

    def without_label(self, text: str) -> str:
        """Return reasoning that may be unfinished without the label or its beginning."""
        return "" if self.label.startswith(text) else text.removeprefix(self.label).lstrip()


MARKS = (Marks("<think>", "</think>"), Marks("<|channel>", "<channel|>", "thought\n"))
"""Marks of all families that think: Qwen3's, which others use too, and Gemma 4's."""


def marks_of(tokenizer: PreTrainedTokenizerBase) -> Marks | None:
    """Return the marks that a tokeniser has tokens for; None for a model that does not think."""
    for marks in MARKS:
        names = [marks.begin, marks.end]
        ids = tokenizer.convert_tokens_to_ids(names)
        if None not in ids and tokenizer.convert_ids_to_tokens(ids) == names:
            return marks
    return None


class Splitter:
    """Sort the tokens of an answer as they come.

    Reasoning begins before the answer does. A later mark quotes itself, unless it is a special
    token, which is no text.

    Args:
      prompt: Tokens of the prompt.

    Attributes:
      begin: Number of the prompt's tokens before the reasoning at its end.
      ids: Tokens of the marks.
      reasons: Whether the next token is reasoning, or ends it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, marks: Marks, prompt: Sequence[int]
    ) -> None:
        self.tokenizer, self.marks = tokenizer, marks
        self.ids = first, last = tokenizer.convert_tokens_to_ids([marks.begin, marks.end])
        begin = max((i for i, token in enumerate(prompt) if token == first), default=len(prompt))
        inside = [token for token in prompt[begin:] if token not in self.ids]
        is_empty = tokenizer.decode(inside).strip() in ("", marks.label.strip())
        self.begin = begin if is_empty else len(prompt)  # else the mark is of an earlier turn
        self.reasons = self.begin < len(prompt) and last not in prompt[begin:]
        self._answers = False
        """Whether the answer has begun."""

    def part(self, token: int) -> Part:
        """Return what the next token belongs to."""
        first, last = self.ids
        if self.reasons:
            self.reasons = token != last
            return "reasoning" if self.reasons else "mark"
        text = self.tokenizer.decode([token], skip_special_tokens=True)
        if token == first and not (self._answers and text):
            self.reasons = True
            return "mark"
        self._answers |= bool(text.strip())
        return "answer"
