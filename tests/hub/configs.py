"""Each family has a config.json, the image processor's file and the chat templates, with the
entries of their age.

`files/FAMILY.json` has the files by name. Widths, depths and CLIP's images are small; the patches,
the layers that features are taken from and the names of entries are the originals'. What depends on
the words is written "=<image>" (a token's id), "=words+5" (their number, and 5 more), "=rows" (rows
of Gemma 4's embedding) and "=tied".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VICUNA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': ' }}{% endif %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}"
    "{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""What LLaVA-1.5's and 1.6's say: all images first, roles in capitals."""
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>"
    "{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% elif 'text' in part %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
"""Qwen's template of text and images; `IMAGE` is replaced by the placeholder."""
ONEVISION = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""What LLaVA-OneVision's says: parts only, all images first, each text on a line of its own."""
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>"
    "{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set system, said = messages[0]['content'] + '\n\n', messages[1:] %}"
    "{% else %}{% set system, said = '', messages %}{% endif %}{% for message in said %}"
    "{% if message['role'] == 'user' %}[INST] {{ system if loop.last }}"
    "{{ message['content'] }}[/INST]"
    "{% else %} {{ message['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Mistral's, whose system prompt moves to the last question."""

GEMMA3 = (
    "{{ bos_token }}{% set system, said = '', messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system, said = messages[0]['content'], messages[1:] %}"
    "{% if system is not string %}{% set system = system[0]['text'] %}{% endif %}"
    "{% set system = system + '\n\n' %}{% endif %}{% for message in said %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user and assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) "
    "+ '\n' }}"
    "{{ system if loop.first }}{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma 3's: the system prompt opens the first question, and an image is one token."""
GEMMA4 = (
    "{{ bos_token }}{% set said = messages %}{% if messages[0]['role'] == 'system' %}"
    "{% set system, said = messages[0]['content'], messages[1:] %}"
    "{% if system is not string %}{% set system = system[0]['text'] %}{% endif %}"
    "{{ '<|turn>system\n' + ('<|think|>' if enable_thinking else '') + system | trim + "
    "'<turn|>\n' }}"
    "{% elif enable_thinking %}{{ '<|turn>system\n<|think|><turn|>\n' }}{% endif %}"
    "{% for message in said %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{% if message['content'] is string %}{{ (message['content'].split('<channel|>')[-1]"
    " if message['role'] == 'assistant' else message['content']) | trim }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '\n\n<|image|>\n\n' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<turn|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}{% endif %}"
)
"""Gemma 4's, in short: an image has empty lines around it, earlier answers have no thoughts, and
no thoughts are an empty channel.
"""


Files = dict[str, dict[str, Any]]
_QWEN = CHATML.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
_TEMPLATES = {
    **{"llava": VICUNA, "llava_next": VICUNA, "llava_onevision": ONEVISION, "gemma3": GEMMA3},
    **{"qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN},
}
"""Templates that lie in chat_template.json."""


def files_of(family: str, words: Mapping[str, int], text: dict[str, Any]) -> Files:
    """Return a family's files by name.

    Args:
      words: Ids of the tokens.
      text: Entries of the decoder's configuration besides the usual ones.
    """
    names = {
        **words,
        **{"words": len(words), "rows": max(words.values()) // 8 * 8 + 8},
        "tied": text.get("tie_word_embeddings", False),
    }

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: filled(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return [*map(filled, value)]
        if not (isinstance(value, str) and value.startswith("=")):
            return value
        name, _, more = value[1:].partition("+")
        return names[name] + int(more) if more else names[name]

    path = Path(__file__).with_name("files") / f"{family}.json"
    files = filled(json.loads(path.read_text(encoding="utf-8")))
    config = files["config.json"]
    config.get("text_config", config).update(text)
    if family == "gemma4" and "hidden_size_per_layer_input" in text:  # E4B's and E2B's
        config["vision_config"] |= {"standardize": False, "use_clipped_linears": True}
        audio = {"model_type": "gemma4_audio", "hidden_size": 1024, "output_proj_dims": 1536}
        config["audio_config"] = audio
    if family in _TEMPLATES:
        files["chat_template.json"] = {"chat_template": _TEMPLATES[family]}
    return files


CHATS = {
    **{"mistral": MISTRAL, "llama3": LLAMA3, "qwen": CHATML.replace("IMAGE", "")},
    **{"gemma": GEMMA3, "gemma4": GEMMA4},
}
"""Templates that lie in tokenizer_config.json."""
