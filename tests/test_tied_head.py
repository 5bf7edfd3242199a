"""A tied head's scores are the product with every embedding, however many rows there are, and so is
their gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.layers import FEW_ROWS, Embed

TABLE = np.random.default_rng(0).normal(size=(40, 8))


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (1, FEW_ROWS + 1)])
def test_scores_and_their_gradient(shape: tuple[int, int]) -> None:
    query, weight = (np.random.default_rng(1).normal(size=(*shape, width)) for width in (8, 40))
    params = {"params": {"embedding": jnp.asarray(TABLE, jnp.float32)}}

    def weighed(query: jax.Array) -> jax.Array:
        return (Embed(40, 8).apply(params, query, method="attend") * weight).sum()

    scores = jax.jit(lambda query: Embed(40, 8).apply(params, query, method="attend"))(
        jnp.asarray(query, jnp.float32)
    )
    assert scores.shape == (*shape, 40)
    np.testing.assert_allclose(scores, query @ TABLE.T, rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(weighed))(jnp.asarray(query, jnp.float32))
    np.testing.assert_allclose(gradient, weight @ TABLE, rtol=1e-5, atol=1e-5)
