"""Weights in the order in which XLA multiplies a few rows fastest on some CPUs.

For a large matrix and two rows or more it first copies the matrix into blocks of its own, which on an AMD processor
costs as much as reading it twice more: a pass over six tokens takes twice as long as over one. Cut into panels of 64
columns the matrix is such blocks already, and a pass over a block of tokens costs hardly more than over one. On an
Intel Xeon it is the other way round, and passes over panels take up to 1.4 times as long (`results/cpu_passes/`). So it
is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.typing import Array, Float, Params

WIDTH = 64
"""Columns of a panel: the most that XLA multiplies uncopied."""
ROWS = 48
"""Rows from which on the plain matrix is as fast."""
WORTH = 1.25
"""How many times as fast panels are to be: they are a second copy of the weights, and times are noisy."""


def panelled(params: Params) -> Params:
    """Parameters with each `kernel` [D, C*WIDTH] as `panels` [C, D, WIDTH], which `Dense` reads as well.

    Kernels of other widths stay as they are.
    """

    def arranged(path: tuple[str, ...], leaf: Any) -> tuple[tuple[str, ...], Array]:
        if path[-1] != "kernel" or leaf.ndim != 2 or leaf.shape[1] % WIDTH:
            return path, leaf
        return (*path[:-1], "panels"), leaf.reshape(len(leaf), -1, WIDTH).swapaxes(0, 1)

    return unflatten_dict(dict(arranged(*item) for item in flatten_dict(params).items()))


def times_panels(
    x: Float[Array, "... D"], panels: Float[Array, "panels D columns"], out: jnp.dtype | None = None
) -> Float[Array, "... panels*columns"]:
    """Return x times the matrix of these columns, summed in dtype `out`: one product a panel with the same rows."""
    rows = jnp.broadcast_to(x.reshape(-1, x.shape[-1]), (len(panels), x.size // x.shape[-1], x.shape[-1]))
    product = jnp.einsum("cTD,cDw->cTw", rows, panels, preferred_element_type=out)
    return product.swapaxes(0, 1).reshape(*x.shape[:-1], -1)


@cache
def panels_pay() -> bool:
    """Whether this processor multiplies the rows of a block so much faster with panels that they are worth the memory.

    Timed once a process, which takes half a second: six rows through 8 MB of matrices, the least of 20 runs by turns.
    """
    plain = {"up": {"kernel": jnp.zeros((512, 2048))}, "down": {"kernel": jnp.zeros((2048, 512))}}
    ways = {True: (times_panels, panelled(plain)), False: (jnp.matmul, plain)}
    calls = {way: partial(_multiplied, multiply, *jax.tree.leaves(given)) for way, (multiply, given) in ways.items()}
    least = dict.fromkeys(calls, float("inf"))
    for run in range(21):
        for way, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(call())
            if run:  # the first compiles
                least[way] = min(least[way], time.perf_counter() - begun)
    return WORTH * least[True] < least[False]


@partial(jax.jit, static_argnums=0)
def _multiplied(multiply: Callable[[Array, Array], Array], down: Array, up: Array) -> Array:
    return jax.lax.fori_loop(0, 4, lambda _, x: multiply(multiply(x, up), down), jnp.zeros((6, 512)))
