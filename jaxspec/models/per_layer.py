"""Give each layer an input of the token's own: per-layer embeddings (Gemma 4's E2B and E4B).

It is the token's embedding for the layer, from a table of all layers, plus a projection of what the
first layer reads, over the root of 2. An image's tokens have the padding token's embeddings.
"""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp

from jaxspec.config import RotaryConfig
from jaxspec.models.layers import ACTIVATIONS, INIT, Dense, Embed, scaled, text_norm
from jaxspec.typing import Array, Float, Int


class PerLayerGate(nn.Module):
    """Add a token's own input to the stream of a layer, through a gate."""

    config: RotaryConfig

    def setup(self) -> None:
        c = self.config
        self.per_layer_input_gate = Dense(c.hidden_size_per_layer_input, bias=False)
        self.per_layer_projection = Dense(c.hidden_size, bias=False)
        self.post_per_layer_input_norm = text_norm(c)

    def __call__(
        self, x: Float[Array, "B T D"], token_input: Float[Array, "B T part"]
    ) -> Float[Array, "B T D"]:
        gate = ACTIVATIONS[self.config.hidden_act](self.per_layer_input_gate(x))
        return x + self.post_per_layer_input_norm(self.per_layer_projection(gate * token_input))


class PerLayerInputs(nn.Module):
    """Make the inputs of all layers, each `part` wide."""

    config: RotaryConfig

    def setup(self) -> None:
        c = self.config
        width = c.num_hidden_layers * c.hidden_size_per_layer_input
        self.embed_tokens_per_layer = Embed(c.vocab_size, width, embedding_init=INIT)
        self.per_layer_model_projection = Dense(width, bias=False)
        self.per_layer_projection_norm = text_norm(c)

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T parts"]:
        """Return the tokens' embeddings for all layers."""
        root = self.config.hidden_size_per_layer_input**0.5
        return scaled(self.embed_tokens_per_layer(tokens), root)

    def __call__(
        self, x: Float[Array, "B T D"], embeds: Float[Array, "B T parts"]
    ) -> tuple[Float[Array, "B T part"], ...]:
        """Return each layer's input.

        Args:
          x: What the first layer reads, with the features of images.
          embeds: What `embed` returns.
        """
        c = self.config
        shape = (*x.shape[:2], c.num_hidden_layers, c.hidden_size_per_layer_input)
        projected = self.per_layer_model_projection(x) * c.hidden_size**-0.5
        projected = self.per_layer_projection_norm(projected.reshape(shape))
        return jnp.unstack((projected + embeds.reshape(shape)) * 2**-0.5, axis=2)
