"""Prompts as token ids: chat templates and image placeholders.

A prompt keeps one placeholder id per image; the views (`prompts/views.py`) decide what stands there.
The processor's chat template is used, or the tokeniser's own, where there is one; else LLaVA-1.5's and Vicuna's,
after BOS, with the end-of-sequence token closing every answer:

    USER: <image>\\n{question} ASSISTANT: {answer}</s>USER: {question} ASSISTANT:

Turns are joined as token ids, never by decoding and encoding again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import Any, Self

import numpy as np

from jaxspec.config import LvlmConfig, ModelConfig
from jaxspec.errors import InputError, first_line

PLACEHOLDER = "<image>"
VIDEO = "<video>"
_VICUNA = (
    "{% for message in messages %}{{ 'USER: ' if message['role'] == 'user' else 'SPACE' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ 'IMAGE\\n' }}{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ ' ASSISTANT:' if message['role'] == 'user' else eos_token }}{% endfor %}"
)
"""What is written where there is no chat template, as one; `SPACE` and `IMAGE` stand for the tokeniser's."""
_ANSWER = "<<the answer>>"
"""What a chat template is given for an answer, to see what it writes behind it."""


@dataclass(frozen=True)
class Prompt:
    """Token ids with one placeholder id per image, and the images in their order."""

    tokens: np.ndarray
    """int32 [L]."""
    images: tuple[Any, ...] = ()
    """PIL images, stored images or uint8 arrays [Y, X, 3]."""
    sample: str = ""
    """Id of the sample that asks it, by which a recorded answer is found."""
    turn: int = 1


