"""Read LoRA adapters in PEFT's format, check them against a model, and write them.

A directory holds `adapter_config.json` and `adapter_model.safetensors`. A matrix W of the file
becomes W + scale * B A, with A [rank, in] and B [out, rank]; an embedding W [V, D] becomes
W + scale * (B A)^T, with A [rank, V]. Tensors of `modules_to_save` replace the model's own. Names
are those of transformers' modules, as its versions 4 and 5 write them.

Where embedding and output matrix are tied, an adapter that changes one of them unties the model, as
in PEFT's forward pass: the other one stays as it was. (PEFT's own merge of an update changes both,
and then answers differently from the model that was trained.) With `ensure_weight_tying` both
change.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from jaxspec.checkpoints import directories, fitting
from jaxspec.checkpoints.formats.tensor_files import (
    FLOATS,
    StoredTensor,
    cast,
    list_file,
    write_tensors,
)
from jaxspec.checkpoints.processors import save_processors
from jaxspec.config import LvlmConfig, ModelConfig, text_config, untied
from jaxspec.errors import InputError, is_number, reading
from jaxspec.files import local_path
from jaxspec.models.families import family_of
from jaxspec.models.lora import LORA, Lora
from jaxspec.typing import Array, Params

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BIN = "adapter_model.bin"
_LARGEST = float(np.finfo(np.float32).max)
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_MODULE_NAMES = (
    (r"\.(base_layer|modules_to_save\.default)(?=\.)", ""),
    (r"\.(lora_(?:embedding_)?[AB])\.default(?=\.|$)", r".\1"),
)
"""Regex rewrites from the names of PEFT's modules, of the adapter "default", to those of files."""
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Entries of adapter_config.json, and their values for which a matrix becomes W + scale * B A.
Other `init_lora_weights` change W too."""
_WITHOUT_EFFECT = {
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("rank_pattern", "alpha_pattern", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "megatron_config", "megatron_core"),
    *("loftq_config", "eva_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
}
"""Entries that are read, that say what the file holds, or that only matter in training. Any other
one is refused unless it is off: null, false or empty."""


@dataclass(frozen=True)
class Pair:
    """Hold the two factors of a matrix's update."""

    a: StoredTensor
    b: StoredTensor
    scale: float
    embeds: bool
    """Whether it updates an embedding [V, D]: by (B A)^T, and otherwise by B A."""

    def added(self, matrix: Array, dtype: Any) -> Array:
        """Return the updated matrix, placed as it is; the sum is in float32."""
        a, b = self.a.read(), self.b.read()
        factors = (a.T, b.T) if self.embeds else (b, a)
        return jax.device_put(
            _added(matrix, *factors, self.scale, jnp.dtype(dtype)), matrix.sharding
        )


