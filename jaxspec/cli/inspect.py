"""`jaxspec inspect`: say what a checkpoint is, and everything that keeps it from being loaded."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxspec.checkpoints.fitting import survey
from jaxspec.checkpoints.formats.gguf_files import stored_kinds
from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.processors import load_image_processor, load_tokenizer
from jaxspec.config import LvlmConfig, TextConfig, text_config
from jaxspec.errors import InputError, collected, printable
from jaxspec.files import local_path
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.kinds import kind_of
from jaxspec.heads.loading import is_head, list_head
from jaxspec.models.families import family_of
from jaxspec.runtime import human_bytes, setup_runtime

_SHOWN = 20
"""Problems that the table spells out."""


@dataclass(frozen=True)
class Inspect:
    """Show the contents of a checkpoint without reading its tensors. The exit code is 2 if it does
    not load, for the problems shown.

    $ jaxspec inspect jaxspec_demo/mini/target
    """

    path: Annotated[str, tyro.conf.Positional]
    """Directory in Hugging Face layout, GGUF file, or hub id."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Inspect) -> None:
    """Print the facts; exit code 2 where the checkpoint would not load."""
    setup_runtime()
    inspection = inspect(locate(args.path, args.revision))
    file = local_path(args.path)
    if file.suffix == ".gguf" and file.is_file():
        inspection.facts.update(stored_kinds(file))
    if args.json:
        print(json.dumps(asdict(inspection)))
    else:
        Console().print(_table(inspection))
    if inspection.problems:
        sys.exit(2)


def _table(facts: Inspection) -> Table:
    """Return the facts for people, with the first problems."""
    table = Table(title=Text(printable(facts.path)), show_header=False)
    is_model = facts.model_type is not None
    rows = {
        "family": f"{facts.family} ({facts.model_type})" if is_model else "?",
        "parameters": _sum(facts.parameters, "{:,}".format),
        "context": "?" if facts.context is None else f"{facts.context:,} positions",
        "vocabulary": "?" if facts.vocabulary is None else f"{facts.vocabulary:,} tokens",
        "drafts": f"{facts.draft_vocabulary:,} of them alone" if facts.draft_vocabulary else "-",
        "dtype": ", ".join(f"{name} {human_bytes(size)}" for name, size in facts.dtypes.items()),
        "image tokens": "-" if facts.image_tokens is None else f"{facts.image_tokens} an image",
        "chat template": {None: "-", True: "yes", False: "no"}[facts.chat_template],
        **facts.facts,
        "files": _sum(facts.files, human_bytes),
        "loads": "no" if facts.problems else "yes",
    }
    for name, value in rows.items():
        table.add_row(name, Text(printable(value)))
    for number, problem in enumerate(facts.problems[:_SHOWN], 1):
        table.add_row(f"problem {number}", Text(printable(problem), style="red"))
    if (more := len(facts.problems) - _SHOWN) > 0:
        table.add_row("problems", f"{more} more; --json has all")
    return table


def _sum(parts: dict[str, int], word: Callable[[int], str]) -> str:
    lines = [f"{word(sum(parts.values()))}"] if len(parts) != 1 else []
    return "\n".join([*lines, *(f"  {name} {word(count)}" for name, count in parts.items())])


@dataclass(frozen=True)
class Inspection:
    """Hold the facts of a checkpoint; those that config.json does not give are None."""

    path: str
    family: str | None
    model_type: str | None
    parameters: dict[str, int]
    """Part of the model -> number of parameters."""
    context: int | None
    """Maximum tokens of a prompt and its answer."""
    vocabulary: int | None
    draft_vocabulary: int | None
    """Tokens that a draft scores; 0: all."""
    dtypes: dict[str, int]
    """Name in safetensors -> bytes stored so."""
    image_tokens: int | None
    """Prompt slots that one image takes, where all images take the same."""
    chat_template: bool | None
    """None for a head, which uses its target's template."""
    facts: dict[str, str]
    """What a head's kind adds, such as its rule for images, or a GGUF file."""
    files: dict[str, int]
    """File of weights -> bytes."""
    problems: list[str]
    """Why it would not load; empty if it would."""


def inspect(path: Path) -> Inspection:
    """Inspect a local directory of a model or of a head."""
    with suppress(InputError):  # `survey` reports it
        if is_head(path):
            return _inspect_head(path)
    contents = survey(path)
    problems = list(contents.problems)
    config, template = contents.config, False
    if config is not None:
        with collected(problems):
            template = bool(load_tokenizer(path).chat_template)
        with collected(problems):
            if isinstance(config, LvlmConfig):
                load_image_processor(path, config)
    return Inspection(
        path=str(path),
        family=config and family_of(config.model_type).title,
        model_type=config and config.model_type,
        image_tokens=getattr(config, "image_tokens", None),
        chat_template=template,
        facts={},
        problems=problems,
        **_sizes(config and text_config(config), contents.tensors, _part),
    )


def _inspect_head(path: Path) -> Inspection:
    """Return the facts of a head, as far as its files can be read."""
    config: HeadConfig | None = None
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    with collected(problems):
        config, tensors, problems = list_head(path)
    return Inspection(
        path=str(path),
        family=config and f"{config.title} for {config.target_name or 'an unnamed target'!r}",
        model_type=config and config.model_type,
        image_tokens=config and kind_of(config).image_slots(config),
        chat_template=None,
        facts=kind_of(config).facts(config) if config else {},
        problems=problems,
        **_sizes(config and config.text_config, tensors, lambda name: name.split(".")[0]),
    )


def _sizes(
    text: TextConfig | None, tensors: dict[str, StoredTensor], part: Callable[[str], str]
) -> dict[str, Any]:
    """Return the fields of an `Inspection` that the decoder and the tensors determine."""
    parameters, dtypes = Counter[str](), Counter[str]()
    for name, tensor in tensors.items():
        parameters[part(name)] += math.prod(tensor.shape)
        dtypes[tensor.dtype] += tensor.nbytes
    files = sorted({tensor.file for tensor in tensors.values()})
    sizes = {file.name: file.stat().st_size for file in files}
    return {
        "context": text and text.context,
        "vocabulary": text and text.vocab_size,
        "draft_vocabulary": text and len(text.draft_vocabulary),
        "parameters": dict(parameters),
        "dtypes": dict(dtypes),
        "files": sizes,
    }


def _part(name: str) -> str:
    keys: list[Any] = name.split(".")
    if {"embed_tokens", "embed_tokens_per_layer"} & {*keys}:
        return "embedding"
    if "lm_head" in keys:
        return "head"
    return "decoder" if keys[0] in ("language_model", "model") else keys[0]
