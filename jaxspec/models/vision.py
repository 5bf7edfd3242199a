"""The CLIP vision tower, any resolution and patch size."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.config import VisionConfig
from jaxspec.models.layers import INIT, LayerNorm, dense
from jaxspec.typing import Array, Float


class Embeddings(nn.Module):
    config: VisionConfig

    @nn.compact
    def __call__(self, pixels: Float[Array, "B Y X 3"]) -> Float[Array, "B P+1 D"]:
        c = self.config
        patch = (c.patch_size, c.patch_size)
        conv = nn.Conv(c.hidden_size, patch, patch, "VALID", use_bias=False, kernel_init=INIT, name="patch_embedding")
        patches = conv(pixels).reshape(pixels.shape[0], -1, c.hidden_size)
        cls = self.param("class_embedding", INIT, (c.hidden_size,)).astype(patches.dtype)
        cls = jnp.broadcast_to(cls, (pixels.shape[0], 1, c.hidden_size))
        positions = nn.Embed(c.side**2 + 1, c.hidden_size, embedding_init=INIT, name="position_embedding")
        return jnp.concatenate([cls, patches], axis=1) + positions(jnp.arange(c.side**2 + 1))


class EncoderLayer(nn.Module):
    """Pre-norm transformer layer with full attention."""

    config: VisionConfig

    def setup(self) -> None:
        c = self.config
        self.self_attn = SelfAttention(c)
        self.layer_norm1 = LayerNorm(c.layer_norm_eps)
        self.layer_norm2 = LayerNorm(c.layer_norm_eps)
        self.mlp = MLP(c)

    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SelfAttention(nn.Module):
    config: VisionConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B P D"]) -> Float[Array, "B P D"]:
        c = self.config

        def heads(name: str) -> Array:
            proj = dense(c.hidden_size, bias=True, name=name)
            return proj(x).reshape(*x.shape[:2], c.num_attention_heads, -1)

        q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
        scores = jnp.einsum("BPNH,BQNH->BNPQ", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        out = jnp.einsum("BNPQ,BQNH->BPNH", probs, v).reshape(x.shape)
        return dense(c.hidden_size, bias=True, name="out_proj")(out)


class MLP(nn.Module):
    config: VisionConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        h = dense(c.intermediate_size, bias=True, name="fc1")(x)
        h = h * nn.sigmoid(1.702 * h) if c.hidden_act == "quick_gelu" else nn.gelu(h, approximate=False)
        return dense(c.hidden_size, bias=True, name="fc2")(h)


class Encoder(nn.Module):
    config: VisionConfig

    def setup(self) -> None:
        self.layers = [EncoderLayer(self.config) for _ in range(self.config.num_hidden_layers)]

    def __call__(self, x: Array) -> tuple[Array, ...]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]))
        return tuple(states)


class VisionTransformer(nn.Module):
    config: VisionConfig

    def setup(self) -> None:
        self.embeddings = Embeddings(self.config)
        self.pre_layrnorm = LayerNorm(self.config.layer_norm_eps)  # the checkpoints' own spelling
        self.encoder = Encoder(self.config)
        self.post_layernorm = LayerNorm(self.config.layer_norm_eps)

    def __call__(self, pixels: Array) -> tuple[tuple[Array, ...], Array]:
        states = self.encoder(self.pre_layrnorm(self.embeddings(pixels)))
        return states, self.post_layernorm(states[-1][:, 0])


class VisionTower(nn.Module):
    """Hugging Face's `CLIPVisionModel`."""

    config: VisionConfig

    def setup(self) -> None:
        self.vision_model = VisionTransformer(self.config)

    def __call__(
        self, pixels: Float[Array, "B Y X 3"]
    ) -> tuple[tuple[Float[Array, "B P+1 D"], ...], Float[Array, "B D"]]:
        """All hidden states (the embeddings first) and the pooled output.

        Under `jit` the layers past the one that a caller reads are never computed.
        """
        return self.vision_model(pixels)
