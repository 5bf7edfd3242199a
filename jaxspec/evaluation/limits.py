"""What a device can do at most, measured, and what a pass asks of it, counted from shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from jaxspec.config import TextConfig
from jaxspec.evaluation.timing import time_loops
from jaxspec.models import abstract_params
from jaxspec.typing import Array


@dataclass(frozen=True)
class Limits:
    """Rates of three probes: what no program on this device at this hour does much better."""

    copy_gbps: float
    """Bytes read and written a second by x + 1 over an array too large for caches, in 1e9."""
    read_gbps: float
    """Bytes read a second by a vector times a matrix."""
    matmul_tflops: float
    """Floating-point operations a second by a product of square matrices, in 1e12."""


@dataclass(frozen=True)
class Work:
    """What one pass over T new tokens a row must do."""

    bytes: float
    """Weights and all slots of the cache, each read once."""
    flops: float


def probe(
    dtype: jnp.dtype, megabytes: int, side: int, repeats: int = 20, clock: Literal["wall", "cpu"] = "wall"
) -> Limits:
    """Runs the probes, in turns.

    Args:
      megabytes: size of the copied array and of the matrix that is read.
      side: of the square matrices that are multiplied.
    """
    width = 1024
    depth = megabytes * 2**20 // (width * dtype.itemsize)
    box = {
        "copy": jnp.ones((depth, width), dtype),
        "read": jnp.ones((1, depth), dtype),
        "matmul": jnp.ones((side, side), dtype) / side,
    }
    large, square = jnp.ones((depth, width), dtype) / depth, jnp.ones((side, side), dtype) / side

    steps = {"copy": _copy, "read": partial(_read, large), "matmul": partial(_multiply, square)}

    def call(name: str, times: int) -> Array:
        box[name] = steps[name](box[name], times)
        return box[name]

    ms = time_loops({name: partial(call, name) for name in box}, repeats, clock, "limits")
    size = depth * width * dtype.itemsize
    return Limits(2 * size / ms["copy"] / 1e6, size / ms["read"] / 1e6, 2 * side**3 / ms["matmul"] / 1e9)


@partial(jax.jit, donate_argnums=0)
def _copy(x: Array, times: int) -> Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x + 1, x)


@jax.jit
def _read(matrix: Array, x: Array, times: int) -> Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x + (x @ matrix).max(), x)


@jax.jit
def _multiply(matrix: Array, x: Array, times: int) -> Array:
    return jax.lax.fori_loop(0, times, lambda _, x: x @ matrix, x)


def pass_work(config: TextConfig, itemsize: int, batch: int, tokens: int, slots: int) -> Work:
    """Return the work of a decoder's pass: B rows, T tokens each, over S slots.

    Embeddings that are only looked up count nothing.
    """
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    weights = sum(
        leaf.size for path, leaf in leaves if config.tie_word_embeddings or path[-1].key != "embedding"
    )
    layers, width = config.num_hidden_layers, config.head_dim
    cache = 2 * layers * batch * slots * config.num_key_value_heads * width
    attention = 4 * layers * batch * tokens * slots * config.num_attention_heads * width
    return Work(itemsize * (weights + cache), 2 * weights * batch * tokens + attention)
