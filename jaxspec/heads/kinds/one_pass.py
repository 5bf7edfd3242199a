"""Define a KV head that drafts a block in one pass, as DFlash, P-EAGLE and DSpark do.

Mask embeddings stand for the tokens that it does not know. With gamma = 3 and the newest token x,
it reads x m1 m2, and scores what follows each of them. So it reads its layers and the output matrix
once a block, and a token's scores depend on the tokens drafted before it only by `correction`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxspec.heads.kinds.kv_head import ABOUT, OPTIONS, KVHead, KVHeadKind
from jaxspec.heads.kinds.kv_head import KIND as KV_HEAD
from jaxspec.heads.kinds.kv_head.config import KVHeadConfig
from jaxspec.models.layers import INIT, times, wide
from jaxspec.typing import Array, Float, Int


@dataclass(frozen=True)
class OnePassConfig(KVHeadConfig):
    """Describe a head whose one pass reads J positions: the newest token, and learned masks.

    Each position sees those before it. All read the hidden state of the newest token, if any.
    """

    markov: int = 0  # pyright: ignore
    """r: rank of a Markov head as in DSpark: it adds a term for the token before to a token's
    score. Tokens are drawn from the softmax of the sum, and verified against it. 0: no Markov
    head."""

    title: ClassVar = "one-pass KV head"
    name: ClassVar = "one_pass"
    free: ClassVar = ("target_name",)

    @property
    def keeps_vocabulary(self) -> bool:
        return self.markov > 0

    def options(self) -> dict[str, Any]:
        """Return the fields by name, and the entry that names the kind."""
        options = super().options() | {"parallel": True}
        if not self.markov:
            del options["markov"]
        return options


class OnePassHead(KVHead):
    """Hold a head's parameters, and compute its blocks."""

    config: OnePassConfig

    in_one_pass: ClassVar[bool] = True

    def setup(self) -> None:
        super().setup()
        c, text = self.config, self.config.text_config
        self.masks = self.param("masks", INIT, (c.gamma - 1, text.hidden_size))
        if c.markov:
            shape = (c.markov, text.scored_tokens)
            self.markov_in = self.param("markov_in", INIT, (text.hidden_size, c.markov))
            self.markov_out = self.param("markov_out", nn.initializers.zeros, shape)

    def stand_ins(self, mask: Float[Array, " D"] | None, count: int) -> Float[Array, "count D"]:
        return self.masks[:count]

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens with these embeddings add to the scores of their followers."""
        exact = embeds.astype(wide(embeds.dtype))
        # Embeddings of any scale learn at the same rate.
        square = jnp.mean(exact * exact, axis=-1, keepdims=True)
        normed = exact * jax.lax.rsqrt(square + self.config.text_config.rms_norm_eps)
        low = times(normed.astype(embeds.dtype), self.markov_in.T)
        return times(low, self.markov_out.T, exact.dtype).astype(jnp.float32)


KIND = KVHeadKind(
    config=OnePassConfig,
    module=OnePassHead,
    titles=("one-pass",),
    about=f"{ABOUT}, a block in one pass",
    options=(*OPTIONS, "markov"),
    axes=(*KV_HEAD.axes, (r"masks|markov_(?:in|out)", ())),
)
