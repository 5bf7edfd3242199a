"""Draft with a ViSpec head, which reads a vector of the last image next to each hidden state."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.config import VispecConfig
from jaxspec.decoding.sources.source import Prefilled
from jaxspec.decoding.sources.states import StateHeadSource
from jaxspec.typing import Array, Float, Params


class ImageCache(KVCache):
    """Hold a head's cache with the vector of each row's last image."""

    image: Float[Array, "B one D"] | None = None


class Vispec(StateHeadSource):
    """Read the target's last hidden state, and compressed images."""

    config: VispecConfig

    name = "vispec"

    def prefill(self, prefilled: Prefilled, inputs: Any) -> KVCache:
        cache = super().prefill(prefilled, inputs)
        rows, images = prefilled.batch.prompt, self._images(prefilled)
        if images is None:
            shape = (*rows.tokens.shape[:1], 1, self.config.text_config.hidden_size)
            image = jnp.zeros(shape, cache.k[0].dtype)
        else:
            image = self.run(prefilled.params, "last_image", images, rows.length)
        return ImageCache(**{f.name: getattr(cache, f.name) for f in fields(cache)}, image=image)

    def fused(self, params: Params, cache: KVCache, embeds: Array, before: Array) -> Array:
        assert isinstance(cache, ImageCache)
        return self.run(params, "fuse", embeds, before, cache.image)
