"""Read models in Hugging Face layout from safetensors or .bin, and write safetensors.

A tensor's name is computed from its parameter's path: `layers_0` reads `layers.0`; `kernel` and
`embedding` read `weight`; a convolution's kernel [..., in, out] is stored [out, in, ...]. That is
the layout of the hub's files, which transformers 4 and 5 both read. The other layouts that
transformers has written are brought to it by the regex rows of `jaxspec.models.FAMILIES`.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh
from tqdm import tqdm

from jaxspec.checkpoints.adapters import Adapter, read_adapter
from jaxspec.checkpoints.directories import INDEX, write_json, written_whole
from jaxspec.checkpoints.fitting import (
    StoredLayout,
    hub_name,
    layouts_of,
    refuse,
    survey,
    tensor_name,
)
from jaxspec.checkpoints.formats.tensor_files import FLOATS, StoredTensor, cast, write_tensors
from jaxspec.checkpoints.processors import save_processors
from jaxspec.config import ModelConfig, text_config
from jaxspec.models.families import abstract_params, family_of
from jaxspec.models.int8 import Weights, quantise, scale_path
from jaxspec.runtime import human_bytes
from jaxspec.sharding import put, shardings
from jaxspec.typing import Params

_NOT_KEPT = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("quantization_config", "compression_config", "vocab_size", "draft_vocabulary", "use_cache"),
    *("num_nextn_predict_layers", "known_tokens"),
    *("sliding_window", "max_window_layers", "layer_types"),
}
"""Entries of a source's config.json that do not hold for its copy, or are not about the model.
A copy has no MTP head. Families write the last three where they have an effect."""


@dataclass(frozen=True)
class LoadReport:
    """Report the bytes, seconds and host memory that reading a checkpoint took."""

    nbytes: int
    """Bytes of the parameters that this process holds now, every device's copy counted."""
    devices: int
    seconds: float
    host_growth: int
    """Growth of the process's peak memory; on CPU devices it includes the parameters."""

    def __str__(self) -> str:
        return (
            f"{human_bytes(self.nbytes)} on {self.devices} device{'s' * (self.devices > 1)} "
            f"in {self.seconds:.1f} s, "
            f"host memory grew by {human_bytes(self.host_growth)} at most"
        )


@dataclass(frozen=True)
class Checkpoint:
    """Hold a model that was read."""

    config: ModelConfig
    params: Params
    report: LoadReport


def load(
    path: Path,
    *,
    dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    weights: Weights | None = None,
    adapter: str | Path | None = None,
) -> Checkpoint:
    """Read the model in a directory.

    Strict: every tensor is used once, every parameter is filled, shapes and floating dtypes fit
    config.json. Tensors are read and cast one after the other, so the host never holds a second
    copy of the model.

    Args:
      dtype: Dtype of all parameters; None keeps each as stored.
      mesh: Mesh to split the parameters over; each process reads only the bytes that its devices
        hold. None puts everything on the default device.
      weights: "int8" quantises the matrices of the decoder's layers, each as soon as it is read, so
        that a device never holds two of them in 16 bits.
      adapter: Directory of a LoRA adapter in PEFT's format; each matrix is updated, in float32, as
        soon as it is read.

    Raises:
      InputError: no such directory, unreadable files, an unsupported architecture, or tensors that
        do not fit; one line that names the first few problems and counts the rest.
    """
    start, before = time.perf_counter(), _peak_memory()
    contents = survey(path)
    if contents.problems or contents.config is None:
        refuse(path, contents.problems)
    update = None if adapter is None else read_adapter(adapter, contents.config)
    config = contents.config if update is None else update.config
    placement = None
    if mesh is not None:
        placement = shardings(config, abstract_params(config, weights=weights), mesh)
    params = read_params(config, contents.tensors, dtype, placement, weights, update, path.name)
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    devices = len({shard.device for shard in shards})
    nbytes = sum(shard.data.nbytes for shard in shards)
    report = LoadReport(nbytes, devices, time.perf_counter() - start, _peak_memory() - before)
    return Checkpoint(config, params, report)


def read_params(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    dtype: jnp.dtype | None = None,
    shardings: Params | None = None,
    weights: Weights | None = None,
    adapter: Adapter | None = None,
    title: str = "",
) -> Params:
    """Return a model's parameters, read from its tensors; arguments as in `load`.

    Args:
      shardings: Pytree of shardings, shaped like the parameters, with the scales of int8 weights.
      title: Name of the model for the progress bar.
    """
    layouts, tree = layouts_of(config)
    names = flatten_dict(jax.tree.unflatten(tree, list(layouts)), sep="/")
    at = flatten_dict(shardings or {}, sep="/")
    tensors = adapter.applied(tensors) if adapter else tensors
    work = tqdm(names.items(), f"load {title}", unit="tensor", delay=2, disable=None)
    params: dict[str, jax.Array] = {}
    for key, name in work:
        scale = scale_path(key) if weights == "int8" else None
        final = dtype if scale is None else None  # int8 is rounded from what the file holds
        pair = adapter.pairs.get(name) if adapter else None
        exact = final if pair is None else jnp.dtype("float32")  # the sum is rounded once
        params[key] = read_tensor(tensors[name], layouts[name], exact, at.get(key))
        if pair is not None:
            stored = FLOATS[tensors[name].dtype] if scale is None else exact
            params[key] = pair.added(params[key], final or stored)
        if scale is not None:
            parts = dict(zip((key, scale), quantise(params[key])))
            params |= jax.block_until_ready(put(parts, {part: at.get(part) for part in parts}))
    return unflatten_dict(jax.block_until_ready(params), sep="/")


