from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jaxtyping import TypeCheckError, jaxtyped

from jaxspec.typing import Array, Float
from tests import shapes


@jaxtyped(typechecker=shapes.check)
class Pair(struct.PyTreeNode):
    a: Float[Array, "B T"]
    b: Float[Array, " B"] | None = None


@jaxtyped(typechecker=shapes.check)
def rows(x: Float[Array, "B T"], name: int) -> Float[Array, " B"]:
    return x.sum(0) if name == "columns" else x.sum(1)


def test_arrays_have_the_shapes_of_annotations() -> None:
    x = jnp.ones((2, 3))
    for array in (x, np.ones((2, 3), np.float32)):
        assert rows(array, "rows").shape == (2,)  # pyright: ignore
    for wrong, name in ((x[0], "rows"), (x, "columns"), (x.astype(int), "rows")):
        with pytest.raises(TypeCheckError):
            rows(wrong, name)  # pyright: ignore


def test_fields_have_shapes_except_where_jax_maps_them() -> None:
    pair = Pair(jnp.ones((2, 3)), jnp.ones(2))
    with pytest.raises(TypeCheckError):
        pair.replace(b=jnp.ones(3))
    mapped = jax.vmap(lambda x: Pair(x, x[:, 0]))(jnp.ones((4, 2, 3)))
    assert mapped.a.shape == (4, 2, 3)
    assert jax.tree.map(jnp.shape, pair).a == (2, 3)
