"""Fetch and read the vision tower of a checkpoint without the rest of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoints import directories, fitting
from jaxspec.checkpoints.formats.quantised import FORMATS, dequantised
from jaxspec.checkpoints.formats.tensor_files import list_file, model_files, read_index
from jaxspec.checkpoints.huggingface import read_tensor
from jaxspec.checkpoints.locating import SMALL, locate
from jaxspec.config import ModelConfig
from jaxspec.config.quantisation import Quantisation
from jaxspec.models.families import abstract_params, family_of, split_tower
from jaxspec.typing import Params


def tower_files(path_or_id: str | Path) -> list[Path]:
    """Return a checkpoint's weight files that hold its vision tower, fetched if need be.

    The index of a sharded checkpoint names the shard of each tensor. Without an index all files
    count.
    """
    path = locate(path_or_id, files=SMALL)
    shards: set[str] = set()
    if (path / directories.INDEX).is_file() and not (path / directories.SINGLE).is_file():
        config, quantisation = directories.described(path)
        layouts, _ = _layouts(config)
        index = read_index(path / directories.INDEX)
        shards = {
            shard
            for name, shard in index.items()
            if _parameter(name, config, quantisation) in layouts
        }
    if not shards:
        return model_files(locate(path_or_id))
    locate(path_or_id, files=tuple(shards))
    return sorted(path / shard for shard in shards)


def read_tower(path_or_id: str | Path, dtype: jnp.dtype) -> Params:
    """Return a checkpoint's tree of parameters with only its vision tower.

    Raises InputError where tensors are missing or do not fit config.json.
    """
    files, problems = tower_files(path_or_id), []
    config, quantisation = directories.described(files[0].parent)  # which also checks the files
    layouts, tree = _layouts(config)
    listed = (tensor for file in files for tensor in list_file(file))
    tensors = [x for x in listed if _parameter(x.name, config, quantisation) in layouts]
    if quantisation is not None:
        tensors = dequantised(tensors, quantisation, problems)
    stored = fitting.in_hub_layout(tensors, family_of(config.model_type).layouts, problems)
    problems += fitting.misfits(config, layouts, stored)
    if problems:
        fitting.refuse(files[0].parent, problems)
    leaves = [read_tensor(stored[name], layout, dtype) for name, layout in layouts.items()]
    return jax.tree.unflatten(tree, leaves)


def _parameter(name: str, config: ModelConfig, quantisation: Quantisation | None) -> str:
    """Return the hub's name of the parameter that a tensor holds, or holds a part of."""
    part = quantisation and FORMATS[quantisation.method].pattern.fullmatch(name)
    name = f"{part[1]}.weight" if part else name
    return fitting.hub_name(name, fitting.TOOLS + family_of(config.model_type).layouts)


def _layouts(config: ModelConfig) -> tuple[dict[str, fitting.StoredLayout], Any]:
    return fitting.layouts_in(split_tower(abstract_params(config))[0])
