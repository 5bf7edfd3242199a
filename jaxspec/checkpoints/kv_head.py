"""Draft heads as files: `config.json` and `model.safetensors`.

EAGLE-3 heads have the layout of public ones, see `checkpoints/eagle.py`. KV heads have a format of
this library's own. `config.json` is `KVHeadConfig.to_dict`: model_type "jaxspec_kv_head", the
decoder of the head's layers (`text_config`, with its depth, head counts, rotary fields and draft
vocabulary), how images are pooled, and the target: its place (`target_name`) and the hash of its
configuration. All layers of the head read the rotated keys and values of the target's last layer.

| tensor                                             | shape     | where                         |
|----------------------------------------------------|-----------|-------------------------------|
| `layers.i.{input,post_attention}_layernorm.weight` | [D]       | Llama's layers, as everywhere |
| `layers.i.self_attn.{q,k,v,o}_proj.weight`         | [out, in] | (`.bias` where the target     |
| `layers.i.mlp.{gate,up,down}_proj.weight`          | [out, in] | has one)                      |
| `norm.weight`                                      | [D]       | before the target's own head  |
| `kv_projector.{k,v}`                               | [k, n]    | pooling "linear"              |
| `kv_projector.queries`                             | [k, K, H] | pooling "attention"           |
| `slot_bias`                                        | [1]       | `slot_bias`                   |
| `fc.weight`                                        | [D, 2 D]  | feature "last_hidden"         |
| `masks`                                            | [J-1, D]  | `parallel`                    |
| `markov_in`                                        | [D, r]    | `markov` r                    |
| `markov_out`                                       | [r, V]    | `markov` r; V: tokens scored  |

Embedding and output head are the target's and are not stored. `fc` reads a token's embedding and,
behind it, the hidden state that the token was predicted from. EAGLE heads use the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints.directories import (
    BIN,
    SINGLE,
    quantised,
    read_raw_config,
    write_json,
    written_whole,
)
from jaxspec.checkpoints.eagle import Engine, as_own_head, eagle_config, eagle_tensors
from jaxspec.checkpoints.fitting import named_tensors, refuse, slots_in, unfit
from jaxspec.checkpoints.huggingface import read_tensor
from jaxspec.checkpoints.locating import locate
from jaxspec.checkpoints.tensor_files import (
    StoredTensor,
    cast,
    list_directory,
    list_file,
    write_tensors,
)
from jaxspec.config import KVHeadConfig
from jaxspec.config.eagle import kind_of_head
from jaxspec.errors import InputError
from jaxspec.models.kv_head import abstract_head
from jaxspec.typing import Params


def is_kv_head(path: str | Path) -> bool:
    """Return whether a local directory holds a draft head, of whatever kind.

    Where config.json does not tell, the tensors' names do. Heads have one weight file.
    """
    path = Path(path).expanduser()
    if not (path / "config.json").is_file():
        return False
    raw = read_raw_config(path)
    if raw.get("model_type") == KVHeadConfig.model_type or kind_of_head(raw):
        return True
    file = next((path / name for name in (SINGLE, BIN) if (path / name).is_file()), None)
    with suppress(InputError):  # whoever reads the model reports it
        return file is not None and bool(kind_of_head(raw, _shapes(list_file(file))))
    return False


def _shapes(tensors: Iterable[StoredTensor]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in tensors}


def save_kv_head(
    path: str | Path,
    config: KVHeadConfig,
    params: Params,
    dtype: Any | None = jnp.bfloat16,
    *,
    write_more: Callable[[Path], None] | None = None,
    overwrite: bool = False,
    engine: Engine = "vllm",
    architectures: list[str] | None = None,
) -> None:
    """Write the head to a new directory, which is renamed to `path` at the end.

    Args:
      dtype: Dtype of the tensors; None keeps each one's.
      write_more: Writes more files, as in `huggingface.save`, which also raises the same errors.
      engine: Program that will serve an EAGLE-3 head.
      architectures: The target's classes in transformers, which speculators' layout names.
    """
    tensors = {
        name: cast(tensor, dtype or tensor.dtype) for name, tensor in named_tensors(params).items()
    }
    raw = config.to_dict()
    if config.fused:
        stored = str(tensors["fc.weight"].dtype)
        tensors = eagle_tensors(config, tensors, engine)
        raw = eagle_config(config, stored, engine, architectures)
    with written_whole(path, overwrite) as fresh:
        write_json(fresh / "config.json", raw)
        write_tensors(fresh / SINGLE, tensors)
        if write_more is not None:
            write_more(fresh)


def list_kv_head(path: Path) -> tuple[KVHeadConfig, dict[str, StoredTensor], list[str]]:
    """Return a head's configuration, its unread tensors, and their problems.

    Raises InputError for a configuration that this library cannot read.
    """
    raw = read_raw_config(path)
    problems = quantised(path, raw)
    stored = {tensor.name: tensor for tensor in list_directory(path, problems)}
    kind = kind_of_head(raw, _shapes(stored.values()))
    if raw.get("model_type") != KVHeadConfig.model_type and kind != "EAGLE-3":
        article = "an" if kind[:1] in "EM" else "a"
        raise InputError(f"{path}: {article} {kind} head; give an EAGLE-3 head or a KV head")
    config = KVHeadConfig.from_dict(raw)
    if problems:
        return config, stored, problems
    if config.fused:
        config, stored = as_own_head(config, stored)
    problems += unfit(config.text_config, lambda: slots_in(abstract_head(config))[0], stored)
    return config, stored, problems


def load_kv_head(path: str | Path, dtype: Any | None = None) -> tuple[KVHeadConfig, Params]:
    """Return the head in a directory or of a hub id; InputError where anything does not fit.

    Args:
      dtype: Dtype of its parameters; None keeps the file's.
    """
    path = locate(path)
    if not is_kv_head(path):
        raise InputError(f"{path}: the directory of another model; give a head's directory")
    config, stored, wrong = list_kv_head(path)
    if wrong:
        refuse(path, wrong)
    slots, tree = slots_in(abstract_head(config))
    leaves = [read_tensor(stored[name], slot, dtype) for name, slot in slots.items()]
    return config, jax.tree.unflatten(tree, leaves)