@dataclass(frozen=True)
class PromptEncoder:
    """Turns text into prompts with one tokeniser."""

    tokenizer: Any
    image_token: int | None = None
    """Id of the image placeholder in the target's vocabulary; None for a text model, which takes no images."""
    marks: tuple[int, int] | None = None
    """Ids of the tokens that stand before and after it; `<image>` in a question means all three."""
    system: str = ""
    """Text before the first `USER:` of a conversation in Vicuna's form."""

    def __post_init__(self) -> None:
        if self.image_token is None:
            return
        ids = self._ids(self._image_text)
        if ids != self._image_ids:
            raise InputError(
                f"tokeniser: {self._image_text!r} encodes to {ids}, config.json says image_token_index "
                f"{self.image_token} and marks {self.marks} around it; use the tokeniser that belongs to the model"
            )

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: Any) -> Self:
        """Return what makes prompts for a model of this configuration."""
        if not isinstance(config, LvlmConfig):
            return cls(tokenizer)
        return cls(tokenizer, config.image_token_index, config.image_marks)

    @property
    def eos(self) -> int | None:
        """None of a tokeniser that has no such token: nothing then stands behind an answer."""
        return self.tokenizer.eos_token_id

    def prompt(self, question: str, images: Sequence[Any] = ()) -> Prompt:
        """Return the first turn. Images without a placeholder in the question are put in front of it."""
        text = self._opening(question, len(images))
        return Prompt(np.asarray([*self._bos(text), *self._ids(text)], np.int32), tuple(images))

    def raw(self, text: str, images: Sequence[Any] = ()) -> Prompt:
        """Return the text as it is, after BOS if the tokeniser has one: for models without a chat format."""
        ids = self._ids(self._place(text, len(images)))
        bos = self.tokenizer.bos_token_id
        return Prompt(np.asarray(ids if bos is None else [bos, *ids], np.int32), tuple(images))

    def follow_up(
        self, prompt: Prompt, answer: Sequence[int], question: str, images: Sequence[Any] = ()
    ) -> Prompt:
        """Return the next turn: the prompt, the answer's own ids, and another question."""
        answer = [
            token for token in answer if token != self.image_token
        ]  # a model may write one: no image of ours
        if not self._has_template and answer[-1:] != self._end:
            answer = [*answer, *self._end]
        text = self._following(question, answer, len(images))
        ids = [*prompt.tokens.tolist(), *answer, *self._ids(text)]
        return Prompt(
            np.asarray(ids, np.int32), (*prompt.images, *images), prompt.sample, prompt.turn + 1
        )

    def dialogues(
        self, conversations: Sequence[Sequence[tuple[str, str]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return whole conversations for training: ids [L] and the mask [L] of what the assistant wrote.

        A first question without words stands without roles: plain text, or a caption behind its images.
        All texts go through the tokeniser in one call: one by one it costs more than a training step.
        """
        texts, heads = [], []
        for turns in conversations:
            asked = [self._asked(question, turn) for turn, (question, _) in enumerate(turns)]
            heads.append(self._bos(asked[0]) if asked else [])
            for text, (_, answer) in zip(asked, turns, strict=True):
                texts += [text.replace(PLACEHOLDER, self._image_text), answer]
        pieces = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        out = []
        for turns, ids in zip(conversations, heads, strict=True):
            mask = [False] * len(ids)
            for _ in turns:
                asked, told = next(pieces), [*next(pieces), *self._end]
                ids += asked + told
                mask += [False] * len(asked) + [True] * len(told)
            out.append((np.asarray(ids, np.int32), np.asarray(mask)))
        return out

    def _asked(self, question: str, turn: int) -> str:
        images = question.count(PLACEHOLDER)
        if turn:
            return self._following(question, self._end, images)
        if not question.replace(PLACEHOLDER, "").strip():
            return PLACEHOLDER * images
        return self._opening(question, images)

    def chat_templates(self) -> dict[str, str]:
        """Return by name the templates by which transformers' `apply_chat_template` makes the ids that `prompt` does.

        A processor's puts BOS where its tokeniser does. A tokeniser's own never does, so that the template must.
        """
        given = self.tokenizer.chat_template
        named = (
            dict(given) if isinstance(given, dict) else {"default": given or self._written_out()}
        )
        if self.image_token is None and "default" in named and self._bos(self._opening("Hello.")):
            named["default"] = "{{ bos_token }}" + named["default"]
        return named

    def _written_out(self) -> str:
        joined = self._ids("ASSISTANT:") + self._ids("A") == self._ids("ASSISTANT: A")
        return _VICUNA.replace("SPACE", " " if joined else "").replace("IMAGE", self._image_text)

    @property
    def _end(self) -> list[int]:
        return [] if self.eos is None else [self.eos]

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def continued(self, text: str, tokens: Sequence[int]) -> str:
        """Return what the tokens of an unfinished answer say: `text`, told before, and behind it only whole letters."""
        longer = self.decode(tokens).rstrip("\ufffd").rstrip()
        return longer if longer.startswith(text) else text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return what each token adds to the text; nothing, for a part of a letter that later ones complete."""
        texts = [
            self.tokenizer.decode(tokens[:i], skip_special_tokens=True)
            for i in range(len(tokens) + 1)
        ]
        whole = [text.rstrip("\ufffd") for text in texts]
        return [after[len(before) :] for before, after in pairwise(whole)]

    def _place(self, question: str, images: int) -> str:
        if VIDEO in question and self.tokenizer.get_vocab().get(VIDEO) is not None:
            raise InputError(
                f"prompt {question[:60]!r}: {VIDEO}s are not supported; give some frames as images"
            )
        if self.image_token is not None:
            return place_images(question, images)
        check_text(question)
        if images:
            raise InputError(
                f"prompt {question[:60]!r}: {images} images, and the target is a text model; give none"
            )
        return question

    @property
    def _image_ids(self) -> list[int]:
        assert self.image_token is not None
        return (
            [self.image_token]
            if self.marks is None
            else [self.marks[0], self.image_token, self.marks[1]]
        )

    @property
    def _image_text(self) -> str:
        """What stands for an image in the text that the tokeniser reads."""
        if self.marks is None:
            return PLACEHOLDER
        return "".join(map(str, self.tokenizer.convert_ids_to_tokens(self._image_ids)))

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def _opening(self, question: str, images: int = 0) -> str:
        """Return the first turn as text, up to where the answer begins."""
        text = (
            self.rendered(question, images=images)[0]
            if self._has_template
            else self._vicuna(question, images)
        )
        if self.system and not text.startswith("USER: "):
            raise InputError(
                f"system {self.system[:40]!r}: the chat template begins with {text[:20]!r}, and a "
                "system prompt is written before 'USER: ' alone; leave it out"
            )
        return f"{self.system} {text}" if self.system else text

    def _following(self, question: str, answer: Sequence[int], images: int = 0) -> str:
        """Return what stands between an answer and the next, as text.

        A template closes the answer; where the answer's last id closes it already, that is not written twice.
        """
        if not self._has_template:
            return self._vicuna(question, images)
        text = self.rendered("Hello.", _ANSWER, question, images=images)[0].partition(_ANSWER)[2]
        added = self.tokenizer.added_tokens_decoder
        closing = added[answer[-1]].content if answer and answer[-1] in added else None
        if closing and text.lstrip().startswith(closing):
            return text.lstrip().removeprefix(closing)
        return text

    def _vicuna(self, question: str, images: int) -> str:
        return f"USER: {self._place(question, images)} ASSISTANT:"

    def rendered(self, *said: str, images: int = 0) -> tuple[str, list[Any]]:
        """Return the chat template over user and assistant by turns, up to the next answer; and the contents given.

        The last turn's images go where the template puts them, unless the question has placeholders of its own.
        """
        placed = [*said[:-1], self._place(said[-1], images)]
        forms: list[list[Any]] = [placed, [[{"type": "text", "text": text}] for text in placed]]
        if placed[-1] != said[-1]:
            turns: list[Any] = [[{"type": "text", "text": text}] for text in said]
            turns[-1] = [{"type": "image"}] * images + turns[-1]
            forms.insert(0, turns)
        reason = "it leaves out what was said"
        for contents in forms:
            messages = [
                {"role": role, "content": part}
                for role, part in zip(cycle(("user", "assistant")), contents)
            ]
            try:
                text = render(self.tokenizer, messages)
            except Exception as error:  # whatever a stranger's template raises
                reason = first_line(error)
                continue
            # A template that wants lists of parts renders nothing of a string, and does not complain.
            shown = text.replace(PLACEHOLDER, self._image_text).count(self._image_text)
            if all(words.strip() in text for words in said) and shown >= images:
                return text, contents
        raise InputError(
            f"chat template: cannot render turns of user and assistant ({reason}); mend the tokeniser's"
        )

    def _bos(self, text: str) -> list[int]:
        """Return BOS, unless the template wrote it, or wrote none for a tokeniser that puts none either."""
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return []
        if self._has_template and (
            text.startswith(self.tokenizer.bos_token) or self.tokenizer.encode("")[:1] != [bos]
        ):
            return []
        return [bos]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(
            text.replace(PLACEHOLDER, self._image_text), add_special_tokens=False
        )


def check_text(question: str) -> None:
    """Raise InputError for half a character: a surrogate, as a command line has them for bytes that are no UTF-8."""
    try:
        question.encode()
    except UnicodeEncodeError as error:
        half = question[error.start]
        raise InputError(
            f"prompt {question[:60]!r}: {half!r} is half a character; write it in UTF-8"
        ) from None


def place_images(question: str, images: int) -> str:
    """Return the question with a placeholder an image, put in front if it holds none; else they must be as many."""
    return place_in_turns([question], images)[0]


def place_in_turns(questions: Sequence[str], images: int) -> list[str]:
    """Return a dialogue's questions with a placeholder an image, all before the first one if they hold none."""
    for question in questions:
        check_text(question)
    placed = sum(question.count(PLACEHOLDER) for question in questions)
    if images and not placed:
        return [f"{PLACEHOLDER}\n" * images + questions[0], *questions[1:]]
    if placed != images:
        raise InputError(
            f"prompt {questions[0][:60]!r}: {placed} {PLACEHOLDER} placeholders but {images} images; "
            "give one placeholder an image, or none at all"
        )
    return list(questions)


def render(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> str:
    """Return the tokeniser's chat template over messages, ready for the assistant.

    A template is a stranger's program. transformers runs it in jinja's immutable sandbox, wherever
    the checkpoint holds it: it reaches no Python object's internals, no file and no module.
    Raises whatever the template raises.
    """
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
