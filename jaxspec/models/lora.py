"""Update matrices at low rank (LoRA; Hu et al. 2021, arXiv 2106.09685).

A matrix W [out, in] becomes W + scale * (A B)^T, with A [in, rank] and B [rank, out]. The pairs lie
in a tree like the parameters', and `merged` makes plain parameters of both: models see no updates.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.errors import InputError, check_counts, check_numbers
from jaxspec.typing import Params

LORA = "lora"
"""Name of the pairs next to a model's parameters in training."""


@dataclass(frozen=True)
class Lora:
    """Choose the low-rank updates to train."""

    rank: int = 16
    alpha: float = 32.0
    """The updates are scaled by alpha / rank."""
    modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of the decoder's matrices that get one."""
    base: str = ""
    """Name of the model that the adapter is written for; by default the recipe's start."""

    def __post_init__(self) -> None:
        check_counts(rank=self.rank)
        check_numbers(alpha=self.alpha)
        if not self.modules:
            raise InputError("lora: no modules; give q_proj ...")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def init_lora(lora: Lora, params: Params, key: jax.Array) -> Params:
    """Return pairs that change nothing yet: A is random, B is zero.

    Raises InputError for a name that no matrix of the decoder has.
    """
    pairs: dict[str, Any] = {}
    flat: Any = flatten_dict(params, sep="/")
    for path, leaf in flat.items():
        match = re.fullmatch(r"((?!vision_tower/|visual/).*layers_\d+/(?:\w+/)?(\w+))/weight", path)
        if match and match[2] in lora.modules and leaf.ndim == 2:
            columns, rows = leaf.shape
            subkey = jax.random.fold_in(key, len(pairs))
            bound = rows**-0.5
            a = jax.random.uniform(subkey, (rows, lora.rank), minval=-bound, maxval=bound)
            pairs[match[1]] = {"a": a, "b": jnp.zeros((lora.rank, columns))}
    for name in lora.modules:
        if not any(path.endswith(f"/{name}") for path in pairs):
            raise InputError(f"lora: no matrix of the decoder is called {name!r}; give q_proj ...")
    return unflatten_dict(pairs, sep="/")


def merged(params: Params, lora: Lora | None) -> Params:
    """Return plain parameters: every matrix with a pair in `params["lora"]` updated."""
    if lora is None:
        return params
    flat: Any = flatten_dict({name: part for name, part in params.items() if name != LORA}, sep="/")
    pairs: Any = flatten_dict(params[LORA], sep="/")
    for path in {path.rpartition("/")[0] for path in pairs}:
        matrix = flat[f"{path}/weight"]
        update = lora.scale * (pairs[f"{path}/a"] @ pairs[f"{path}/b"]).T
        flat[f"{path}/weight"] = matrix + update.astype(matrix.dtype)
    return unflatten_dict(flat, sep="/")
