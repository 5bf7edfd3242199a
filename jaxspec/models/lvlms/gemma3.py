"""Define Gemma 3 with images: SigLIP's tower -> averages over squares -> norm and matrix ->
decoder.

The tokens of an image read one another, see `Places.reach`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np

from jaxspec.config import Gemma3Config
from jaxspec.errors import InputError
from jaxspec.models.layers import INIT, RMSNorm, times, wide
from jaxspec.models.lvlms.llava import Llava, LlavaImages
from jaxspec.typing import Array, Features, Float


class Projector(nn.Module):
    """Norm features and map them to the decoder's width."""

    config: Gemma3Config

    @nn.compact
    def __call__(self, features: Float[Array, "... P E"]) -> Float[Array, "... P D"]:
        vision, text = self.config.vision_config, self.config.text_config
        norm = RMSNorm(vision.layer_norm_eps, offset=1, name="mm_soft_emb_norm")
        shape = vision.hidden_size, text.hidden_size
        return times(norm(features), self.param("mm_input_projection_weight", INIT, shape).T)


class Gemma3(Llava):
    """Compute Hugging Face's `Gemma3ForConditionalGeneration`."""

    config: Gemma3Config

    @nn.nowrap
    def projector(self) -> nn.Module:
        return Projector(self.config)

    def encode(self, pixels: Float[Array, "B U Y X 3"]) -> Features:
        """Return each image's normed features, averaged over squares of patches."""
        batch, tiles = pixels.shape[:2]
        _, features = self.vision_tower(pixels.reshape(batch * tiles, *pixels.shape[2:]))
        side = math.isqrt(self.config.image_tokens)
        edge = self.config.vision_config.side // side
        squares = features.reshape(batch, tiles, side, edge, side, edge, features.shape[-1])
        means = squares.astype(wide(features.dtype)).mean((3, 5)).astype(features.dtype)
        return means.reshape(batch, tiles, -1, features.shape[-1])


class Gemma3Images(LlavaImages):
    """Read Gemma 3's images: each is one tile, scaled to the tower's size."""

    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        if self.processor.do_pan_and_scan:
            raise InputError(
                "image processor: do_pan_and_scan, which adds crops of an image, is not "
                "supported; set it to false in preprocessor_config.json"
            )
        return super().read(images)
