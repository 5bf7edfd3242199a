"""Hold the matrices of a decoder's layers in int8, which takes half the bytes.

A matrix w [in, out] is held as a `kernel` of int8 and a `scale` [out] of float32, one for each
output channel: w ~ kernel * scale, with at most half a scale between the two. A product is
`(x @ kernel) * scale` with the kernel cast to x's dtype, which XLA does in the product on TPUs.
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
_MATRIX = re.compile(r"((?:language_model/)?model/(?:decoder/)?layers_\d+/.+/)kernel")


def scale_path(path: str) -> str | None:
    """Return the path of a matrix's scales; None for a parameter that int8 leaves as it is."""
    match = _MATRIX.fullmatch(path)
    return match and match[1] + "scale"


@jax.jit
def quantise(kernel: Float[Array, "D out"]) -> tuple[Array, Float[Array, " out"]]:
    """Return a matrix in int8, and its scales.

    >>> kernel, scale = quantise(jnp.asarray([[12.7, 1.0], [-0.06, 0.0]]))
    >>> kernel.tolist(), scale.round(4).tolist()
    ([[127, 127], [-1, 0]], [0.1, 0.0079])
    """
    exact = kernel.astype(jnp.float32)
    largest = jnp.max(jnp.abs(exact), axis=0)
    scale = jnp.where(largest > 0, largest, 1) / 127
    return jnp.round(exact / scale).astype(jnp.int8), scale


def int8_params(params: Params) -> Params:
    """Return the parameters with the matrices of the decoder's layers in int8."""
    out = {}
    for path, leaf in flatten_dict(params, sep="/").items():
        out[path] = leaf
        if (scale := scale_path(path)) is not None:
            out[path], out[scale] = quantise(leaf)
    return unflatten_dict(out, sep="/")
