"""Read and write draft heads: `config.json` and `model.safetensors`, in their kind's layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from jaxspec.checkpoints.heads.assistant import AssistantFiles
from jaxspec.checkpoints.heads.dflash import DFlashFiles
from jaxspec.checkpoints.heads.eagle1 import Eagle1Files
from jaxspec.checkpoints.heads.eagle3 import Eagle3Files
from jaxspec.checkpoints.heads.kind import Kind, Server
from jaxspec.checkpoints.heads.kinds import kind_of_head
from jaxspec.checkpoints.heads.kv_head import KVHeadFiles
from jaxspec.checkpoints.heads.published import with_known_images
from jaxspec.checkpoints.heads.vispec import VispecFiles
from jaxspec.checkpoints.huggingface import read_tensor
from jaxspec.checkpoints.locating import locate, model_name
from jaxspec.config import (
    AssistantConfig,
    DFlashConfig,
    Eagle1Config,
    Eagle3Config,
    HeadConfig,
    KVHeadConfig,
    ModelConfig,
    OnePassConfig,
    VispecConfig,
)
from jaxspec.errors import InputError, collected
from jaxspec.models.heads.kinds import abstract_head
from jaxspec.typing import Params

_DFLASH = DFlashFiles(
    DFlashConfig, "DFlash head: a draft of a block in one pass, from hidden states of its target"
)
_KV = "KV head: a draft that reads its target's key-value cache"
HEADS: dict[str, Kind[Any]] = {
    "KV": KVHeadFiles(KVHeadConfig, _KV),
    "one-pass": KVHeadFiles(OnePassConfig, f"{_KV}, a block in one pass"),
    "EAGLE-1": Eagle1Files(
        Eagle1Config, "EAGLE-1 head: a draft that reads its target's last hidden state"
    ),
    "ViSpec": VispecFiles(
        VispecConfig, "ViSpec head: an EAGLE-1 head that reads compressed images"
    ),
    "EAGLE-3": Eagle3Files(
        Eagle3Config, "EAGLE-3 head: a draft that reads hidden states of its target"
    ),
    "DFlash": _DFLASH,
    "DSpark": _DFLASH,
    AssistantConfig.title: AssistantFiles(
        AssistantConfig, "Gemma 4 assistant: a draft that reads its target's key-value cache"
    ),
}
"""Kinds of heads, by the names that `kind_of_head` gives them."""


def kind_of(config: HeadConfig) -> Kind[Any]:
    """Return the kind of a head."""
    return next(kind for kind in HEADS.values() if kind.config is type(config))


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
    return list_head(path)[0] if is_head(path) else read_config(path)


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
    name = kind_of_head(raw, _shapes(stored.values()))
    if name == "EAGLE-1" and not stored and "vispec" in model_name(path).lower():
        name = "ViSpec"  # whose config.json is an EAGLE-1 head's
    if name not in HEADS:
        article, kinds = "an" if name.startswith(("E", "MTP")) else "a", ", ".join(HEADS)
        raise InputError(f"{path}: {article} {name} head; give one of {kinds}")
    kind = HEADS[name]
    for file in kind.unread:
        if (path / file).exists():
            raise InputError(f"{path}: {file} is not read; give a head without one")
    config = with_known_images(path, raw, kind.read(path, raw))
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
    if not is_head(path):
        raise InputError(f"{path}: the directory of another model; give a head's directory")
    config, stored, wrong = list_head(path)
    if wrong:
        refuse(path, wrong)
    layouts, tree = layouts_in(abstract_head(config))
    leaves = [read_tensor(stored[name], layout, dtype) for name, layout in layouts.items()]
    return config, jax.tree.unflatten(tree, leaves)
