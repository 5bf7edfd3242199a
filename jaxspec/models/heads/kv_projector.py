"""The KV projector: an image's keys and values, n slots, become k."""

from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import KVHeadConfig
from jaxspec.models.inputs import Pool
from jaxspec.models.layers import INIT, wide
from jaxspec.typing import Array, Bool, Float


class KVProjector(nn.Module):
    """Pool the keys and values of images from n slots to k."""

    config: KVHeadConfig

    @nn.compact
    def __call__(
        self,
        k: Float[Array, "B I tokens K H"],
        v: Float[Array, "B I tokens K H"],
        there: Bool[Array, "B I tokens"],
    ) -> tuple[Float[Array, "B I slots K H"], Float[Array, "B I slots K H"]]:
        c = self.config
        if c.pooling == "attention":
            shape = (c.image_slots, *k.shape[-2:])
            queries = self.param("queries", INIT, shape)
            scores = jnp.einsum(
                "cKH,BInKH->BIKcn", queries, k, preferred_element_type=wide(k.dtype)
            )
            # Finite, because all slots of an absent image are masked.
            scores = jnp.where(there[:, :, None, None], scores * k.shape[-1] ** -0.5, -1e30)
            weights = jax.nn.softmax(scores, axis=-1).astype(k.dtype)
            return jnp.einsum("BIKcn,BInKH->BIcKH", weights, k), jnp.einsum(
                "BIKcn,BInKH->BIcKH", weights, v
            )

        def pooled(name: str, x: Array) -> Array:
            matrix = self.param(name, lambda _: jnp.asarray(average_pooling(c)))
            out = jnp.einsum(
                "cn,BInKH->BIcKH", matrix.astype(x.dtype), x, preferred_element_type=wide(x.dtype)
            )
            return out.astype(x.dtype)

        return pooled("k", k), pooled("v", v)


def average_pooling(config: KVHeadConfig) -> np.ndarray:
    """Return float32 [k, n] of averages over squares of the image, or over runs.

    Squares need square numbers n and k.
    """
    square = math.isqrt(config.image_tokens) ** 2 == config.image_tokens
    square &= math.isqrt(config.image_slots) ** 2 == config.image_slots
    return Pool(config.image_slots, "avg2d" if square else "avg1d").matrix(config.image_tokens)