@dataclass(frozen=True, eq=False)
class UnreadParameter:
    """Stand for a parameter that `save` reads when it writes it, so that memory holds one shard.

    Fields:
      dtype: Dtype of the numbers.
      read: Returns the numbers as the file has them, in the order of the layout's file axes.
    """

    layout: StoredLayout
    dtype: Any
    read: Callable[[], np.ndarray]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.read().transpose(np.argsort(self.layout.order))


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Choose how a model is written.

    Fields:
      dtype: Dtype of the file's tensors; None keeps each as it is.
      max_shard_bytes: Largest size of a file; a larger model becomes shards with an index. The host
        holds one shard at a time.
      generation: Entries of generation_config.json, which replace the config's BOS, EOS and padding
        ids; None leaves an entry out.
      extra: The source's config.json, whose entries are kept, nested ones too, where this library
        writes none.
      overwrite: Replace a checkpoint at `path`; other files in its directory stay.
    """

    dtype: jnp.dtype | None = None
    max_shard_bytes: int = 5 << 30
    generation: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    overwrite: bool = False


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    options: SaveOptions | None = None,
    *,
    tokenizer: Any | None = None,
    image_processor: Any | None = None,
    write_more: Callable[[Path], None] | None = None,
) -> None:
    """Write a directory that `load` and transformers (4.57 and 5) read completely.

    It is written next to `path` and renamed at the end.

    Args:
      tokenizer, image_processor: Objects of transformers, written too.
      write_more: Function that writes more files into the directory, before it is renamed to
        `path`.

    Raises:
      InputError: `path` holds something, or cannot be written, or the parameters do not fit the
        config.
    """
    options = options or SaveOptions()
    layouts, _ = layouts_of(config)
    leaves = {
        tensor_name(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    expected, actual = (
        {name: x.shape for name, x in arrays.items()}.items() for arrays in (layouts, leaves)
    )
    if wrong := sorted({name for name, _ in expected ^ actual}):
        refuse(Path(path), [f"the parameters do not fit the config: {wrong[0]}", *wrong[1:]])
    renames = family_of(config.model_type).written
    layouts, leaves = (
        {hub_name(name, renames): entries[name] for name in layouts}
        for entries in (layouts, leaves)
    )
    with written_whole(path, options.overwrite) as fresh:
        write_configs(fresh, config, options.dtype or jnp.result_type(*leaves.values()), options)
        _write_tensors(fresh, layouts, leaves, options)
        save_processors(fresh, config, tokenizer, image_processor)
        if write_more is not None:
            write_more(fresh)


def _peak_memory() -> int:
    """Return the most bytes of memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def read_tensor(
    tensor: StoredTensor, layout: StoredLayout, dtype: jnp.dtype | None, sharding: Any | None = None
) -> jax.Array:
    """Read this process's part of a tensor once, and give each device its part."""
    back = np.argsort(layout.order)
    dtype = jnp.dtype("int32") if layout.whole_numbers else dtype
    if sharding is None:
        whole = tensor.read()
        return jax.device_put(whole.astype(dtype or whole.dtype, copy=False).transpose(back))
    pieces = sharding.addressable_devices_indices_map(layout.shape).values()
    spans = [
        [part.indices(size)[:2] for part, size in zip(piece, layout.shape)] for piece in pieces
    ]
    box = [
        slice(min(s[axis][0] for s in spans), max(s[axis][1] for s in spans))
        for axis in range(len(layout.shape))
    ]
    values = tensor.read([box[axis] for axis in layout.order]).transpose(back)

    def part(index: Any) -> np.ndarray:
        inner = [part.indices(size)[:2] for part, size in zip(index, layout.shape)]
        portion = values[tuple(slice(a - b.start, z - b.start) for (a, z), b in zip(inner, box))]
        # Copies, so that no device keeps the whole box alive; numpy copies integers faster than
        # bfloat16.
        if dtype in (None, portion.dtype):
            return np.array(portion.view(f"u{portion.itemsize}"), order="C").view(portion.dtype)
        return np.array(portion, dtype, order="C")

    return jax.make_array_from_callback(layout.shape, sharding, part)


def _write_tensors(
    path: Path, layouts: dict[str, StoredLayout], leaves: dict[str, Any], options: SaveOptions
) -> None:
    """Write the parameters by the hub's names, in shards if they are large."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        {name: leaves[name] for name in layouts},
        get_storage_size=lambda leaf: leaf.size * jnp.dtype(options.dtype or leaf.dtype).itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=options.max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        tensors = {}
        for name in names:
            leaf = np.asarray(leaves[name]).transpose(layouts[name].order)
            tensors[name] = cast(leaf, options.dtype or leaf.dtype)
        write_tensors(path / file, tensors)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(path / INDEX, index)


def write_configs(path: Path, config: ModelConfig, dtype: Any, options: SaveOptions) -> None:
    """Write config.json and generation_config.json.

    Args:
      dtype: Dtype of the tensors, which config.json names.
    """
    name, by = jnp.dtype(dtype).name, {"transformers_version": version("transformers")}
    # transformers before 4.56 reads `torch_dtype`.
    entries = _with_extra(config.to_hf(), options.extra) | {"dtype": name, "torch_dtype": name} | by
    write_json(path / "config.json", entries)
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {key: getattr(text_config(config), key) for key in keys} | dict(options.generation)
    special_ids = {key: value for key, value in ids.items() if value is not None}
    write_json(path / "generation_config.json", special_ids | by)


def _with_extra(entries: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config.json, and its source's other entries."""
    out = {key: value for key, value in extra.items() if key not in _NOT_KEPT} | entries
    for key, value in entries.items():
        if key in ("text_config", "vision_config") and isinstance(extra.get(key), dict):
            out[key] = _with_extra(value, extra[key])
    return out
