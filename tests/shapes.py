"""Check the shapes of arrays that annotations in jaxspec/ name, in each call that a test makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any, get_args

import jax
import numpy as np
from beartype import beartype
from jaxtyping import AbstractArray, install_import_hook

ARRAYS = jax.Array | np.ndarray | np.generic
"""Arrays that a function of jax arrays takes."""


def install() -> None:
    """Check each function and dataclass of jaxspec/ that is imported from now on."""
    install_import_hook("jaxspec", f"{__name__}.check")


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the shapes that a function's annotations name; pyright checks its other types.

    For `f(x: Float[Array, "B T D"], at: Places)` the array has three dimensions, and `at` may be
    anything. The fields of a dataclass are checked too.
    """
    arrays = {name: _arrays(hint) for name, hint in function.__annotations__.items()}
    if not any(arrays.values()):
        return function
    for array in chain(*arrays.values()):
        if array.array_type is jax.Array:
            array.array_type = ARRAYS
    function.__annotations__ = {
        name: hint if arrays[name] else Any for name, hint in function.__annotations__.items()
    }
    checked = beartype(function)
    if function.__name__ != "__init__":
        return checked

    @functools.wraps(checked)
    def check_fields(*values: Any, **fields: Any) -> None:
        if not _jax_calls():
            checked(*values, **fields)

    return check_fields


def _arrays(hint: Any) -> list[Any]:
    """Return the arrays of a type: `Float[Array, "B"]` of `tuple[Float[Array, "B"], int]`."""
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return [hint]
    return [array for part in get_args(hint) for array in _arrays(part)]


def _jax_calls() -> bool:
    """Return whether JAX rebuilds the dataclass of leaves that it mapped or left out."""
    frame = sys._getframe()
    while frame.f_globals["__name__"] in (__name__, "jaxtyping._decorator"):
        assert frame.f_back
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("jax.")
