"""Cut an answer at a string that ends it, and off its reasoning, whole or while it is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from jaxspec.prompts.encoder import Prompt, PromptEncoder
from jaxspec.prompts.reasoning import Part

BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Token of a byte, in vocabularies with byte fallback."""


class AnswerText:
    """Decode an answer that grows; the work depends on what is new, not on the whole answer.

    A token's text may depend on its neighbours: bytes make a letter together, one bad byte makes
    all those of its run unreadable, and some tokenisers join "ca n't" again. None of these crosses
    the end of a word's token, so only the tokens from the last one on are decoded again.

    Args:
      stops: Strings that end the answer. Blank text before the first letter is no part of an answer
        to a question, so it holds none.
      pieces: Whether to record the text of each token.
      after: Newest token of a prompt that the answer continues, so that its outer spaces count;
        none leaves them out.

    Attributes:
      tokens: Tokens so far, up to the one that completes a stop string. The fewest tokens decide
        whose text holds a stop string, however many are read at once.
      text: Their text before the stop string.
      stop: Stop string that ended the answer.
      pieces: Text that each token adds; "" for a part of a letter, until the last part.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        stops: Sequence[str] = (),
        pieces: bool = False,
        after: Sequence[int] = (),
    ) -> None:
        self.encoder, self.stops, self.records, self.after = encoder, stops, pieces, after
        self.tokens: list[int] = []
        self.text, self.stop = "", None
        self.pieces: list[str] = []
        self._begin, self._head = 0, ""
        """First token that is decoded again, and the text before it."""
        self._readable = ""
        """Text of all pieces."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the tokens that follow; those after a stop string are left out."""
        step = 1 if self.stops or self.records else max(len(tokens), 1)
        for i in range(0, len(tokens), step):
            self._read(tokens[i : i + step])
            if self.stop is not None:
                return

    def _read(self, tokens: Sequence[int]) -> None:
        """Read further tokens: extend the text, and cut it at the first stop string."""
        self.tokens += tokens
        after = () if self._head else self.after
        whole = self._head + self.encoder.text(self.tokens[self._begin :], after)
        self.text = whole if self.after else whole.strip()
        if self.records:
            readable = whole.rstrip("\ufffd")
            self.pieces.append(readable[len(self._readable) :])
            self._readable += self.pieces[-1]
        if self.stops:
            head, text = (x if self.after else x.lstrip() for x in (self._head, whole))
            start = max(len(head) - max(map(len, self.stops)), 0)
            starts = [(text.find(stop, start), i) for i, stop in enumerate(self.stops)]
            if starts := [pair for pair in starts if pair[0] >= 0]:
                cut, i = min(starts)
                self.text, self.stop = text[:cut], self.stops[i]
        self._settle(whole)

    def _settle(self, whole: str) -> None:
        """Begin the next reading at the newest token, if it is a word's and ends with two letters.

        One letter may still be joined to a next token, as in "ca n" and "'t".
        """
        newest = self.encoder.text(self.tokens[-1:])
        form = str(self.encoder.tokenizer.convert_ids_to_tokens(self.tokens[-1]))
        is_word = newest and whole.endswith(newest) and not BYTE.fullmatch(form)
        if is_word and whole[-2:].isalnum():
            self._begin, self._head = len(self.tokens) - 1, whole[: -len(newest)]


class ReasonedText:
    """Read an answer that grows as `AnswerText` does, with its reasoning apart.

    Attributes:
      tokens: Tokens so far, of the reasoning too.
      reasoning: Text of the reasoning; "" for a model that does not think, and in continued text.
      reasons: Whether each token is a part of the reasoning, or a mark around it.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        prompt: Prompt,
        stops: Sequence[str] = (),
        pieces: bool = False,
    ) -> None:
        self.encoder, self.records = encoder, pieces
        self.answer = AnswerText(encoder, stops, pieces, prompt.newest)
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.reasons: list[bool] = []
        self._splitter = encoder.splitter(prompt)
        self._thoughts = [self._new_thought()]

    @property
    def text(self) -> str:
        return self.answer.text

    @property
    def stop(self) -> str | None:
        return self.answer.stop

    @property
    def reasoning(self) -> str:
        marks = self.encoder.reasoning
        texts = [marks.without_label(thought.text) for thought in self._thoughts] if marks else []
        return "\n".join(filter(None, texts))

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the tokens that follow; those after a stop string are left out."""
        for part, group in groupby(tokens, self._part_of):
            if self.stop is not None:
                return
            run = list(group)
            if part == "mark":
                self._thoughts.append(self._new_thought())
                pieces = [""] * len(run)
            else:
                text = self.answer if part == "answer" else self._thoughts[-1]
                start = len(text.tokens)
                text.extend(run)
                run, pieces = text.tokens[start:], text.pieces[start:]
            self.tokens += run
            self.pieces += pieces
            self.reasons += [part != "answer"] * len(run)

    def _part_of(self, token: int) -> Part:
        return "answer" if self._splitter is None else self._splitter.part(token)

    def _new_thought(self) -> AnswerText:
        return AnswerText(self.encoder, pieces=self.records)


def text_so_far(before: str, text: str, stops: Sequence[str]) -> str:
    """Return the part of an unfinished answer's text that is sent now, and not taken back.

    An incomplete character, or a text that may become a stop string, is held back. Where the
    tokeniser rewrites what was sent ("ca n" becomes "can't"), the sent part stays, and the new text
    follows from the same length on.

    before: The part that an earlier call returned, with which the new one begins.
    """
    letters = text.rstrip("\ufffd").rstrip()
    longer = before + letters[len(before) :]
    starts = (stop[:n] for stop in stops for n in range(1, min(len(stop), len(longer) + 1)))
    unsure = max((len(start) for start in starts if longer.endswith(start)), default=0)
    return longer[: max(len(longer) - unsure, len(before))]
