"""Hold the matrices of the layers of a decoder or a head in int8, which takes half the bytes.

A matrix W [out, in] is held as a `weight` of int8 and a `scale` [out] of float32, one for each
output channel: W ~ weight * scale, with at most half a scale between the two. A product is
`(x @ weight.T) * scale` with the weight cast to x's dtype, which XLA does in the product on TPUs.
Embeddings, norms, biases, the output matrix, projectors and towers keep their dtype.
"""

from __future__ import annotations

import re
from typing import Literal

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxspec.typing import Array, Float, Params

Weights = Literal["int8"]
_MATRIX = re.compile(
    r"((?:language_model/)?(?:model/)?(?:decoder/)?layers_\d+/(?:.+/)?(?!\w*norm/)\w+/)weight"
)


def scale_path(path: str) -> str | None:
    """Return the path of a matrix's scales; None for a parameter that int8 leaves as it is."""
    match = _MATRIX.fullmatch(path)
    return match and match[1] + "scale"


@jax.jit
def quantise(matrix: Float[Array, "out D"]) -> tuple[Array, Float[Array, " out"]]:
    """Return a matrix in int8, and its scales.

    >>> weight, scale = quantise(jnp.asarray([[12.7, -0.06], [1.0, 0.0]]))
    >>> weight.tolist(), scale.round(4).tolist()
    ([[127, -1], [127, 0]], [0.1, 0.0079])
    """
    exact = matrix.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=1)
    scale = jnp.where(largest > 0, largest, 1) / 127
    return jnp.round(exact / scale[:, None]).astype(jnp.int8), scale


def int8_params(params: Params) -> Params:
    """Return the parameters with the matrices of the decoder's layers in int8."""
    out = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        out[path] = leaf
        if (scale := scale_path(path)) is not None:
            out[path], out[scale] = quantise(leaf)
    return unflatten_dict(out, sep="/")
