"""Encode prompts as token ids, with one placeholder an image, which views replace.

Turns are written by the tokeniser's chat template (a processor's template counts before it).
Without one, a Llama, such as LLaVA-1.5's, gets Vicuna's form, after BOS, and EOS closes every
answer; other models are refused:

    USER: <image>\\n{question} ASSISTANT: {answer}</s>USER: {question} ASSISTANT:

A turn after a model's own answer is joined to it as token ids, which are never decoded and encoded
again. What people write is text, whatever it quotes (`quoting.py`); `completion` reads it raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import dropwhile
from typing import TYPE_CHECKING, Generic, Self

import numpy as np

from jaxspec.config import LvlmConfig, ModelConfig, text_config
from jaxspec.errors import InputError
from jaxspec.prompts import templates
from jaxspec.prompts.messages import Message, Source, user_message
from jaxspec.prompts.placeholders import PLACEHOLDER, VIDEO, check_text
from jaxspec.prompts.quoting import Quoter, quoter
from jaxspec.prompts.reasoning import Marks, Splitter, marks_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt(Generic[Source]):
    """Hold token ids with one placeholder id per image, and the images in their order."""

    tokens: np.ndarray
    """int32 [L]."""
    images: tuple[Source, ...] = ()
    sample: str = ""
    """Id of the benchmark sample, by which a recorded answer is found."""
    turn: int = 1
    continued: bool = False
    """Whether the answer continues the text, so that its outer spaces count."""

    @property
    def newest(self) -> tuple[int, ...]:
        """Return the token that a continuation follows; none for an answer to a question."""
        return tuple(self.tokens[-1:].tolist()) if self.continued else ()


@dataclass(frozen=True)
class PromptEncoder:
    """Translate text to prompts, and answers to text, with one tokeniser."""

    tokenizer: PreTrainedTokenizerBase
    image_token: int | None = None
    """Id of the image placeholder in the target's vocabulary; None for a text model."""
    marks: tuple[int, int] | None = None
    """Ids around the placeholder; `<image>` in a question means all three."""
    decoder: str = "llama"
    """`model_type` of the language model, which decides its form without a chat template."""
    sign: int | None = None
    """Id that chat templates write for placeholder and marks; None: those themselves."""
    space: str = ""
    """Text before and after placeholder and marks that chat templates leave out."""
    stops: tuple[int, ...] = ()
    """Ids that may end an answer."""
    system: str = ""
    """System prompt of conversations that begin without one."""
    thinking: bool | None = None
    """Whether the model thinks before it answers, where the chat template has a switch for that;
    None leaves the choice to the template."""

    def __post_init__(self) -> None:
        check_text(self.system)
        if self.thinking is not None:
            templates.check_thinking(self.tokenizer)
        if self.image_token is None:
            return
        ids = self.tokenizer.encode(self._image_piece, add_special_tokens=False)
        if ids != self._image_ids:
            raise InputError(
                f"tokeniser: {self._image_piece!r} encodes to {ids}, not to image_token_index "
                f"{self.image_token}; use the tokeniser that belongs to the model"
            )

    @classmethod
    def of(cls, config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Return the encoder of prompts for a model of this configuration."""
        text = text_config(config)
        encoder = cls(tokenizer, decoder=text.model_type, stops=text.stop_tokens)
        if not isinstance(config, LvlmConfig):
            return encoder
        marks, sign, space = config.image_marks, config.image_sign, config.image_space
        token = config.image_token_index
        return replace(encoder, image_token=token, marks=marks, sign=sign, space=space)

    @property
    def eos(self) -> int | None:
        """Return the id that closes an answer; None for a tokeniser without one."""
        return self.tokenizer.eos_token_id

    @property
    def chats(self) -> bool:
        """Return whether the model is asked by turns; a base model continues a text."""
        template = self.tokenizer.chat_template
        return bool(template) or templates.has_vicuna_form(self.tokenizer, self.decoder)

    @cached_property
    def reasoning(self) -> Marks | None:
        """Return the marks around the model's reasoning; None for a model that does not think."""
        return marks_of(self.tokenizer)

    def splitter(self, prompt: Prompt) -> Splitter | None:
        """Return the splitter of an answer's reasoning; None for a model without reasoning."""
        if self.reasoning is None or prompt.continued:
            return None
        return Splitter(self.tokenizer, self.reasoning, prompt.tokens.tolist())

    @cached_property
    def image_text(self) -> str:
        """Return the text of an image in a message, and in what a chat template writes."""
        if self.sign is None:
            return self._image_piece
        return str(self.tokenizer.convert_ids_to_tokens(self.sign))

    def prompt(
        self, messages: str | Sequence[Message[Source]], images: Sequence[Source] = ()
    ) -> Prompt[Source]:
        """Return the prompt of a question, or of messages that end with the user's.

        images: Images of a question. Without a placeholder in it they precede it.
        """
        conversation = self._as_messages(messages, images)
        if self.tokenizer.chat_template:
            text = self.opening(conversation)
            ids = [*templates.bos_before(self.tokenizer, text), *self._encoded([text])[0]]
        else:
            ids = self.dialogues([conversation])[0][0].tolist()
        return _prompt(ids, conversation)

    def completion(
        self, text: str, images: Sequence[Source] = (), begins: bool = True
    ) -> Prompt[Source]:
        """Return the bare text, after BOS if there is one: for models without a chat template.

        It may hold special tokens, but images only as `<image>`.

        begins: Whether the text begins with BOS; False leaves that to the text itself.
        """
        conversation = self._as_messages(text, images)
        for part in conversation[0].texts:
            if VIDEO in part and VIDEO in self.tokenizer.get_vocab():
                raise InputError(f"prompt {part[:60]!r}: {VIDEO}s are not supported; give images")
            if self.image_token is not None and self.image_text in part:
                raise InputError(
                    f"prompt {part[:60]!r}: {self.image_text} marks an image in this model, but "
                    "none is given for it; leave it out"
                )
        ids = self.ids(conversation[0].text(self.image_text))
        bos = self.tokenizer.bos_token_id if begins else None
        prompt = _prompt(ids if bos is None else [bos, *ids], conversation)
        return replace(prompt, continued=True)

    def follow_up(
        self,
        prompt: Prompt[Source],
        answer: Sequence[int],
        messages: str | Sequence[Message[Source]],
        images: Sequence[Source] = (),
    ) -> Prompt[Source]:
        """Return the next turn: the prompt, the answer's own ids, and a question or messages.

        The answer's reasoning is left out unless the chat template keeps it.
        """
        conversation = self._as_messages(messages, images)
        # A model may write a placeholder, which shows no image of the prompt.
        answer = [token for token in answer if token != self.image_token]
        if not self.tokenizer.chat_template and answer[-1:] != self._closing:
            answer = [*answer, *self._closing]
        before, answer = self._lasting(prompt, answer, conversation)
        (following,) = self._encoded([self._following(conversation, answer)])
        after = _prompt([*before, *answer, *following], conversation)
        images, turn = (*prompt.images, *after.images), prompt.turn + 1
        return replace(prompt, tokens=after.tokens, images=images, turn=turn, continued=False)

    def dialogues(
        self, conversations: Sequence[Sequence[Message]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return whole conversations for training: ids [L], and the mask [L] of answers.

        An answered first question without words gets no roles: the answer is plain text, or a
        caption after its images. One call encodes all texts: one call per text costs more than a
        training step.
        """
        for messages in conversations:
            self._check(messages)
        pieces = [self._pieces(messages) for messages in conversations]
        encoded = iter(self._encoded([text for conversation in pieces for text in conversation]))
        out = []
        for conversation in pieces:
            ids = templates.bos_before(self.tokenizer, conversation[0]) if conversation else []
            mask = [False] * len(ids)
            for number in range(len(conversation)):
                is_answer = number % 2 == 1
                piece = [*next(encoded), *(self._closing if is_answer else ())]
                ids += piece
                mask += [is_answer] * len(piece)
            out.append((np.asarray(ids, np.int32), np.asarray(mask)))
        return out

    def opening(self, messages: Sequence[Message]) -> str:
        """Return messages as text, after the system prompt, up to where the next answer begins.

        Special tokens in what they say are marked as quoted.
        """
        if self.system and [message.role for message in messages[:1]] != ["system"]:
            messages = [Message("system", (self.system,)), *messages]
        messages = self._quoted(messages)
        if self.tokenizer.chat_template:
            return templates.render(self.tokenizer, messages, self.image_text, self.thinking)
        return templates.vicuna_turn(self.tokenizer, self.decoder, messages, self.image_text)

    def ids(self, text: str) -> list[int]:
        """Return the ids of a text, also of its special tokens, without BOS."""
        return self.tokenizer.encode(self._with_placeholders(text), add_special_tokens=False)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text without BOS, in which no token is special."""
        return self._quoter.ids([self._quoter.quote(text)])[0]

    def text(self, tokens: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the text of tokens, without special ones.

        after: Tokens before them, without whose company some decoders strip the first word's space.
        """
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        before, whole = (
            (decode(after), decode([*after, *tokens])) if after else ("", decode(tokens))
        )
        return whole[len(before) :] if whole.startswith(before) else decode(tokens)

    @cached_property
    def _quoter(self) -> Quoter:
        images = [self.sign, *self._image_ids]
        names = self.tokenizer.convert_ids_to_tokens([i for i in images if i is not None])
        return quoter(self.tokenizer, tuple(map(str, names)))

    def _quoted(self, messages: Sequence[Message[Source]]) -> list[Message[Source]]:
        return [message.mapped(self._quoter.quote) for message in messages]

    def _encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of what a template made of quoted messages, without BOS."""
        return self._quoter.ids([self._with_placeholders(text) for text in texts])

    @property
    def _image_ids(self) -> list[int | None]:
        before, after = ([mark] for mark in self.marks) if self.marks else ([], [])
        return [*before, self.image_token, *after]

    @cached_property
    def _image_piece(self) -> str:
        """Return the text that the tokeniser encodes as one image's placeholder and marks."""
        if self.marks is None:
            return PLACEHOLDER
        return "".join(map(str, self.tokenizer.convert_ids_to_tokens(self._image_ids)))

    def _with_placeholders(self, text: str) -> str:
        """Return a text with placeholder, marks and space in place of each `image_text`."""
        if self.image_token is None or self.sign is None:
            return text
        return text.replace(self.image_text, f"{self.space}{self._image_piece}{self.space}")

    @cached_property
    def _closing(self) -> list[int]:
        """Return the id that closes an answer in training: the chat template's, or EOS."""
        ends = [] if self.eos is None else [self.eos]
        if not self.tokenizer.chat_template or {*self.stops} <= {*ends}:
            return ends
        after = self._following([Message("user", ("Hello.",))], ()).lstrip()
        strings = {token: str(self.tokenizer.convert_ids_to_tokens(token)) for token in self.stops}
        return [token for token, string in strings.items() if after.startswith(string)][:1] or ends

    def _as_messages(
        self, messages: str | Sequence[Message[Source]], images: Sequence[Source]
    ) -> list[Message[Source]]:
        """Return a question or messages as messages; InputError where the model cannot read them.

        A text model reads `<image>` as it is written.
        """
        if isinstance(messages, str):
            is_text = self.image_token is None
            question = Message("user", (messages,), tuple(images))
            conversation = [question if is_text else user_message(messages, images)]
        else:
            conversation = list(messages)
            if conversation[-1].role not in ("user", "tool"):
                raise InputError(
                    f"messages: the last is the {conversation[-1].role}'s; end with the user's"
                )
        self._check(conversation)
        return conversation

    def _check(self, messages: Sequence[Message]) -> None:
        """Raise InputError for half a character, and for an image that a text model is given."""
        for message in messages:
            for text in message.texts:
                check_text(text)
            if message.images and self.image_token is None:
                text = " ".join(message.texts)[:60]
                raise InputError(f"prompt {text!r}: the target is a text model; give no image")

    def _following(self, messages: Sequence[Message], answer: Sequence[int]) -> str:
        """Return the text from the end of an answer to the beginning of the next one.

        Special tokens in the messages are marked as quoted.
        """
        messages = self._quoted(messages)
        if not self.tokenizer.chat_template:
            return templates.vicuna_turn(self.tokenizer, self.decoder, messages, self.image_text)
        return templates.render_follow_up(
            self.tokenizer, answer, messages, self.image_text, self.thinking
        )

    def _lasting(
        self, prompt: Prompt, answer: Sequence[int], messages: Sequence[Message]
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt and its answer that the next turn shows."""
        before, splitter, answer = prompt.tokens.tolist(), self.splitter(prompt), list(answer)
        if splitter is None or not self.tokenizer.chat_template:
            return before, answer
        quoted = self._quoted(messages)
        if templates.keeps_reasoning(self.tokenizer, splitter.marks, quoted, self.image_text):
            return before, answer
        tail = [token for token in answer if splitter.part(token) == "answer"]
        if splitter.begin < len(before) or len(tail) < len(answer):
            # As templates do, which leave out the blank text behind the reasoning too.
            tail = list(dropwhile(lambda token: not self.tokenizer.decode([token]).strip(), tail))
        return before[: splitter.begin], tail

    def _pieces(self, messages: Sequence[Message]) -> list[str]:
        """Return a conversation as texts, by turns what is said before an answer, and the answer.

        [system, user, assistant, user] is "... USER: Who? ASSISTANT:", "Me.", "USER: ...".
        """
        pieces: list[str] = []
        question: list[Message] = []
        for message in messages:
            if message.role != "assistant":
                question.append(message)
                continue
            if not pieces and len(question) == 1 and not "".join(question[0].texts).strip():
                pieces.append(self.image_text * len(question[0].images))
            else:
                pieces.append(self._before_answer(question, first=not pieces))
            (quoted,) = self._quoted([message])
            pieces.append(quoted.text(self.image_text))
            question = []
        return [*pieces, self._before_answer(question, first=not pieces)] if question else pieces

    def _before_answer(self, messages: Sequence[Message], first: bool) -> str:
        """Return the text before an answer."""
        return self.opening(messages) if first else self._following(messages, self._closing)


def _prompt(ids: Sequence[int], messages: Sequence[Message[Source]]) -> Prompt[Source]:
    images = tuple(image for message in messages for image in message.images)
    return Prompt(np.asarray(ids, np.int32), images)
