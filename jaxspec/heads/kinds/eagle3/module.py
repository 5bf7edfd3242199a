"""Hold an EAGLE-3 head's parameters, and compute its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.heads.head import in_float32
from jaxspec.heads.kinds.eagle3.config import Eagle3Config, EagleConfig, GemmaEagleConfig
from jaxspec.heads.states import StateHead
from jaxspec.models.decoder import Layer
from jaxspec.models.layers import INIT, Dense, RMSNorm, text_norm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Int, Params


class FusedLayer(Layer):
    """Run EAGLE-3's layer, whose attention reads an embedding and a hidden state side by side."""

    config: EagleConfig | GemmaEagleConfig

    def setup(self) -> None:
        super().setup()
        self.hidden_norm = text_norm(self.config)

    def __call__(
        self, x: Float[Array, "B T both"], at: Any, cache: Any, more: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        normed, stream = self._normed(x)
        out, cache = self.self_attn(normed, at, cache)
        return self.finish(stream, out), cache

    def keys_values(self, x: Float[Array, "B T both"], rotary: Array) -> tuple[Array, Array]:
        return self.self_attn.keys_values(self._normed(x)[0], rotary)

    def _normed(self, x: Array) -> tuple[Array, Array]:
        """Return the attention's input, and the stream that its output is added to."""
        embeds, hidden = jnp.split(x, 2, axis=-1)
        normed = self.hidden_norm(hidden)
        stream = normed if self.config.norm_before_residual else hidden
        return jnp.concatenate([self.input_layernorm(embeds), normed], axis=-1), stream


class Eagle3Head(StateHead):
    """Hold an EAGLE-3 head's `fc`, norms and layer."""

    config: Eagle3Config

    layer: ClassVar[Callable[..., Any]] = FusedLayer

    def setup(self) -> None:
        super().setup()
        text = self.config.text_config
        self.norm = text_norm(text)
        self.fc = Dense(text.hidden_size, bias=False)
        if text.norm_before_fc:
            self.input_norm = RMSNorm(text.rms_norm_eps)
        if text.fc_norm:
            self.fc_norm = [RMSNorm(text.rms_norm_eps) for _ in range(self.config.states)]

    def combine(self, states: Float[Array, "... fused"]) -> Float[Array, "... D"]:
        """Return `fc` of the states, normed together (`norm_before_fc`), one by one
        (`fc_norm`), or as they are."""
        text = self.config.text_config
        if text.norm_before_fc:
            states = self.input_norm(states)
        if text.fc_norm:
            parts = jnp.split(states, len(self.fc_norm), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = jnp.concatenate(normed, axis=-1)
        return self.fc(states)

    def fuse(
        self,
        embeds: Float[Array, "... D"],
        before: Float[Array, "... D"],
        context: Any,
        newest: Int[Array, "B roots"],
    ) -> Float[Array, "... both"]:
        return jnp.concatenate([embeds, before], axis=-1)

    def closed(self, x: Float[Array, "... D"]) -> tuple[Float[Array, "... D"], Array]:
        normed = self.norm(x)
        return normed, normed if self.config.text_config.norm_output else x

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix."""
        text = self.config.text_config
        params = dict(super().initial(target, key))
        if text.own_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if target is None:
            return params
        copied: dict[str, Any] = {"norm": target["model"]["norm"]}
        if text.own_output:
            vocabulary = text.draft_vocabulary or tuple(range(text.vocab_size))
            copied["lm_head"] = {"weight": output_rows(target, vocabulary)}
        return {**params, **in_float32(copied)}
