"""Recognise, read and write draft heads: `config.json` and `model.safetensors`.

Each kind has its own layout; kinds that this library lacks are recognised too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.directories import (
    BIN,
    SINGLE,
    quantisation_of,
    read_config,
    read_raw_config,
    write_json,
    written_whole,
)
from jaxspec.checkpoints.fitting import layouts_in, named_tensors, refuse, unfit
from jaxspec.checkpoints.formats.tensor_files import (
    StoredTensor,
    cast,
    list_directory,
    list_file,
    write_tensors,
)
from jaxspec.checkpoints.huggingface import read_tensor
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.config import ModelConfig
from jaxspec.errors import InputError, collected
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Kind, Server
from jaxspec.heads.kinds import KINDS, eagle1, kind_of, vispec
from jaxspec.heads.making import abstract_head
from jaxspec.typing import Params

_OTHER_NAMES = {
    "dflash2": "DFlash2",
    "p-?eagle": "P-EAGLE",
    "medusa": "Medusa",
    r"^mtp$": "speculators MTP",
}
"""Pattern of lower-case names of architectures and speculators' types -> kind that is not read."""
_OTHER_TENSORS = {r"(medusa_head\.)?\d+\.\d+\.linear\.weight": "Medusa"}


def kind_of_head(
    raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None
) -> str:
    """Return the kind of draft head that files describe, such as "EAGLE-3"; "" for no known one.

    Args:
      raw: config.json.
      tensors: Shapes of the tensors, if they were listed.
    """
    return recognised(raw, tensors)[0]


def recognised(
    raw: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[str, Kind[Any] | None]:
    """Return the name of `kind_of_head`, and the kind; None for one that this library lacks."""
    for kind in KINDS:
        if title := kind.claims(raw):
            return title, kind
    stored = {name.removeprefix("model.") for name in tensors or {}}
    architectures = raw.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else ())]
    names = [str(name).lower() for name in (*names, raw.get("speculators_model_type") or "")]
    by_name = [(None, _OTHER_NAMES), *((kind, kind.names) for kind in KINDS)]
    for kind, patterns in by_name:
        for pattern, title in patterns.items():
            if any(re.search(pattern, name) for name in names):
                return title, kind
    for kind in KINDS:
        if any(re.match(kind.tensors, name) for name in stored):
            return kind.titles[0], kind
    for pattern, title in _OTHER_TENSORS.items():
        if any(re.match(pattern, name) for name in stored):
            return title, None
    for kind in KINDS:
        if title := kind.resembles(raw, names, stored):
            return title, kind
    return "", None


def holds_head(path: Path) -> bool:
    """Return whether a model's own directory holds a draft head for it."""
    if not (path / "config.json").is_file():
        return False
    raw = read_raw_config(path)
    return any(kind.within(raw) for kind in KINDS)


def is_head(path: str | Path) -> bool:
    """Return whether a local directory holds a draft head, of whatever kind.

    Where config.json does not tell, the tensors' names do. Heads have one weight file.
    """
    path = Path(path).expanduser()
    if not (path / "config.json").is_file():
        return False
    raw = read_raw_config(path)
    if kind_of_head(raw):
        return True
    file = next((path / name for name in (SINGLE, BIN) if (path / name).is_file()), None)
    with suppress(InputError):  # whoever reads the model reports it
        return file is not None and bool(kind_of_head(raw, _shapes(list_file(file))))
    return False


def _shapes(tensors: Iterable[StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in tensors}


def read_draft_config(path: Path) -> ModelConfig | HeadConfig:
    """Return the configuration of a draft model or head in a directory; no tensor is read."""
    return list_head(path)[0] if is_head(path) or holds_head(path) else read_config(path)


def save_head(
    path: str | Path,
    config: HeadConfig,
    params: Params,
    dtype: Any | None = jnp.bfloat16,
    *,
    write_more: Callable[[Path], None] | None = None,
    overwrite: bool = False,
    server: Server = "vllm",
    architectures: list[str] | None = None,
) -> None:
    """Write the head to a new directory, which is renamed to `path` at the end.

    Args:
      dtype: Dtype of the tensors; None keeps each one's.
      write_more: Writes more files, as in `huggingface.save`, which also raises the same errors.
      server, architectures: See `Kind.written`.
    """
    by_name = {
        name: tensor if tensor.dtype == np.int32 else cast(tensor, dtype or tensor.dtype)
        for name, tensor in named_tensors(params).items()
    }
    kind = kind_of(config)
    raw, tensors = kind.written(config, by_name, server, architectures)
    with written_whole(path, overwrite) as fresh:
        write_json(fresh / "config.json", raw)
        if settings := kind.generation(config):
            write_json(fresh / "generation_config.json", settings)
        write_tensors(fresh / SINGLE, tensors)
        if write_more is not None:
            write_more(fresh)


def list_head(path: Path) -> tuple[HeadConfig, dict[str, StoredTensor], list[str]]:
    """Return a head's configuration, its unread tensors, and their problems.

    Raises InputError for a configuration that this library cannot read.
    """
    raw = read_raw_config(path)
    problems: list[str] = []
    with collected(problems):
        if (quantisation := quantisation_of(path, raw)) is not None:
            raise InputError(f"{path}: a quantised head ({quantisation.method}); take the original")
    stored = {tensor.name: tensor for tensor in list_directory(path, problems)}
    name, kind = recognised(raw, _shapes(stored.values()))
    kind = kind or next((kind for kind in KINDS if kind.within(raw)), None)
    if kind is eagle1.KIND and not stored and "vispec" in model_name(path).lower():
        kind = vispec.KIND  # whose config.json is an EAGLE-1 head's
    if kind is None:
        article = "an" if name.startswith(("E", "MTP")) else "a"
        kinds = ", ".join(title for kind in KINDS for title in kind.titles)
        raise InputError(f"{path}: {article} {name} head; give one of {kinds}")
    for file in kind.unread:
        if (path / file).exists():
            raise InputError(f"{path}: {file} is not read; give a head without one")
    config = kind.read(path, raw)
    if problems:
        return config, stored, problems
    config, stored = kind.completed(config, stored)
    problems += unfit(config.text_config, lambda: layouts_in(abstract_head(config))[0], stored)
    return config, stored, problems


def load_head(path: str | Path, dtype: Any | None = None) -> tuple[HeadConfig, Params]:
    """Return the head in a directory or of a hub id; InputError where anything does not fit.

    Args:
      dtype: Dtype of its parameters; None keeps the file's.
    """
    path = locate(path)
    if not (is_head(path) or holds_head(path)):
        raise InputError(f"{path}: the directory of another model; give a head's directory")
    config, stored, wrong = list_head(path)
    if wrong:
        refuse(path, wrong)
    layouts, tree = layouts_in(abstract_head(config))
    leaves = [read_tensor(stored[name], layout, dtype) for name, layout in layouts.items()]
    return config, jax.tree.unflatten(tree, leaves)
