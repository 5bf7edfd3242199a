"""LLaVA-1.5: tower -> projector -> merge -> decoder."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.config import LlavaConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.layers import dense
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

    def encode(self, pixels: Float[Array, "B I Y X 3"]) -> Float[Array, "B I P E"]:
        """Tower features of every image: the configured layer, without the class token unless `full`."""
        batch, images = pixels.shape[:2]
        states, _ = self.vision_tower(pixels.reshape(batch * images, *pixels.shape[2:]))
        features = states[self.config.vision_feature_layer]
        if self.config.vision_feature_select_strategy == "default":
            features = features[:, 1:]
        return features.reshape(batch, images, *features.shape[1:])

    def embed(self, tokens: Int[Array, "B L"], features: Float[Array, "B I P E"] | None) -> Float[Array, "B L D"]:
        """Prompt embeddings: each row's image placeholders replaced, in order, by its projected features."""
        embeds = self.language_model.embed(tokens)
        if features is None:
            return embeds
        projected = self.multi_modal_projector(features)
        projected = projected.reshape(tokens.shape[0], -1, embeds.shape[-1]).astype(embeds.dtype)
        here = tokens == self.config.image_token_index
        nth = jnp.clip(jnp.cumsum(here, axis=1) - 1, 0, projected.shape[1] - 1)
        return jnp.where(here[..., None], jnp.take_along_axis(projected, nth[..., None], axis=1), embeds)

    def __call__(self, tokens: Int[Array, "B L"], pixels: Float[Array, "B I Y X 3"]) -> Float[Array, "B L V"]:
        """Logits of a whole right-padded batch, no cache."""
        embeds = self.embed(tokens, self.encode(pixels))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.language_model.logits(self.language_model.hidden(embeds, positions)[0])
