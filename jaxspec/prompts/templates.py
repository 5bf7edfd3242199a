"""Write messages as text, by a tokeniser's chat template or in Vicuna's form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InputError, first_line
from jaxspec.prompts.messages import Message
from jaxspec.prompts.reasoning import MARKS, Marks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "<<the answer>>"
"""An answer that a template is given, to find the text that it writes next."""
_THOUGHT = "<<the reasoning>>"
"""Reasoning that a template is given, to find whether it shows it."""


_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]")
"""Tokens of other forms than Vicuna's, each the first one of its form."""


def has_vicuna_form(tokenizer: PreTrainedTokenizerBase, decoder: str) -> bool:
    """Return whether a model without a chat template is asked in Vicuna's form, as LLaVA-1.5 is.

    Args:
      decoder: `model_type` of the language model.
    """
    return decoder == "llama" and tokenizer.get_vocab().keys().isdisjoint(_MARKS)


def vicuna_turn(
    tokenizer: PreTrainedTokenizerBase, decoder: str, messages: Sequence[Message], image_text: str
) -> str:
    """Return a question in Vicuna's form; InputError for a model that has another form, or none.

    messages: The system's and then the user's messages.
    """
    if not has_vicuna_form(tokenizer, decoder):
        where = tokenizer.name_or_path or "tokeniser"
        raise InputError(
            f"{where}: no chat template, and this {decoder!r} is not asked in Vicuna's form; put "
            "its publisher's chat_template.jinja there, or give jaxspec generate --chat-template "
            "FILE, or --no-chat-template for a base model"
        )
    roles = [message.role for message in messages]
    if roles not in (["user"], ["system", "user"]):
        some = ", ".join(roles[:4]) + ", ..." * (len(roles) > 4)
        raise InputError(
            f"messages: {some or 'an answer'} before an answer; Vicuna's form has a "
            "system prompt at most, and turns of user and assistant"
        )
    *first, question = (message.text(image_text) for message in messages)
    return " ".join([*first, f"USER: {question} ASSISTANT:"])


def check_thinking(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise InputError for a tokeniser whose chat template has no switch for thinking."""
    if "enable_thinking" not in str(tokenizer.chat_template):
        raise InputError(
            "thinking: the chat template has no switch for it (enable_thinking); leave it out"
        )


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    image_text: str,
    thinking: bool | None = None,
) -> str:
    """Return the text that the tokeniser's chat template makes of messages.

    A template is a stranger's program. transformers runs it in jinja's immutable sandbox, wherever
    the checkpoint holds it: it reaches no Python internals, no file and no module.

    Templates take a message as text or as a list of parts. The first form whose rendering shows all
    texts and images counts: a template that wants parts silently leaves out a text. A system prompt
    that a template does not take precedes the first question.

    Args:
      messages: Messages, the user's last; the template asks for the next answer.
      image_text: The text of one image in the tokeniser's vocabulary.
      thinking: The template's `enable_thinking`; None leaves the choice to the template.
    """
    switches = {} if thinking is None else {"enable_thinking": thinking}
    reason = "it leaves out what was said"
    images = sum(message.parts.count(None) for message in messages)
    texts = [text for message in messages for text in _lasting(message)]
    for contents in _forms(messages, image_text):
        try:
            text = tokenizer.apply_chat_template(
                contents, tokenize=False, add_generation_prompt=True, **switches
            )
        except Exception as error:  # anything that a stranger's template raises
            reason = first_line(error)
            continue
        parts = (entry["content"] for entry in contents if isinstance(entry["content"], list))
        printed = any(str(part) in text for part in parts)  # not read
        whole = all(part.strip() in text for part in texts)
        if whole and text.count(image_text) >= images and not printed:
            return text
    roles = " and ".join(dict.fromkeys(message.role for message in messages))
    raise InputError(f"chat template: cannot render messages of {roles} ({reason})")


def render_follow_up(
    tokenizer: PreTrainedTokenizerBase,
    answer: Sequence[int],
    messages: Sequence[Message],
    image_text: str,
    thinking: bool | None = None,
) -> str:
    """Return the template's text from the end of an answer to the beginning of the next one.

    A template closes the answer. Where the answer's last id closes it already, that token is left
    out: after `... <|im_end|>` follows "\\n<|im_start|>user ...".
    """
    before = Message("user", ("Hello.",)), Message("assistant", (_ANSWER,))
    text = render(tokenizer, [*before, *messages], image_text, thinking).partition(_ANSWER)[2]
    added = tokenizer.added_tokens_decoder
    closing = added[answer[-1]].content if answer and answer[-1] in added else None
    if closing and text.lstrip().startswith(closing):
        return text.lstrip().removeprefix(closing)
    return text


def keeps_reasoning(
    tokenizer: PreTrainedTokenizerBase, marks: Marks, messages: Sequence[Message], image_text: str
) -> bool:
    """Return whether the template shows an answer's reasoning before these messages.

    Qwen3's does only before a tool's, and Gemma 4's before none.
    """
    answer = Message("assistant", (marks.around(_THOUGHT) + _ANSWER,))
    dialogue = [Message("user", ("Hello.",)), answer, *messages]
    return _THOUGHT in render(tokenizer, dialogue, image_text)


def bos_before(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids that precede a first turn: BOS, or none.

    The template may write BOS itself, or neither it nor the tokeniser writes one.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    if tokenizer.chat_template and (
        text.startswith(tokenizer.bos_token) or tokenizer.encode("")[:1] != [bos]
    ):
        return []
    return [bos]


def _forms(messages: Sequence[Message], image_text: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in the forms that templates take, transformers' own form first."""
    has_system = [message.role for message in messages[:2]] == ["system", "user"]
    for conversation in (messages, _without_system(messages)) if has_system else (messages,):
        texts = [message.text(image_text) for message in conversation]
        parts = [_parts(message, image_text) for message in conversation]
        mixed = [
            text if message.inline or message.parts == message.texts[:1] else part
            for message, text, part in zip(conversation, texts, parts)
        ]
        for contents in (mixed, parts, texts):
            yield [
                {"role": message.role, "content": content}
                for message, content in zip(conversation, contents)
            ]


def _parts(message: Message, image_text: str) -> list[dict[str, str]]:
    parts = [message.text(image_text)] if message.inline else message.parts
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the system prompt at the head of the first question."""
    system, first, *later = messages
    begin, parts = "\n".join(system.texts) + "\n\n", first.parts
    parts = (begin + parts[0], *parts[1:]) if parts and parts[0] else (begin, *parts)
    return [replace(first, parts=parts), *later]


def _lasting(message: Message) -> Sequence[str]:
    """Return the texts that a template must show: of an answer what follows its reasoning."""
    if message.role != "assistant":
        return message.texts
    ends = "|".join(re.escape(marks.end) for marks in MARKS)
    return [re.split(ends, text)[-1] for text in message.texts]
