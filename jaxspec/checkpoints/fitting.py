"""Map parameters to stored tensors, and check that a directory's fit its configuration."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoints.directories import SINGLE, parse_config, quantisation_of, read_raw_config
from jaxspec.checkpoints.formats.quantised import dequantised
from jaxspec.checkpoints.formats.quantised.matrix import QuantisedMatrix
from jaxspec.checkpoints.formats.tensor_files import (
    FLOATS,
    INTEGERS,
    StoredTensor,
    list_directory,
    shards_of,
)
from jaxspec.config import ModelConfig, text_config
from jaxspec.errors import InputError, collected, reading
from jaxspec.models.families import abstract_params, family_of
from jaxspec.typing import Params

_BUFFERS = re.compile(r"(rotary_emb\.(inv_freq|(cos|sin)_cached)|embeddings\.position_ids)$")
"""Buffers that old versions of transformers stored; this library computes them."""
TOOLS = (
    (r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.", r"\1"),
    (r"^(module\.|base_model\.model\.)+", ""),
    (r"^model\.(?=model\.|lm_head\.)", ""),
)
"""Regex rewrites that remove what training tools put in front of names: torch.compile, FSDP, DDP,
DeepSpeed, PEFT, Lightning."""
_LISTED = 4
"""Problems that an error spells out."""


@dataclass(frozen=True)
class Survey:
    """Hold a directory's configuration, its unread tensors, and all problems that prevent loading.

    Fields:
      config: None where config.json is missing, unreadable or of an unsupported family.
      tensors: By their names in the hub's layout.
    """

    config: ModelConfig | None
    tensors: dict[str, StoredTensor]
    problems: list[str]


def survey(path: Path) -> Survey:
    """Return the contents and problems of a local directory, without reading its tensors."""
    problems: list[str] = []
    with collected(problems):
        raw = read_raw_config(path)
        quantisation = None
        with collected(problems):
            quantisation = quantisation_of(path, raw)
        config = parse_config(path, raw)
        tensors = list_directory(path, problems)
        if quantisation is not None:
            tensors = dequantised(tensors, quantisation, problems)
        whole = not problems
        family = family_of(config.model_type)
        stored = in_hub_layout(tensors, family.layouts, problems)
        stored = {name: t for name, t in stored.items() if not re.match(family.unread, name)}
        if stored or whole:
            misfit = contradictions(config, lambda: layouts_of(config)[0], stored)
            # The tensors of an unreadable shard are not listed a second time.
            problems += [line for line in misfit if whole or not line.endswith(" is missing")]
            if problems and (path / SINGLE).is_file() and shards_of(path, SINGLE):
                stray = "shards are there too; remove those, or the file if it is not this model's"
                problems.insert(0, f"{SINGLE} is read, and {stray}")
        return Survey(config, stored, problems)
    return Survey(None, {}, problems)


@dataclass(frozen=True)
class StoredLayout:
    """Hold a parameter's layout in the file: file axis a is parameter axis `order[a]`."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    whole_numbers: bool = False
    """Whether it holds integers, which no dtype of the model changes."""

    @property
    def file_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in self.order)


def tensor_name(path: tuple[Any, ...]) -> str:
    """Return the name in the hub's files of the parameter at a path of the tree."""
    keys = [
        re.sub(r"^(layers|blocks|mlp|fc_norm|deepstack_merger_list)_(\d+)$", r"\1.\2", key.key)
        for key in path
    ]
    keys[-1] = {"kernel": "weight", "embedding": "weight"}.get(keys[-1], keys[-1])
    return ".".join(keys)


@cache
def layouts_of(config: ModelConfig) -> tuple[dict[str, StoredLayout], Any]:
    """Return `layouts_in` of a model's parameters."""
    return layouts_in(abstract_params(config))


