"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: tower -> projector -> merge -> decoder."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.config import LlavaConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.inputs import Pool, in_order, merge
from jaxspec.models.layers import INIT, dense
from jaxspec.models.vision import VisionTower
from jaxspec.typing import Array, Float, Int


class Projector(nn.Module):
    """linear_2(gelu(linear_1(x))): tower width to decoder width."""

    config: LlavaConfig

    @nn.compact
    def __call__(self, features: Float[Array, "... P E"]) -> Float[Array, "... P D"]:
        c = self.config
        width, bias = c.text_config.hidden_size, c.multimodal_projector_bias
        h = nn.gelu(dense(width, bias, name="linear_1")(features), approximate=False)
        return dense(width, bias, name="linear_2")(h)


class Llava(nn.Module):
    """Hugging Face's `LlavaForConditionalGeneration`."""

    config: LlavaConfig

    def setup(self) -> None:
        self.vision_tower = VisionTower(self.config.vision_config)
        self.multi_modal_projector = Projector(self.config)
        self.language_model = CausalLM(self.config.text_config)

    def encode(self, pixels: Float[Array, "B U Y X 3"]) -> Float[Array, "B U P E"]:
        """Tower features of every unit: the configured layer, without the class token unless `full`."""
        batch, units = pixels.shape[:2]
        states, _ = self.vision_tower(pixels.reshape(batch * units, *pixels.shape[2:]))
        features = states[self.config.vision_feature_layer]
        if self.config.vision_feature_select_strategy == "default":
            features = features[:, 1:]
        return features.reshape(batch, units, *features.shape[1:])

    def project(self, features: Float[Array, "B U P E"], pool: Pool | None = None) -> Float[Array, "B features D"]:
        """The table of feature rows that prompt slots may show, each unit's pooled for view P."""
        averages = None if pool is None else pool.matrix(features.shape[2]).astype(features.dtype)
        if pool is not None and not pool.after_projector:
            features = jnp.einsum("qP,BUPE->BUqE", averages, features)
        projected = self.multi_modal_projector(features)
        if pool is not None and pool.after_projector:
            projected = jnp.einsum("qP,BUPD->BUqD", averages, projected)
        return projected.reshape(projected.shape[0], -1, projected.shape[-1])

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        pixels: Float[Array, "B U Y X 3"],
        sources: Int[Array, "B L blended"] | None = None,
        blend: Float[Array, "B L blended"] | None = None,
    ) -> Float[Array, "B L V"]:
        """Logits of a whole right-padded batch, no cache. Without `sources` the table's rows are shown in order."""
        if sources is None:
            sources = in_order(tokens == self.config.image_token_index)
        embeds = merge(self.language_model.embed(tokens), self.project(self.encode(pixels)), sources, blend)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.language_model.logits(self.language_model.hidden(embeds, positions)[0])


class LlavaNext(Llava):
    """Hugging Face's `LlavaNextForConditionalGeneration` and `LlavaOnevisionForConditionalGeneration`.

    The two differ in what the prompt shows of the table (`models/anyres.py`), not in what is computed here.
    """

    def setup(self) -> None:
        super().setup()
        self.image_newline = self.param("image_newline", INIT, (self.config.text_config.hidden_size,))

    def project(self, features: Float[Array, "B U P E"], pool: Pool | None = None) -> Float[Array, "B features D"]:
        """The table of feature rows, with the end-of-line embedding as its last."""
        table = super().project(features, pool)
        newline = jnp.broadcast_to(self.image_newline.astype(table.dtype), (table.shape[0], 1, table.shape[2]))
        return jnp.concatenate([table, newline], axis=1)
