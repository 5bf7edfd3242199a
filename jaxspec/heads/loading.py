"""Recognise, read and write draft heads: `config.json` and `model.safetensors`.

Each kind has its own layout; kinds that this library lacks are recognised too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints import directories
from jaxspec.checkpoints.fitting import contradictions, layouts_in, named_tensors, refuse
from jaxspec.checkpoints.formats import tensor_files
from jaxspec.checkpoints.formats.tensor_files import StoredTensor
from jaxspec.checkpoints.huggingface import read_tensor
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.config import ModelConfig
from jaxspec.errors import InputError, collected, reading
from jaxspec.heads.config import HeadConfig
from jaxspec.heads.files import Kind, Server
from jaxspec.heads.kinds import KINDS, kind_of
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


def recognised(
    raw: Mapping[str, Any], tensors: Iterable[StoredTensor] = (), name: str = ""
) -> Kind[Any] | str:
    """Return the kind of draft head that files describe, or the name of one that is not read.

    "" means no known kind.

    Args:
      raw: config.json.
      tensors: Tensors, if they were listed.
      name: Name of the repository, where config.json may be another kind's.
    """
    for kind in KINDS:
        if kind.claims(raw):
            return kind
    stored = {tensor.name.removeprefix("model.") for tensor in tensors}
    architectures = raw.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else ())]
    names = [str(part).lower() for part in (*names, raw.get("speculators_model_type") or "", name)]
    for pattern, other in _OTHER_NAMES.items():
        if any(re.search(pattern, part) for part in names):
            return other
    for kind in KINDS:
        if any(re.search(kind.names, part) for part in names):
            return kind
    for kind in KINDS:
        if any(re.match(kind.tensors, part) for part in stored):
            return kind
    for pattern, other in _OTHER_TENSORS.items():
        if any(re.match(pattern, part) for part in stored):
            return other
    return next((kind for kind in KINDS if kind.resembles(raw, names, stored)), "")


def is_head(path: str | Path) -> bool:
    """Return whether a local directory holds a draft head by itself, of whatever kind.

    Where config.json does not tell, the tensors' names do. Heads have one weight file.
    """
    path = Path(path).expanduser()
    if not (path / "config.json").is_file():
        return False
    raw = directories.read_raw_config(path)
    if recognised(raw):
        return True
    files = (path / name for name in (directories.SINGLE, directories.BIN))
    file = next(filter(Path.is_file, files), None)
    with suppress(InputError):  # whoever reads the model reports it
        return file is not None and bool(recognised(raw, tensor_files.list_file(file)))
    return False


def holds_head(path: Path) -> bool:
    """Return whether a directory holds a draft head, by itself or in a model's own files."""
    return is_head(path) or (
        (path / "config.json").is_file() and _within(directories.read_raw_config(path)) is not None
    )


def _within(raw: Mapping[str, Any]) -> Kind[Any] | None:
    return next((kind for kind in KINDS if kind.within(raw)), None)


def read_draft_config(path: Path) -> ModelConfig | HeadConfig:
    """Return the configuration of a draft model or head in a directory; no tensor is read."""
    return list_head(path)[0] if holds_head(path) else directories.read_config(path)


def save_head(
    path: str | Path,
    config: HeadConfig,
    params: Params,
    dtype: Any | None = jnp.bfloat16,
    *,
    write_more: Callable[[Path], None] | None = None,
    overwrite: bool = False,
    server: Server = "vllm",
    architectures: Sequence[str] = (),
) -> None:
    """Write the head to a new directory, which is renamed to `path` at the end.

    Args:
      dtype: Dtype of the tensors; None keeps each one's.
      write_more: Writes more files, as in `huggingface.save`, which also raises the same errors.
      server, architectures: See `Kind.written`.
    """
    by_name = named_tensors(params)
    for name, tensor in by_name.items():
        if tensor.dtype != np.int32:
            by_name[name] = tensor_files.cast(tensor, dtype or tensor.dtype)
    kind = kind_of(config)
    raw, tensors = kind.written(config, by_name, server, architectures)
    with directories.written_whole(path, overwrite) as fresh:
        directories.write_json(fresh / "config.json", raw)
        if settings := kind.generation(config):
            directories.write_json(fresh / "generation_config.json", settings)
        tensor_files.write_tensors(fresh / directories.SINGLE, tensors)
        if write_more is not None:
            write_more(fresh)


def list_head(path: Path) -> tuple[HeadConfig, dict[str, StoredTensor], list[str]]:
    """Return a head's configuration, its unread tensors, and their problems.

    Raises InputError for a configuration that this library cannot read.
    """
    raw = directories.read_raw_config(path)
    problems: list[str] = []
    with collected(problems):
        if (quantisation := directories.quantisation_of(path, raw)) is not None:
            raise InputError(f"{path}: a quantised head ({quantisation.method}); take the original")
    stored = {tensor.name: tensor for tensor in tensor_files.list_directory(path, problems)}
    kind = recognised(raw, stored.values(), "" if stored else model_name(path)) or _within(raw)
    if not isinstance(kind, Kind):
        kinds = ", ".join(title for kind in KINDS for title in kind.titles)
        raise InputError(f"{path}: a {kind} head; give one of {kinds}")
    for file in kind.unread:
        if (path / file).exists():
            raise InputError(f"{path}: {file} is not read; give a head without one")
    config = kind.read(path, raw)
    if problems:
        return config, stored, problems
    with reading(f"{path}: the tensors do not fit a {config.title}", "fetch the head again"):
        config, stored = kind.completed(config, stored)
    problems += contradictions(
        config.text_config, lambda: layouts_in(abstract_head(config))[0], stored
    )
    return config, stored, problems


def load_head(path: str | Path, dtype: Any | None = None) -> tuple[HeadConfig, Params]:
    """Return the head in a directory or of a hub id; InputError where anything does not fit.

    Args:
      dtype: Dtype of its parameters; None keeps the file's.
    """
    path = locate(path)
    if not holds_head(path):
        raise InputError(f"{path}: the directory of another model; give a head's directory")
    config, stored, wrong = list_head(path)
    if wrong:
        refuse(path, wrong)
    layouts, tree = layouts_in(abstract_head(config))
    leaves = [read_tensor(stored[name], layout, dtype) for name, layout in layouts.items()]
    return config, jax.tree.unflatten(tree, leaves)
