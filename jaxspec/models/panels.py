"""Weights in the order in which XLA for CPUs multiplies a few rows fastest.

For a large matrix and two rows or more it first copies the matrix into blocks of its own, which costs as much as
reading it twice more: a pass over six tokens takes twice as long as over one. Cut into panels of 64 columns the
matrix is such blocks already, and a pass over a block of tokens costs hardly more than over one.
"""

from __future__ import annotations

from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.typing import Array, Params

WIDTH = 64
"""Columns of a panel: the most that XLA multiplies uncopied."""
ROWS = 48
"""Rows from which on the plain matrix is as fast."""


def panelled(params: Params) -> Params:
    """Parameters with each `kernel` [D, C*WIDTH] as `panels` [C, D, WIDTH], which `Dense` reads as well.

    Kernels of other widths stay as they are.
    """

    def arranged(path: tuple[str, ...], leaf: Any) -> tuple[tuple[str, ...], Array]:
        if path[-1] != "kernel" or leaf.ndim != 2 or leaf.shape[1] % WIDTH:
            return path, leaf
        return (*path[:-1], "panels"), leaf.reshape(len(leaf), -1, WIDTH).swapaxes(0, 1)

    return unflatten_dict(dict(arranged(*item) for item in flatten_dict(params).items()))