def layouts_in(params: Params) -> tuple[dict[str, StoredLayout], Any]:
    """Return the layout of each tensor name, in the order of the tree's leaves; and the tree."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    layouts = {}
    for path, leaf in leaves:
        order = tuple(range(leaf.ndim))
        if path[-1].key == "kernel":
            order = {4: (3, 2, 0, 1), 5: (4, 3, 0, 1, 2)}[leaf.ndim]
        whole_numbers = jnp.issubdtype(leaf.dtype, jnp.integer)
        layouts[tensor_name(path)] = StoredLayout(leaf.shape, order, whole_numbers)
    return layouts, tree


def named_tensors(params: Params) -> dict[str, np.ndarray]:
    """Return the parameters by the names, and in the layout, of the file."""
    layouts, _ = layouts_in(params)
    return {
        name: np.ascontiguousarray(np.asarray(leaf).transpose(layout.order))
        for (name, layout), leaf in zip(layouts.items(), jax.tree.leaves(params), strict=True)
    }


def hub_name(name: str, layouts: tuple[tuple[str, str], ...]) -> str:
    """Return a tensor's name in the hub's layout."""
    for pattern, replacement in layouts:
        name = re.sub(pattern, replacement, name)
    return name


def in_hub_layout(
    tensors: Iterable[StoredTensor], layouts: tuple[tuple[str, str], ...], problems: list[str]
) -> dict[str, StoredTensor]:
    """Return the tensors by their hub names, without buffers; duplicates go to `problems`."""
    stored: dict[str, StoredTensor] = {}
    for tensor in tensors:
        name = hub_name(tensor.name, TOOLS + layouts)
        if _BUFFERS.search(name):
            continue
        if name in stored:
            problems.append(
                f"{stored[name].name} and {tensor.name} are the same parameter; remove one"
            )
        stored[name] = tensor
    return stored


def refuse(path: Path, problems: Sequence[str]) -> NoReturn:
    """Raise InputError with the first few problems, in one line, and the number of all."""
    listed, more = problems[:_LISTED], len(problems) - _LISTED
    line = "; ".join(listed) + (f"; and {more} more ({len(problems)} in all)" if more > 0 else "")
    raise InputError(line if line.startswith(str(path)) else f"{path}: {line}")


def contradictions(
    config: Any, layouts: Callable[[], Mapping[str, StoredLayout]], stored: dict[str, StoredTensor]
) -> list[str]:
    """Return how the tensors contradict config.json; see `misfits`.

    Args:
      layouts: Builds the layouts, after the depth was checked: tracing a layer takes time.
    """
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))]
    for part in parts:
        for name in ("num_hidden_layers", "depth"):
            if getattr(part, name, 0) > len(stored):
                return [
                    f"config.json says {name} {getattr(part, name)}, and the files hold "
                    f"{len(stored)} tensors; fetch both again"
                ]
    problems: list[str] = []
    with collected(problems), reading("config.json describes no model", "fetch it again"):
        return misfits(config, layouts(), stored)
    return problems


def misfits(
    config: ModelConfig, layouts: Mapping[str, StoredLayout], stored: dict[str, StoredTensor]
) -> list[str]:
    """Return how the tensors contradict config.json; drop an output matrix that is tied."""
    problems = _drop_tied_head(config, layouts, stored)
    _drop_zero_biases(layouts, stored)
    _drop_shared_keys(config, stored)
    missing = [name for name in layouts if name not in stored]
    surplus = sorted(stored.keys() - layouts.keys())
    for name, layout in layouts.items():
        if name not in stored:
            continue
        tensor, shape = stored[name], list(layout.file_shape)
        if list(tensor.shape) != shape:
            problems.append(f"{tensor.name} is {list(tensor.shape)}, config.json asks for {shape}")
        dtypes = INTEGERS if layout.whole_numbers else FLOATS
        if tensor.dtype not in dtypes:
            problems.append(f"{tensor.name} is {tensor.dtype}, supported: {', '.join(dtypes)}")
    untied = "tie_word_embeddings is false, and "
    # By turns, so that the first few of them show both.
    lines = zip_longest(
        (f"{untied * name.endswith('lm_head.weight')}{name} is missing" for name in missing),
        (f"{stored[name].name} is unexpected" for name in surplus),
    )
    return problems + [line for pair in lines for line in pair if line]


def _drop_zero_biases(layouts: Mapping[str, StoredLayout], stored: dict[str, StoredTensor]) -> None:
    """Drop the biases of zeros that GPTQ's files have for all quantised matrices."""
    for name in [name for name in stored if name.endswith(".bias") and name not in layouts]:
        matrix = stored.get(f"{name.removesuffix('bias')}weight")
        packed = isinstance(matrix, QuantisedMatrix) and stored[name].dtype in FLOATS
        if packed and not stored[name].read().any():
            del stored[name]


def _drop_shared_keys(config: ModelConfig, stored: dict[str, StoredTensor]) -> None:
    """Drop the matrices for keys and values of layers that read another layer's."""
    first = text_config(config).cached_layers
    keys = re.compile(r"(?:language_model\.)?model\.layers\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
    for name in [*stored]:
        if (match := keys.match(name)) and int(match[1]) >= first:
            del stored[name]


def tied_names(layouts: Iterable[str]) -> tuple[str, str]:
    """Return the names of a decoder's embedding and output matrix, which has no layout if tied."""
    embedding = next((name for name in layouts if name.endswith("embed_tokens.weight")), "")
    return embedding, re.sub(r"model\.(decoder\.)?embed_tokens", "lm_head", embedding)


def _drop_tied_head(
    config: ModelConfig, layouts: Mapping[str, StoredLayout], stored: dict[str, StoredTensor]
) -> list[str]:
    """Leave out an output matrix that is the embedding; return a problem if they differ."""
    embeddings, name = tied_names(layouts)
    if not text_config(config).tie_word_embeddings or name not in stored:
        return []
    head, embedding = stored.pop(name), stored.get(embeddings)
    if embedding is None or {embedding.dtype, head.dtype} - FLOATS.keys():
        return []
    if np.array_equal(head.read(), embedding.read()):
        return []
    return [f"{head.name} differs from its tied embedding; unset tie_word_embeddings"]
