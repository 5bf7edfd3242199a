"""Operations of a computation, counted on its jaxpr, and what devices can do of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

PEAK = (
    ("TPU v6", 918e12),
    ("TPU v5p", 459e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5", 459e12),
    ("TPU v4", 275e12),
    ("TPU v3", 61.5e12),
    ("B200", 2250e12),
    ("H200", 989e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("T4", 65e12),
)
"""Part of a `device_kind` -> dense bfloat16 (T4: float16) operations a second of one JAX device, by its vendor."""


def peak_flops(device: Any) -> float | None:
    """What a device can do at most; None for kinds not in the table."""
    return next((peak for name, peak in PEAK if name in device.device_kind), None)


def matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Multiplications and additions of the matrix products and convolutions that the outputs depend on.

    Loops count all their turns; of a branch the dearer side counts. What jit leaves out, as unread layers of a
    tower are, counts nothing. `args` may be mere shapes.
    """
    return _flops(jax.make_jaxpr(function)(*args).jaxpr)


def _flops(jaxpr: Jaxpr) -> float:
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    total = 0.0
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
            total += _eqn_flops(eqn)
    return total


def _eqn_flops(eqn: Any) -> float:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2.0 * eqn.outvars[0].aval.size * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, params["dimension_numbers"]
        return 2.0 * eqn.outvars[0].aval.size * kernel.size / kernel.shape[numbers.rhs_spec[0]]
    inner = [_flops(part) for value in params.values() for part in _jaxprs(value)]
    if name == "cond":
        return max(inner, default=0.0)
    return (params["length"] if name == "scan" else 1) * sum(inner)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _jaxprs(part)
