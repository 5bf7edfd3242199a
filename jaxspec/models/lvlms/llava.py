"""Define LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: tower -> projector -> merge -> decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from jaxspec.config import LlavaConfig
from jaxspec.errors import InputError
from jaxspec.models.decoder import CausalLM, Lvlm
from jaxspec.models.inputs import MEND, ImageInputs, Pool, Shapes, Size, Slots
from jaxspec.models.layers import INIT, MLP
from jaxspec.models.lvlms.vision import VisionTower
from jaxspec.typing import Array, Features, Float


class Llava(Lvlm):
    """Compute Hugging Face's `LlavaForConditionalGeneration`."""

    config: LlavaConfig

    def setup(self) -> None:
        self.vision_tower = VisionTower(self.config.vision_config)
        self.multi_modal_projector = self.projector()
        self.language_model = CausalLM(self.config.text_config)

    @nn.nowrap
    def projector(self) -> nn.Module:
        """Return what maps tower width to decoder width."""
        c = self.config
        width, names = c.text_config.hidden_size, ("linear_1", "linear_2")
        return MLP(width, width, names=names, bias=c.multimodal_projector_bias)

    def encode(self, pixels: Float[Array, "B U Y X 3"]) -> Features:
        """Return tower features of every tile, from the configured layer.

        The strategy `full` keeps the class token.
        """
        batch, tiles = pixels.shape[:2]
        states, _ = self.vision_tower(pixels.reshape(batch * tiles, *pixels.shape[2:]))
        features = states[self.config.vision_feature_layer]
        if self.config.vision_feature_select_strategy == "default":
            features = features[:, 1:]
        return features.reshape(batch, tiles, *features.shape[1:])

    def project(self, features: Features, pool: Pool | None = None) -> Float[Array, "B features D"]:
        """Return the table of feature rows for prompt slots, pooled by tile for view P."""
        if pool is not None:
            averages = pool.matrix(features.shape[2]).astype(features.dtype)
            features = jnp.einsum("qP,BUPE->BUqE", averages, features)
        projected = self.multi_modal_projector(features)
        return projected.reshape(projected.shape[0], -1, projected.shape[-1])


class LlavaNext(Llava):
    """Compute Hugging Face's `LlavaNextForConditionalGeneration`, and LLaVA-OneVision's class.

    The two differ in the rows of the table that a prompt shows (`models/anyres.py`), not here.
    """

    def setup(self) -> None:
        super().setup()
        self.image_newline = self.param(
            "image_newline", INIT, (self.config.text_config.hidden_size,)
        )

    def project(self, features: Features, pool: Pool | None = None) -> Float[Array, "B features D"]:
        """Return the table of feature rows, with the end-of-line embedding as its last."""
        table = super().project(features, pool)
        newline = jnp.broadcast_to(
            self.image_newline.astype(table.dtype), (table.shape[0], 1, table.shape[2])
        )
        return jnp.concatenate([table, newline], axis=1)


class LlavaImages(ImageInputs):
    """Read LLaVA-1.5's images: each is one tile, scaled (and cropped) to the tower's size."""

    @staticmethod
    def shapes(config: Any) -> Shapes:
        vision = config.vision_config
        return {"pixels": ((vision.image_size, vision.image_size, vision.num_channels), np.float32)}

    def tiles(self, size: Size, images: int = 1) -> int:
        return 1

    def slots(self, size: Size, pool: Pool | None, images: int = 1) -> Slots:
        count = self.config.image_tokens if pool is None else pool.count(self.config.image_tokens)
        return Slots(np.arange(count, dtype=np.int32)[:, None], count)

    def read(self, images: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the tiles of each image; raise InputError if the processor makes others."""
        out, side = [], self.config.vision_config.image_size
        for image, tiles in zip(images, self._processed(images), strict=True):
            if (shape := tiles.shape[1:]) != (3, side, side):
                read = f"the tower reads [3, {side}, {side}]; {MEND}"
                raise InputError(f"image processor: gives {list(shape)} and {read}")
            expected = self.tiles((image.height, image.width), len(images))
            if len(tiles) != expected:
                raise InputError(
                    f"image processor: makes {len(tiles)} tiles of {image.height}x{image.width} "
                    f"pixels, but config.json asks for {expected}; {MEND}"
                )
            out.append({"pixels": tiles.transpose(0, 2, 3, 1)})
        return out

    def _processed(self, images: Sequence[Any]) -> list[np.ndarray]:
        """Return the tiles [U, 3, Y, X] of each image."""
        out = self.processor(images=list(images), return_tensors="np")
        return list(np.asarray(out["pixel_values"])[:, None])
