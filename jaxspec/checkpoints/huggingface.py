"""Models in Hugging Face layout, in and out: config.json and safetensors, one file or shards.

A tensor's name is computed from its parameter's path: `layers_0` reads `layers.0`; `kernel` and `embedding`
read `weight`; a dense kernel [in, out] is stored [out, in], a convolution's [..., in, out] is stored
[out, in, ...]. That is the layout of the hub's files, which transformers 4 and 5 both read. The other
layouts that transformers has written are brought to it by the regex rows of `jaxspec.models.FAMILIES`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from jaxspec.checkpoints.processors import save_processors
from jaxspec.config import ModelConfig, text_config
from jaxspec.errors import InputError
from jaxspec.models import abstract_params, family_of
from jaxspec.typing import Params

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_BUFFERS = re.compile(r"(rotary_emb\.(inv_freq|(cos|sin)_cached)|embeddings\.position_ids)$")
"""What old transformers stored besides parameters; computed here."""
_FLOATS = ("F32", "F16", "BF16")
_TOLD = 4
"""Problems that an error spells out; of the others it gives the count."""


@dataclass(frozen=True)
class Checkpoint:
    """A model read from `path`, a local directory (tokeniser and image processor lie there too)."""

    config: ModelConfig
    params: Params
    path: Path


@dataclass(frozen=True)
class _Slot:
    """A parameter and how it lies in the file: file axis a is parameter axis `order[a]`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file, not read yet. `view` is a safetensors slice: it knows shape and dtype."""

    name: str
    view: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.view.get_shape())


def load(
    path_or_id: str | Path,
    *,
    dtype: jnp.dtype | None = None,
    revision: str | None = None,
    shardings: Any | None = None,
) -> Checkpoint:
    """Reads a local directory or a hub id such as `llava-hf/llava-1.5-7b-hf` (fetched into the hub's cache).

    Strict: every tensor is used once, every parameter is filled, shapes and floating dtypes fit config.json.
    Tensors are read one after the other, so the host never holds a second copy of the model.

    Args:
      dtype: dtype of all parameters; None keeps each as stored.
      revision: branch, tag or commit of a hub id.
      shardings: pytree of `jax.sharding.Sharding`, shaped like the parameters; each device is given (and the
        host reads) only its slice. None puts everything on the default device.

    Raises:
      InputError: no such directory or id, unreadable files, an unsupported architecture, or tensors that do
        not fit; one line that names the first few problems and counts the rest.
    """
    path = locate(path_or_id, revision)
    config = read_config(path)
    slots, tree = _slots(config)
    stored = _open(path, family_of(config.model_type).layouts)
    _check(path, config, slots, stored)
    targets = tree.flatten_up_to(shardings) if shardings is not None else [None] * len(slots)
    work = tqdm(zip(slots, targets), f"load {path.name}", len(slots), unit="tensor", delay=2)
    leaves = [_read(stored[name].view, slots[name], dtype, target) for name, target in work]
    return Checkpoint(config, jax.tree.unflatten(tree, leaves), path)


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    *,
    tokenizer: Any | None = None,
    image_processor: Any | None = None,
    dtype: jnp.dtype | None = None,
    max_shard_bytes: int = 5 << 30,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Writes a directory that `load` and transformers (4.57 and 5) read, with nothing missing or unexpected.

    It is written beside `path` and renamed at the end. A checkpoint that is already there is replaced whole.

    Args:
      tokenizer, image_processor: transformers' objects, written along.
      dtype: dtype of the file's tensors; None keeps each as it is.
      max_shard_bytes: larger models become shards with an index; one shard at a time is copied to the host.
      generation: entries of generation_config.json besides the config's BOS, EOS and padding ids.

    Raises:
      InputError: `path` holds something that is not a checkpoint, or the parameters do not fit the config.
    """
    path = Path(os.path.abspath(Path(path).expanduser()))
    taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if taken and not (path / "config.json").is_file():
        raise InputError(f"{path}: exists and is no checkpoint; give another path, or remove it")
    slots, _ = _slots(config)
    leaves = {_tensor_name(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    wrong = sorted(
        {name for name, leaf in leaves.items() if name not in slots or slots[name].shape != leaf.shape}
        | (slots.keys() - leaves.keys())
    )
    if wrong:
        raise InputError(f"{path}: the parameters do not fit the config: {_tell(wrong)}")

    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        _write_configs(fresh, config, dtype or jnp.result_type(*leaves.values()), generation or {})
        _write_tensors(fresh, slots, leaves, dtype, max_shard_bytes)
        save_processors(fresh, config, tokenizer, image_processor)
        if taken:
            stale = fresh.with_suffix(".old")
            path.rename(stale)
            fresh.rename(path)
            shutil.rmtree(stale)
        else:
            fresh.rename(path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def locate(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local directory of a checkpoint; a hub id is fetched (or found in the hub's cache) first."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if isinstance(path_or_id, Path) or path.exists() or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path_or_id):
        raise InputError(
            f"checkpoint {str(path_or_id)!r}: no such directory; give one, or a hub id owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=list(_WANTED)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise InputError(
            f"checkpoint {path_or_id!r}: no such directory, and not to be had from the hub "
            f"({type(error).__name__}); check name, revision and network, or give a local directory"
        ) from error


def read_config(path: Path) -> ModelConfig:
    """The architecture that a checkpoint directory's config.json describes."""
    raw = _read_json(path / "config.json")
    if "model_type" not in raw:
        raise InputError(f"{path / 'config.json'}: no model_type; is this a model's directory?")
    return family_of(raw["model_type"]).config.from_hf(raw)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; give a directory in Hugging Face layout") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: not readable as JSON ({error}); fetch it again") from error
    if not isinstance(raw, dict):
        raise InputError(f"{file}: holds a {type(raw).__name__}, not an object; fetch it again")
    return raw


def _tensor_name(path: tuple[Any, ...]) -> str:
    keys = [re.sub(r"^(layers|blocks|mlp)_(\d+)$", r"\1.\2", key.key) for key in path]
    keys[-1] = {"kernel": "weight", "embedding": "weight"}.get(keys[-1], keys[-1])
    return ".".join(keys)


def _slots(config: ModelConfig) -> tuple[dict[str, _Slot], Any]:
    """Tensor name -> slot, in the order of the parameter tree's leaves; and the tree."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    slots = {}
    for path, leaf in leaves:
        order = tuple(range(leaf.ndim))
        if path[-1].key == "kernel":
            order = {2: (1, 0), 4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}[leaf.ndim]
        slots[_tensor_name(path)] = _Slot(leaf.shape, order)
    return slots, tree


def _open(path: Path, layouts: tuple[tuple[str, str], ...]) -> dict[str, _Stored]:
    """Every tensor of the checkpoint's files by its name in the hub's layout, buffers left out."""
    if (path / _SINGLE).is_file():
        files = [_SINGLE]
    elif (path / _INDEX).is_file():
        files = sorted(set(_read_json(path / _INDEX).get("weight_map", {}).values()))
    else:
        raise InputError(f"{path}: no {_SINGLE} and no {_INDEX}; save the model as safetensors")
    stored: dict[str, _Stored] = {}
    for file in files:
        try:
            handle = safe_open(path / file, framework="numpy")
        except FileNotFoundError:
            raise InputError(f"{path / file}: named by the index and not there; fetch it") from None
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path / file}: unreadable ({error}); fetch it again") from error
        for raw in sorted(handle.keys()):
            name = raw
            for pattern, replacement in layouts:
                name = re.sub(pattern, replacement, name)
            if _BUFFERS.search(name):
                continue
            if name in stored:
                raise InputError(f"{path}: {stored[name].name} and {raw} are the same parameter; remove one")
            stored[name] = _Stored(raw, handle.get_slice(raw))
    return stored


def _check(path: Path, config: ModelConfig, slots: dict[str, _Slot], stored: dict[str, _Stored]) -> None:
    problems: list[str] = []
    text = text_config(config)
    embedding = next(name for name in slots if name.endswith("embed_tokens.weight"))
    head = re.sub(r"model\.(decoder\.)?embed_tokens", "lm_head", embedding)
    if text.tie_word_embeddings and head in stored:
        tied = stored.pop(head)
        if embedding in stored and not np.array_equal(tied.view[:], stored[embedding].view[:]):
            problems.append(f"{tied.name} differs from its tied embedding; unset tie_word_embeddings")
    for name, slot in slots.items():
        if name not in stored:
            problems.append(f"{name} is missing")
            continue
        found, shape = stored[name], stored[name].shape
        if name in (embedding, head) and len(shape) == 2 and shape[0] != text.vocab_size:
            problems.append(
                f"{found.name} has {shape[0]} rows and config.json says vocab_size {text.vocab_size}; "
                "set vocab_size to the rows, padding counted, or resize the tensor"
            )
        elif shape != slot.file_shape:
            problems.append(f"{found.name} is {list(shape)}, config.json asks for {list(slot.file_shape)}")
        if found.view.get_dtype() not in _FLOATS:
            problems.append(f"{found.name} is {found.view.get_dtype()}, supported: {', '.join(_FLOATS)}")
    problems += [f"{stored[name].name} is unexpected" for name in sorted(stored.keys() - slots.keys())]
    if problems:
        raise InputError(f"{path}: tensors do not fit config.json: {_tell(problems)}")


def _tell(problems: list[str]) -> str:
    more = len(problems) - _TOLD
    return "; ".join(problems[:_TOLD]) + (f"; and {more} more ({len(problems)} in all)" if more > 0 else "")


def _read(view: Any, slot: _Slot, dtype: jnp.dtype | None, sharding: Any | None) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        tensor = view[tuple(index[axis] for axis in slot.order)]
        return tensor.astype(dtype or tensor.dtype, copy=False).transpose(np.argsort(slot.order))

    if sharding is None:
        return jax.device_put(part((slice(None),) * len(slot.shape)))
    return jax.make_array_from_callback(slot.shape, sharding, part)


def _write_tensors(
    path: Path, slots: dict[str, _Slot], leaves: dict[str, Any], dtype: jnp.dtype | None, max_shard_bytes: int
) -> None:
    shards: list[list[str]] = [[]]
    sizes = {name: leaf.size * jnp.dtype(dtype or leaf.dtype).itemsize for name, leaf in leaves.items()}
    for name in slots:
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + sizes[name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)

    where = {}
    for number, names in enumerate(shards, 1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            leaf = np.asarray(leaves[name]).transpose(slots[name].order)
            # "C": safetensors writes the buffer as it lies, whatever its strides.
            tensors[name] = leaf.astype(dtype or leaf.dtype, order="C")
            where[name] = file
        save_file(tensors, path / file, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read, whatever the umask says.
        (path / file).chmod((path / "config.json").stat().st_mode)
    if len(shards) > 1:
        _write_json(path / _INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})


def _write_configs(path: Path, config: ModelConfig, dtype: Any, generation: Mapping[str, Any]) -> None:
    name, by = jnp.dtype(dtype).name, {"transformers_version": version("transformers")}
    # `torch_dtype` is what transformers before 4.56 reads.
    _write_json(path / "config.json", config.to_hf() | {"dtype": name, "torch_dtype": name} | by)
    ids = {key: getattr(text_config(config), key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    known = {key: value for key, value in (ids | dict(generation)).items() if value is not None}
    _write_json(path / "generation_config.json", known | by)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
