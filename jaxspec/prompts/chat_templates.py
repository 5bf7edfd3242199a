"""Hold the chat templates with which transformers writes the prompts of this library."""

from __future__ import annotations

from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.prompts.messages import Message
from jaxspec.prompts.templates import bos_before

_VICUNA = (
    "{% for message in messages %}"
    "{{ {'user': 'USER: ', 'assistant': 'SPACE', 'system': ''}[message['role']] }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}{{ 'IMAGE\\n' }}{% endfor %}"
    "{{ message['content'] | selectattr('type', 'equalto', 'text') | map(attribute='text')"
    " | join('\\n') }}{% endif %}"
    "{{ {'user': ' ASSISTANT:', 'assistant': eos_token, 'system': ' '}[message['role']] }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ 'NEXT' }}{% endif %}"
    "{% endfor %}"
)
"""Vicuna's form as a template. `SPACE`, `NEXT` and `IMAGE` are replaced by the tokeniser's own."""


def chat_templates(encoder: PromptEncoder) -> dict[str, str]:
    """Return, by name, templates whose `apply_chat_template` gives the ids of `encoder.prompt`.

    A text model's template writes BOS where prompts have it: transformers adds none to a template's
    text. A processor adds it itself. A model that is refused without a template gets none.
    """
    template = encoder.tokenizer.chat_template
    if not encoder.chats:
        return {}
    templates = (
        dict(template) if isinstance(template, dict) else {"default": template or _vicuna(encoder)}
    )
    hello = Message("user", ("Hello.",))
    is_text = encoder.image_token is None and "default" in templates
    if is_text and bos_before(encoder.tokenizer, encoder.opening([hello])):
        templates["default"] = "{{ bos_token }}" + templates["default"]
    return templates


def _vicuna(encoder: PromptEncoder) -> str:
    """Return Vicuna's form as a template that gives the same ids with this tokeniser."""
    pairs = {"SPACE": ("ASSISTANT:", "A"), "NEXT": (encoder.tokenizer.eos_token or "", "USER:")}
    template = _VICUNA
    for name, texts in pairs.items():
        template = template.replace(name, _between(encoder, *texts))
    return template.replace("IMAGE", encoder.image_text)


def _between(encoder: PromptEncoder, first: str, second: str) -> str:
    """Return the space between two texts with which their ids are those of each by itself."""
    first_ids, second_ids, ids = map(encoder.ids, (first, second, f"{first} {second}"))
    return " " if ids == [*first_ids, *second_ids] else ""
