"""Prompts as token ids, with one placeholder id per image; views replace it (`prompts/rows.py`).

Turns are written by the tokeniser's chat template (a processor's template counts before it).
Without one, a Llama, such as LLaVA-1.5's, gets Vicuna's form, after BOS, and EOS closes every
answer; other models are refused:

    USER: <image>\\n{question} ASSISTANT: {answer}</s>USER: {question} ASSISTANT:

Turns are joined as token ids. They are never decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, Self, TypeVar

import numpy as np

from jaxspec.config import LvlmConfig, ModelConfig, text_config
from jaxspec.errors import InputError
from jaxspec.prompts.placeholders import PLACEHOLDER, VIDEO, check_text, place_images
from jaxspec.prompts.templates import bos_before, own_turn, render_follow_up, render_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = TypeVar("Source", covariant=True)
"""An image of a prompt, such as `data.images.Pixels`. The encoder only counts images."""


@dataclass(frozen=True)
class Prompt(Generic[Source]):
    """Hold token ids with one placeholder id per image, and the images in their order."""

    tokens: np.ndarray
    """int32 [L]."""
    images: tuple[Source, ...] = ()
    sample: str = ""
    """Id of the benchmark sample, by which a recorded answer is found."""
    turn: int = 1


@dataclass(frozen=True)
class PromptEncoder:
    """Translate text to prompts, and answers to text, with one tokeniser."""

    tokenizer: PreTrainedTokenizerBase
    image_token: int | None = None
    """Id of the image placeholder in the target's vocabulary; None for a text model."""
    marks: tuple[int, int] | None = None
    """Ids around the placeholder; `<image>` in a question means all three."""
    decoder: str = "llama"
    """`model_type` of the language model, which tells its form without a chat template."""
    system: str = ""
    """Text before the first `USER:` of a conversation in Vicuna's form."""

    def __post_init__(self) -> None:
        if self.image_token is None:
            return
        ids = self.ids(self.image_text)
        if ids != self._image_ids:
            raise InputError(
                f"tokeniser: {self.image_text!r} encodes to {ids}, not to image_token_index "
                f"{self.image_token}; use the tokeniser that belongs to the model"
            )

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the encoder of prompts for a model of this configuration."""
        decoder = text_config(config).model_type
        if not isinstance(config, LvlmConfig):
            return cls(tokenizer, decoder=decoder)
        return cls(tokenizer, config.image_token_index, config.image_marks, decoder)

    @property
    def eos(self) -> int | None:
        """Return the id that closes an answer; None for a tokeniser without one."""
        return self.tokenizer.eos_token_id

    @cached_property
    def image_text(self) -> str:
        """Return the text that the tokeniser encodes as one image's placeholder and marks."""
        if self.marks is None:
            return PLACEHOLDER
        return "".join(map(str, self.tokenizer.convert_ids_to_tokens(self._image_ids)))

    def prompt(self, question: str, images: Sequence[Source] = ()) -> Prompt[Source]:
        """Return the first turn. Images without a placeholder in the question precede it."""
        text = self.opening(question, len(images))
        ids = [*bos_before(self.tokenizer, text), *self.ids(text)]
        return Prompt(np.asarray(ids, np.int32), tuple(images))

    def completion(self, text: str, images: Sequence[Source] = ()) -> Prompt[Source]:
        """Return the bare text, after BOS if there is one: for models without a chat template."""
        ids = self.ids(self._placed(text, len(images)))
        bos = self.tokenizer.bos_token_id
        return Prompt(np.asarray(ids if bos is None else [bos, *ids], np.int32), tuple(images))

    def follow_up(
        self,
        prompt: Prompt[Source],
        answer: Sequence[int],
        question: str,
        images: Sequence[Source] = (),
    ) -> Prompt[Source]:
        """Return the next turn: the prompt, the answer's own ids, and another question."""
        # A model may write a placeholder, which shows no image of the prompt.
        answer = [token for token in answer if token != self.image_token]
        if not self.tokenizer.chat_template and answer[-1:] != self._end:
            answer = [*answer, *self._end]
        text = self._following(question, answer, len(images))
        ids = [*prompt.tokens.tolist(), *answer, *self.ids(text)]
        return Prompt(
            np.asarray(ids, np.int32), (*prompt.images, *images), prompt.sample, prompt.turn + 1
        )

    def dialogues(
        self, conversations: Sequence[Sequence[tuple[str, str]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return whole conversations for training: ids [L], and the mask [L] of answers.

        A first question without words gets no roles: the answer is plain text, or a caption after
        its images. One call encodes all texts: one call per text costs more than a training step.
        """
        texts, heads = [], []
        for turns in conversations:
            asked = [self._asked(question, turn) for turn, (question, _) in enumerate(turns)]
            heads.append(bos_before(self.tokenizer, asked[0]) if asked else [])
            for text, (_, answer) in zip(asked, turns, strict=True):
                texts += [text.replace(PLACEHOLDER, self.image_text), answer]
        pieces = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        out = []
        for turns, ids in zip(conversations, heads, strict=True):
            mask = [False] * len(ids)
            for _ in turns:
                asked, answer = next(pieces), [*next(pieces), *self._end]
                ids += asked + answer
                mask += [False] * len(asked) + [True] * len(answer)
            out.append((np.asarray(ids, np.int32), np.asarray(mask)))
        return out

    def opening(self, question: str, images: int = 0) -> str:
        """Return the first turn as text, up to where the answer begins."""
        placed = self._placed(question, images)
        if self.tokenizer.chat_template:
            text = render_turns(self.tokenizer, [question], placed, self.image_text)
        else:
            text = own_turn(self.tokenizer, self.decoder, placed)
        if self.system and not text.startswith("USER: "):
            raise InputError(
                f"system {self.system[:40]!r}: the chat template begins with {text[:20]!r}, and a "
                "system prompt is written before 'USER: ' alone; leave it out"
            )
        return f"{self.system} {text}" if self.system else text

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text without BOS; `<image>` becomes the placeholder's."""
        return self.tokenizer.encode(
            text.replace(PLACEHOLDER, self.image_text), add_special_tokens=False
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Return an answer's text, without special tokens and outer spaces."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def continued(self, text: str, tokens: Sequence[int]) -> str:
        """Return an unfinished answer's text: `text`, shown before, and more whole letters."""
        longer = self.decode(tokens).rstrip("\ufffd").rstrip()
        return longer if longer.startswith(text) else text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token adds; "" for a part of a letter, until the last part."""
        texts = [
            self.tokenizer.decode(tokens[:i], skip_special_tokens=True)
            for i in range(len(tokens) + 1)
        ]
        whole = [text.rstrip("\ufffd") for text in texts]
        return [after[len(before) :] for before, after in pairwise(whole)]

    @property
    def _image_ids(self) -> list[int | None]:
        before, after = ([mark] for mark in self.marks) if self.marks else ([], [])
        return [*before, self.image_token, *after]

    @property
    def _end(self) -> list[int]:
        return [] if self.eos is None else [self.eos]

    def _placed(self, question: str, images: int) -> str:
        """Return the question with a placeholder for each image; InputError for videos."""
        if VIDEO in question and self.tokenizer.get_vocab().get(VIDEO) is not None:
            raise InputError(f"prompt {question[:60]!r}: {VIDEO}s are not supported; give images")
        if self.image_token is not None:
            return place_images(question, images)
        check_text(question)
        if images:
            raise InputError(f"prompt {question[:60]!r}: the target is a text model; give no image")
        return question

    def _following(self, question: str, answer: Sequence[int], images: int) -> str:
        """Return the text from the end of an answer to the beginning of the next one."""
        placed = self._placed(question, images)
        if not self.tokenizer.chat_template:
            return own_turn(self.tokenizer, self.decoder, placed)
        return render_follow_up(self.tokenizer, answer, question, placed, self.image_text)

    def _asked(self, question: str, turn: int) -> str:
        """Return the text before the answer of a training dialogue's turn."""
        images = question.count(PLACEHOLDER)
        if turn:
            return self._following(question, self._end, images)
        if not question.replace(PLACEHOLDER, "").strip():
            return PLACEHOLDER * images
        return self.opening(question, images)
