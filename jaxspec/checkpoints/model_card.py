"""The model card (README.md) that is written with an export."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoints.gguf_files import SMOLLM2
from jaxspec.config import (
    KVHeadConfig,
    LlavaOnevisionConfig,
    ModelConfig,
    QwenVLConfig,
    text_config,
)
from jaxspec.models import LanguageModel, family_of
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.typing import Params

_QUESTION = {True: "What is in the picture?", False: "Who are you?"}
"""What a model that reads images is asked, and one that does not."""
_ASSISTANT = {
    True: "transformers 5 does not show the images to such a draft; 4.57 and jaxspec do.",
    False: "transformers 4.57 refuses a language model as the draft of one that reads images; 5 and jaxspec take it.",
}
_READ_VIDEOS = (LlavaOnevisionConfig, QwenVLConfig)
_GREEDY = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "min_new_tokens": 0,
    "min_length": 0,
}
"""Settings of transformers' greedy decoding, where they change nothing."""


def model_name(path: str | Path) -> str:
    """Return what a checkpoint is called: the hub id of a snapshot in the hub's cache, else its directory.

    `runs/NAME/hf`, where training writes its result, is NAME.
    """
    path = Path(os.path.abspath(Path(path).expanduser()))
    repository = path.parents[1].name if path.parent.name == "snapshots" else ""
    if repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.parent.name if path.name == "hf" else path.name


def write_model_card(
    path: Path,
    config: ModelConfig,
    params: Params,
    *,
    name: str,
    source: Path,
    target: str | None,
    added: int,
    scored: int,
    encoder: PromptEncoder | None,
    generation: Mapping[str, Any],
) -> None:
    """Write what the model is, what it was made of and for, and how to load and to ask it.

    Args:
      target: name of the model that it drafts for, if it is a draft.
      added: rows of the vocabulary that the source does not have.
      scored: size of the source's draft vocabulary; 0 where it has none.
      encoder: what makes its prompts, with the chat template that is written along; None without a tokeniser.
      generation: what generation_config.json holds.
    """
    text, has_vision = text_config(config), LanguageModel(config).has_vision
    facts = {
        "family": f"{family_of(config.model_type).title or config.model_type} (`{config.to_hf()['architectures'][0]}`)",
        "parameters": _count(params),
        "decoder": f"{text.num_hidden_layers} layers of width {text.hidden_size}, {text.num_attention_heads} heads",
        "vocabulary": f"{text.vocab_size:,}"
        + (f", of which the last {added:,} are means" if added else ""),
        "context": f"{text.max_position_embeddings:,} tokens",
        "made from": f"`{model_name(source)}`",
    }
    if scored:
        facts["drafts"] = (
            f"{scored:,} tokens{'' if text.draft_vocabulary else '; the score of others is their mean'}"
        )
    if (tokens := getattr(config, "image_tokens", None)) is not None:
        facts["image tokens"] = f"{tokens} an image"
    commands, notes = f"jaxspec generate --target path/to/this {_asked(has_vision)}", ""
    told = (
        "On CPUs, where both compute in float32, this writes what the Python above does."
        if encoder
        else ""
    )
    if told and has_vision:
        told += "\nWhere torchvision is installed, transformers scales images with it, a little differently."
    if isinstance(config, _READ_VIDEOS):
        notes += "\nIts processor wants torchvision, for videos.\n"
    if target is not None:
        facts["draft for"] = f"`{target}`"
        view = "" if has_vision else " --views T"
        commands += f"\njaxspec generate --target {_place(target)} --draft path/to/this{view} {_asked(has_vision)}"
        told = (
            told.replace("this", "the first command") + "\nThe second speculates with this model."
        )
        notes += f"\n`target.generate(..., assistant_model=model)` speculates with it.\n{_ASSISTANT[has_vision]}\n"
    front = f"library_name: transformers\npipeline_tag: {'image-text-to-text' if has_vision else 'text-generation'}"
    python = f"## In transformers (4.57 or 5)\n\n```python\n{_snippet(has_vision, encoder, generation)}\n```\n{notes}"
    _write(path, name, source, facts, front, f"{python}\n{_in_jaxspec(commands)}\n{told.strip()}")