@dataclass(frozen=True)
class Adapter:
    """Hold an adapter's unread tensors, by the names of the model's tensors in the hub's layout.

    Fields:
      config: The model's configuration with the adapter merged.
      pairs: Updates of matrices.
      whole: Tensors that replace the model's.
      apart: Names of a tied embedding and the output matrix, if the adapter unties them.
    """

    config: ModelConfig
    pairs: Mapping[str, Pair]
    whole: Mapping[str, StoredTensor]
    apart: tuple[str, str] | None = None

    def applied(self, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the model's unread tensors, with those that the adapter replaces."""
        output_matrix = {} if self.apart is None else {self.apart[1]: tensors[self.apart[0]]}
        return {**tensors, **output_matrix, **self.whole}


def _add(matrix: Array, left: Array, right: Array, scale: float, dtype: Any) -> Array:
    exact = jax.lax.Precision.HIGHEST
    update = jnp.matmul(left.astype(jnp.float32), right.astype(jnp.float32), precision=exact)
    return (matrix.astype(jnp.float32) + scale * update).astype(dtype)


_added = jax.jit(_add, static_argnames="dtype")


def read_adapter(path: str | Path, config: ModelConfig) -> Adapter:
    """Return the adapter in a directory, for a model of this configuration.

    Raises InputError, one line, where a file is missing, an entry of adapter_config.json asks for
    more than W + scale * B A, or a tensor does not fit the model.
    """
    path = local_path(path)
    files = (path / WEIGHTS, path / BIN)
    # Not `Path.is_file`, which raises for names that are too long.
    weights = next((file for file in files if os.path.isfile(file)), files[0])
    for file in (path / CONFIG, weights):
        if not os.path.isfile(file):
            raise InputError(
                f"adapter {path}: no {file.name}; give the directory that PEFT has written"
            )
    directories.check_files(path)
    if weights.name == BIN and (lack := directories.without_torch()):
        raise InputError(f"{weights}: {lack}")
    raw = directories.read_json(path / CONFIG)
    if raw.get("peft_type") != "LORA":
        raise InputError(f"adapter {path}: peft_type {raw.get('peft_type')!r}; only LORA is merged")
    for entry, values in _UNSUPPORTED.items():
        if entry in raw and raw[entry] not in values:
            raise InputError(
                f"adapter {path}: {entry} {raw[entry]!r} is not supported; merge it with PEFT"
            )
    for entry in sorted(raw.keys() - _UNSUPPORTED.keys() - _WITHOUT_EFFECT):
        if raw[entry]:
            raise InputError(
                f"adapter {path}: {entry} {raw[entry]!r:.60} is not known; merge it with PEFT"
            )
    return _checked_adapter(weights, raw, config)


def _checked_adapter(weights: Path, raw: Mapping[str, Any], config: ModelConfig) -> Adapter:
    """Return an adapter that fits the model; InputError names each tensor that does not."""
    path, renames = weights.parent, family_of(config.model_type).layouts
    problems: list[str] = []
    factors: dict[str, dict[str, StoredTensor]] = {}
    modules: dict[str, str] = {}
    embeddings: set[str] = set()
    whole: dict[str, StoredTensor] = {}
    for tensor in list_file(weights):
        if ".original_module." in tensor.name:  # what `modules_to_save` replaces
            continue
        module = fitting.hub_name(tensor.name.removeprefix(_PREFIX), _MODULE_NAMES)
        if tensor.dtype not in FLOATS:
            problems.append(f"{tensor.name} is {tensor.dtype}, supported: {', '.join(FLOATS)}")
        elif match := _PAIR.fullmatch(module):
            name = fitting.hub_name(f"{match[1]}.weight", renames)
            factors.setdefault(name, {})[match[2] or match[3]] = tensor
            modules[name] = match[1]
            embeddings |= {name} if match[3] else set()
        else:
            whole[fitting.hub_name(module, renames)] = tensor
    saved = raw.get("modules_to_save")
    with reading(f"{path / CONFIG}: modules_to_save {saved!r:.40} is no list", "write it anew"):
        apart = _untied_names(raw, config, factors, whole)
    if apart is not None:
        config = untied(config)
    layouts = fitting.layouts_of(config)[0]
    pairs: dict[str, Pair] = {}
    expected: list[tuple[StoredTensor, tuple[int, ...]]] = []
    for name, halves in factors.items():
        if name not in layouts or len(layouts[name].shape) != 2:
            problems.append(f"the model has no matrix {name}")
        elif len(halves) < 2:
            (half,) = halves.values()
            problems.append(f"{half.name} lacks its other half")
        else:
            with reading(f"{path / CONFIG}: no rank and alpha of {modules[name]}", "write it anew"):
                rank, scale = _rank_and_scale(raw, modules[name])
            embeds = name in embeddings
            outs, ins = reversed(layouts[name].shape) if embeds else layouts[name].shape
            expected += [(halves["A"], (rank, ins)), (halves["B"], (outs, rank))]
            pairs[name] = Pair(halves["A"], halves["B"], scale, embeds)
    for name, tensor in whole.items():
        if name in layouts:
            expected.append((tensor, layouts[name].file_shape))
        else:
            problems.append(f"the model has no tensor {name}")
    problems += [
        f"{tensor.name} is {list(tensor.shape)}, but {CONFIG} and the model ask for {list(shape)}"
        for tensor, shape in expected
        if tensor.shape != shape
    ]
    if problems:
        fitting.refuse(path, problems)
    return Adapter(config, pairs, whole, apart)


def _untied_names(
    raw: Mapping[str, Any],
    config: ModelConfig,
    factors: dict[str, dict[str, StoredTensor]],
    whole: dict[str, StoredTensor],
) -> tuple[str, str] | None:
    """Return the names of a tied model's embedding and output matrix if the adapter unties them.

    An output matrix that equals the embedding is a copy of it, and is dropped from `whole`. PEFT
    also writes embeddings that it did not train: only `modules_to_save` and updates part the two.
    With `ensure_weight_tying` the two updates are one, and the output matrix's is dropped.
    """
    if not text_config(config).tie_word_embeddings:
        return None
    embedding, head = fitting.tied_names(fitting.layouts_of(config)[0])
    tying = bool(raw.get("ensure_weight_tying"))
    if tying:
        factors.pop(head, None)
    elif {embedding, head} & factors.keys():
        return embedding, head
    matrices = whole.get(embedding), whole.get(head)
    if matrices[0] and matrices[1] and np.array_equal(matrices[0].read(), matrices[1].read()):
        del whole[head]
        return None
    if tying:
        return None
    module = embedding.removesuffix(".weight")
    saved = embedding in whole and any(
        module.endswith(str(name)) for name in raw.get("modules_to_save") or []
    )
    return (embedding, head) if saved or head in whole else None


def _rank_and_scale(raw: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return a module's rank and scale; entries of the patterns count before the common ones."""

    def setting(patterns: str, common: str) -> Any:
        for pattern, value in (raw.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return raw.get(common)

    rank, alpha = setting("rank_pattern", "r"), setting("alpha_pattern", "lora_alpha")
    scale = alpha / (rank**0.5 if raw.get("use_rslora") else rank)
    if not (is_number(alpha) and abs(scale) <= _LARGEST):
        raise ValueError(f"lora_alpha {alpha!r:.40}")
    return rank, scale


def save_adapter(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    lora: Lora,
    base: str,
    dtype: Any = jnp.bfloat16,
    image_processor: Any | None = None,
) -> None:
    """Write the adapter to a new directory, which is renamed to `path` at the end.

    It holds the model's config.json too, and all parts of an LVLM except its decoder.

    Args:
      params: The model's parameters, with pairs under `lora`.
      base: Name of the language model, or of the model, that the adapter belongs to.
    """
    language = (LORA, "language_model", "model", "lm_head")
    whole = {name: part for name, part in params.items() if name not in language}
    tensors = fitting.named_tensors(whole)
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params[LORA])[0]:
        half = keys[-1].key.upper()
        tensors[f"{fitting.tensor_name(keys[:-1])}.lora_{half}.weight"] = np.asarray(leaf).T
    entries = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(lora.modules),
        "modules_to_save": list(whole) or None,
        "inference_mode": True,
    }
    with directories.written_whole(path, overwrite=True) as fresh:
        directories.write_json(fresh / "config.json", config.to_hf())
        directories.write_json(fresh / CONFIG, entries)
        stored = {_PREFIX + name: cast(leaf, dtype) for name, leaf in tensors.items()}
        write_tensors(fresh / WEIGHTS, stored)
        save_processors(fresh, config, None, image_processor)


def base_of(folder: Path) -> str:
    """Return the name of the model that an adapter was written for."""
    return str(directories.read_json(folder / CONFIG).get("base_model_name_or_path", ""))


def composed(folder: Path, base: Path) -> tuple[ModelConfig, dict[str, StoredTensor], Adapter]:
    """Return the model that an adapter of `save_adapter` makes of its base, as unread tensors.

    They are the base's and the adapter's whole ones; pairs are not merged.

    Args:
      base: Directory of the model, or of the language model of an LVLM.
    """
    config = directories.read_config(folder)
    adapter = read_adapter(folder, config)
    stored = fitting.survey(base)
    if stored.problems:
        fitting.refuse(base, stored.problems)
    language = isinstance(config, LvlmConfig) and not isinstance(stored.config, LvlmConfig)
    part = "language_model." if language else ""
    tensors = {f"{part}{name}": tensor for name, tensor in stored.tensors.items()}
    return config, tensors | dict(adapter.whole), adapter


def read_pairs(adapter: Adapter, lora: Lora) -> Params:
    """Return an adapter's pairs as the tree that training holds under `lora`.

    Raises InputError for an adapter of other matrices, ranks or scales than `lora` has.
    """
    sizes = {(pair.a.shape[0], pair.scale) for pair in adapter.pairs.values()}
    modules = {name.split(".")[-2] for name in adapter.pairs}
    if sizes != {(lora.rank, lora.scale)} or modules != {*lora.modules}:
        raise InputError(
            f"its adapter updates {', '.join(sorted(modules))} at (rank, scale) "
            f"{', '.join(map(str, sorted(sizes)))}, but the recipe's lora "
            f"{', '.join(sorted(lora.modules))} at {(lora.rank, lora.scale)}; give lora the same"
        )
    flat = {}
    for name, pair in adapter.pairs.items():
        path = re.sub(r"\.(layers|blocks)\.(\d+)\.", r".\1_\2.", name.removesuffix(".weight"))
        for half, tensor in (("a", pair.a), ("b", pair.b)):
            flat[(*path.split("."), half)] = tensor.read().astype(np.float32).T
    return unflatten_dict(flat)
