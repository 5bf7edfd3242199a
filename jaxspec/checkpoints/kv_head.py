"""KV heads as files: `config.json` and `model.safetensors`, a format of this library's own.

`config.json` is `KVHeadConfig.to_dict`: model_type "jaxspec_kv_head", the decoder that the head's
layers are (`text_config`, with its depth, head counts, rotary fields and draft vocabulary), how
images are pooled, and the target: where it was found (`target_name`) and the hash of its
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

Embedding and output head are the target's and are not stored. `fc` reads a token's embedding and,
behind it, the hidden state that the token was predicted from. EAGLE heads use the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.directories import SINGLE, read_raw_config, write_json, written_whole
from jaxspec.checkpoints.fitting import refuse, slots_in, tensor_name, unfit
from jaxspec.checkpoints.tensor_files import StoredTensor, check_finite, list_file, write_tensors
from jaxspec.config import KVHeadConfig
from jaxspec.errors import InputError
from jaxspec.models.kv_head import abstract_head
from jaxspec.typing import Params


def is_kv_head(path: str | Path) -> bool:
    """Return whether a local directory holds a KV head."""
    path = Path(path).expanduser()
    return (path / "config.json").is_file() and read_raw_config(path).get(
        "model_type"
    ) == KVHeadConfig.model_type


def named_tensors(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters by the names, and in the layout, of the file."""
    slots, _ = slots_in(params)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    named = {tensor_name(path): np.asarray(leaf) for path, leaf in leaves}
    return {
        name: np.ascontiguousarray(leaf.transpose(slots[name].order))
        for name, leaf in named.items()
    }


def save_kv_head(
    path: str | Path,
    config: KVHeadConfig,
    params: Params,
    dtype: Any | None = jnp.bfloat16,
    *,
    write_more: Callable[[Path], None] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the directory whole: beside `path`, and renamed; None keeps each tensor's dtype.

    `write_more` writes more files, and InputError is raised, as in `huggingface.save`.
    """
    with written_whole(path, overwrite) as fresh:
        write_json(fresh / "config.json", config.to_dict())
        tensors = {
            name: tensor.astype(dtype or tensor.dtype)
            for name, tensor in named_tensors(params).items()
        }
        write_tensors(fresh / SINGLE, tensors)
        if write_more is not None:
            write_more(fresh)


def list_kv_head(path: Path, config: KVHeadConfig) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return the tensors of a head's file, unread, and how they do not fit its configuration."""
    stored = {tensor.name: tensor for tensor in list_file(path / SINGLE)}
    return stored, unfit(config.text_config, lambda: slots_in(abstract_head(config))[0], stored)


def load_kv_head(path: str | Path, dtype: Any | None = None) -> tuple[KVHeadConfig, Params]:
    """Return the head in a directory; InputError where anything does not fit.

    Args:
      dtype: Dtype of its parameters; None keeps the file's.
    """
    path = Path(path).expanduser()
    if not is_kv_head(path):
        raise InputError(
            f"KV head {str(path)!r}: no such directory, or another model's; give a head's directory"
        )
    config = KVHeadConfig.from_dict(read_raw_config(path))
    stored, wrong = list_kv_head(path, config)
    if wrong:
        refuse(path, wrong)
    slots, tree = slots_in(abstract_head(config))
    leaves = []
    for name, slot in slots.items():
        tensor = stored[name].read()
        check_finite(stored[name], tensor)
        leaves.append(jnp.asarray(tensor.transpose(np.argsort(slot.order)), dtype or tensor.dtype))
    return config, jax.tree.unflatten(tree, leaves)