def write_head_card(
    path: Path, config: KVHeadConfig, params: Params, name: str, source: Path
) -> None:
    """Write what a KV head is, for which target, and how to draft with it."""
    text, has_vision = config.text_config, config.image_tokens > 0
    facts = {
        "family": "KV head: a draft that reads its target's key-value cache",
        "parameters": _count(params),
        "decoder": f"{text.num_hidden_layers} layer{'s' * (text.num_hidden_layers > 1)} of width {text.hidden_size}",
        "trained for": f"blocks of {config.gamma} drafted tokens",
        "made from": f"`{model_name(source)}`",
        "draft for": f"`{config.target_name}` (configuration {config.target_hash})",
    }
    if text.draft_vocabulary:
        facts["drafts"] = f"{len(text.draft_vocabulary):,} of {text.vocab_size:,} tokens"
    if config.pools:
        facts["image slots"] = (
            f"{config.image_slots} an image, from {config.image_tokens} tokens ({config.pooling})"
        )
    command = f"jaxspec generate --target {_place(config.target_name)} --kv-head path/to/this {_asked(has_vision)}"
    body = f"{_in_jaxspec(command)}\ntransformers has no such model."
    _write(path, name, source, facts, "library_name: jaxspec", body)


def _write(
    path: Path, name: str, source: Path, facts: Mapping[str, str], front: str, body: str
) -> None:
    """Write front matter, title, table and licence, and then the body."""
    licence = licence_of(source)
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    card = f"""---
license: {licence or "other"}
{front}
---

# {name}

| | |
|---|---|
{rows}

Licence: {f"{licence}, as its source says" if licence else "unknown; write the licence of the source here"}.

{body}"""
    (path / "README.md").write_text(card.rstrip() + "\n", encoding="utf-8")


def _count(params: Params) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,}"


def _asked(has_vision: bool) -> str:
    """Return the options of a command that asks the card's question."""
    return (
        f'{"--image photo.jpg " * has_vision}--prompt "{_QUESTION[has_vision]}" --max-new-tokens 64'
    )


def _in_jaxspec(commands: str) -> str:
    return f"## In jaxspec\n\n```sh\n{commands}\n```\n"


def _place(name: str) -> str:
    """Return a model as a command's argument: its id, or where its directory lies."""
    return name if "/" in name or name == SMOLLM2 else f"path/to/{name or 'its/target'}"


def _snippet(has_vision: bool, encoder: PromptEncoder | None, generation: Mapping[str, Any]) -> str:
    """Return Python that loads the model and, where it has a tokeniser, writes an answer as this library does."""
    kind = "AutoModelForImageTextToText" if has_vision else "AutoModelForCausalLM"
    reader, it = ("AutoProcessor", "processor") if has_vision else ("AutoTokenizer", "tokenizer")
    load = f'model = {kind}.from_pretrained("path/to/this", dtype="float32")'
    if encoder is None:
        return f"from transformers import {kind}\n\n{load}"
    text, contents = encoder.rendered(_QUESTION[has_vision], images=int(has_vision))
    messages = f'messages = [{{"role": "user", "content": {contents[0]!r}}}]'.replace("'", '"')
    if has_vision:
        bos = encoder.tokenizer.bos_token
        own = ", add_special_tokens=False" if bos is not None and text.startswith(bos) else ""
        asked = f"""text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(images=Image.open("photo.jpg"), text=text{own}, return_tensors="pt")"""
    else:
        asked = """inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
    greedy = [
        f"{key}={value}"
        for key, value in _GREEDY.items()
        if generation.get(key, value) not in (None, value)
    ]
    options = ", ".join(["**inputs", "max_new_tokens=64", "do_sample=False", *greedy])
    imports = (
        f"{'from PIL import Image' * has_vision}\nfrom transformers import {kind}, {reader}".lstrip(
            "\n"
        )
    )
    return f"""{imports}

{load}
{it} = {reader}.from_pretrained("path/to/this")
{messages}
{asked}
output = model.generate({options})
print({it}.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""


def licence_of(source: Path) -> str | None:
    """Return the licence that the front matter of a directory's README.md names."""
    if not (source / "README.md").is_file():
        return None
    card = (source / "README.md").read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)\s*$", front[1], re.MULTILINE) if front else None
    return found[1] if found and found[1] != "other" else None
