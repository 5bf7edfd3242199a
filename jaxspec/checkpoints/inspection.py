"""What a checkpoint directory holds, and everything that keeps it from being loaded, without reading a tensor."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.huggingface import survey
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.config import text_config
from jaxspec.errors import InputError
from jaxspec.models import LanguageModel, family_of


@dataclass(frozen=True)
class Inspection:
    """Facts of a checkpoint; those that config.json does not give are None."""

    path: str
    family: str | None
    model_type: str | None
    parameters: dict[str, int]
    """Part of the model -> number of parameters."""
    context: int | None
    """Trained positions."""
    vocabulary: int | None
    dtypes: dict[str, int]
    """Name in safetensors -> bytes stored so."""
    image_tokens: int | None
    """Prompt slots that one image takes, where all images take the same."""
    chat_template: bool
    files: dict[str, int]
    """File of weights -> bytes."""
    problems: list[str]
    """Why it would not load; empty if it would."""


def inspect(path: Path) -> Inspection:
    """Looks at a local directory."""
    found = survey(path)
    problems = list(found.problems)
    config, template = found.config, False
    parameters, dtypes = Counter[str](), Counter[str]()
    for name, tensor in found.tensors.items():
        parameters[_part(name)] += math.prod(tensor.shape)
        dtypes[tensor.dtype] += tensor.nbytes
    try:
        if config is not None:
            template = bool(load_tokenizer(path).chat_template)
    except InputError as error:
        problems.append(str(error))
    try:
        if config is not None and LanguageModel(config).sees:
            load_image_processor(path)
    except InputError as error:
        problems.append(str(error))
    files = sorted({tensor.file for tensor in found.tensors.values()})
    return Inspection(
        path=str(path),
        family=config and (family_of(config.model_type).title or config.model_type),
        model_type=config and config.model_type,
        parameters=dict(parameters),
        context=config and text_config(config).max_position_embeddings,
        vocabulary=config and text_config(config).vocab_size,
        dtypes=dict(dtypes),
        image_tokens=getattr(config, "image_tokens", None),
        chat_template=template,
        files={file.name: file.stat().st_size for file in files},
        problems=problems,
    )


def _part(name: str) -> str:
    keys: list[Any] = name.split(".")
    if "embed_tokens" in keys:
        return "embedding"
    if "lm_head" in keys:
        return "head"
    return "decoder" if keys[0] in ("language_model", "model") else keys[0]
