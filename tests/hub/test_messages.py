"""Conversations in messages are the ids that transformers makes with each family's template."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from jaxspec import LoadedModel
from jaxspec.checkpoints.locating import locate
from jaxspec.data.messages import read_messages
from jaxspec.loading.models import prompt_encoder
from jaxspec.prompts.rows import rewrite
from tests.hub.conftest import load_twin
from tests.tiny import tiles

pytestmark = pytest.mark.full

READERS = (
    "llava-hf/llava-1.5-7b-hf",
    "llava-hf/llava-v1.6-vicuna-7b-hf",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "Qwen/Qwen3-VL-2B-Instruct",
)
TEXTS = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "Qwen/Qwen3-0.6B",
)
QWEN = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
SIZES = ((90, 70), (64, 200), (120, 120), (80, 40))


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def conversation(parts: bool) -> list[dict[str, Any]]:
    """Return a system prompt, and three questions with images around their texts."""
    pages = [{"type": "image", "image": tiles.page(*size)} for size in SIZES]
    said: list[Any] = [
        [text("Be brief.")],
        [text("Here is a page."), pages[0], text("What is on it?")],
        [text("A tram.")],
        [pages[1], pages[2], text("And here?")],
        [text("Two cars.")],
        [text("So?"), *([pages[3]] if parts else [])],
    ]
    if not parts:
        said = [" ".join(part["text"] for part in content if "text" in part) for content in said]
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, said)]


def shown(model: LoadedModel, prompt: Any) -> list[int]:
    """Return ids with an image's token in each of its slots."""
    reader, images = model.images, prompt.images
    slots = [reader.slots(np.shape(x)[:2], None, len(images)) for x in images] if reader else []
    return rewrite(
        prompt.tokens, getattr(model.config, "image_token_index", None), slots
    ).tokens.tolist()


def processor(name: str) -> Any:
    """Return transformers' processor of a twin, without a video's, which would need torchvision."""
    import transformers

    model, file = load_twin(name), locate(name) / "processor_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    kind = settings.pop("processor_class", None) or QWEN[model.config.model_type]
    whole = {"image_processor": model.image_processor, "tokenizer": model.tokenizer}
    template = model.tokenizer.chat_template
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    made = type(kind, (getattr(transformers, kind),), unchecked)
    return made(**whole, **settings, chat_template=template)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("turns", [2, 4, 6])
def test_messages_with_images_are_those_of_transformers(name: str, turns: int) -> None:
    model, messages = load_twin(name), conversation(True)[:turns]
    theirs = processor(name).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="np"
    )
    prompt = prompt_encoder(model).prompt(read_messages(messages))
    assert len(prompt.images) == {2: 1, 4: 3, 6: 4}[turns]
    assert shown(model, prompt) == theirs["input_ids"][0].tolist()


@pytest.mark.parametrize("name", [*TEXTS, *READERS[3:]])
@pytest.mark.parametrize("turns", [2, 6])
def test_messages_of_text_are_those_of_transformers(name: str, turns: int) -> None:
    """Messages of text, with contents as texts or as lists of one part, have transformers' ids."""
    model, messages = load_twin(name), conversation(False)[:turns]
    theirs = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    encoder = prompt_encoder(model)
    parts = [message | {"content": [text(message["content"])]} for message in messages]
    for form in (messages, parts):
        assert encoder.prompt(read_messages(form)).tokens.tolist() == theirs
