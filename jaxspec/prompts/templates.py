"""Turns of user and assistant as text, by a tokeniser's chat template or in Vicuna's form."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from jaxspec.errors import InputError, first_line
from jaxspec.prompts.placeholders import PLACEHOLDER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "<<the answer>>"
"""An answer that a template is given, to find the text that it writes next."""


_MARKS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]")
"""Tokens of other forms than Vicuna's, each the first one of its form."""


def has_vicuna_form(tokenizer: PreTrainedTokenizerBase, decoder: str) -> bool:
    """Return whether a model without a chat template is asked in Vicuna's form, as LLaVA-1.5 is.

    Args:
      decoder: `model_type` of the language model.
    """
    return decoder == "llama" and tokenizer.get_vocab().keys().isdisjoint(_MARKS)


def own_turn(tokenizer: PreTrainedTokenizerBase, decoder: str, question: str) -> str:
    """Return a question in Vicuna's form; InputError for a model that has another form, or none."""
    if not has_vicuna_form(tokenizer, decoder):
        where = tokenizer.name_or_path or "tokeniser"
        raise InputError(
            f"{where}: no chat template, and this {decoder!r} is not asked in Vicuna's form; put "
            "its publisher's chat_template.jinja there, or give jaxspec generate --chat-template "
            "FILE, or --no-chat-template for a base model"
        )
    return f"USER: {question} ASSISTANT:"


def render_turns(
    tokenizer: PreTrainedTokenizerBase, said: Sequence[str], placed: str, image_text: str
) -> str:
    """Return the text that the tokeniser's chat template makes of some turns.

    A template is a stranger's program. transformers runs it in jinja's immutable sandbox, wherever
    the checkpoint holds it: it reaches no Python internals, no file and no module.

    Templates take a message as text or as a list of parts. The first form whose rendering shows all
    texts and images counts: a template that wants parts silently leaves out a text.

    Args:
      said: Texts of user and assistant by turns; the template asks for the next answer.
      placed: The last text with a placeholder for each of its images.
      image_text: The text of one image in the tokeniser's vocabulary.
    """
    texts, images = [*said[:-1], placed], placed.count(PLACEHOLDER)
    forms: list[list[Any]] = [texts, [[_text(text)] for text in texts]]
    if placed != said[-1]:  # no placeholders of its own: the template places the images
        turns: list[Any] = [[_text(text)] for text in said]
        turns[-1] = [{"type": "image"}] * images + turns[-1]
        forms.insert(0, turns)
    reason = "it leaves out what was said"
    for contents in forms:
        messages = [
            {"role": role, "content": content}
            for role, content in zip(cycle(("user", "assistant")), contents)
        ]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # anything that a stranger's template raises
            reason = first_line(error)
            continue
        shown = text.replace(PLACEHOLDER, image_text).count(image_text)
        printed = isinstance(contents[-1], list) and str(contents[-1]) in text  # not read
        if all(words.strip() in text for words in said) and shown >= images and not printed:
            return text
    raise InputError(f"chat template: cannot render turns of user and assistant ({reason})")


def render_follow_up(
    tokenizer: PreTrainedTokenizerBase,
    answer: Sequence[int],
    question: str,
    placed: str,
    image_text: str,
) -> str:
    """Return the template's text from the end of an answer to the beginning of the next one.

    A template closes the answer. Where the answer's last id closes it already, that token is left
    out: after `... <|im_end|>` follows "\\n<|im_start|>user ...".
    """
    said = ["Hello.", _ANSWER, question]
    text = render_turns(tokenizer, said, placed, image_text).partition(_ANSWER)[2]
    added = tokenizer.added_tokens_decoder
    closing = added[answer[-1]].content if answer and answer[-1] in added else None
    if closing and text.lstrip().startswith(closing):
        return text.lstrip().removeprefix(closing)
    return text


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


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
