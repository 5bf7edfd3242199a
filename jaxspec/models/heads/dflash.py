"""Compute DFlash's head (Chen et al. 2026, arXiv 2602.06036), which drafts a block in one pass.

Its layers are Qwen3's. They read keys and values of two kinds: of committed tokens, made of the
target's hidden states c = norm(fc(states)), which no layer changes, so that each layer's are made
once a token; and of the block, whose tokens all see each other. With gamma = 2 and the newest token
x, a block is x m m, and the slots of the masks m score their own tokens.

DSpark's slots score the token after them: its block is x m. Its Markov head adds W2 W1[t] to the
scores of the token after t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.config import DFlashConfig
from jaxspec.models.decoder import Layer
from jaxspec.models.heads.anchored import Context, FreeAttention, block_reader
from jaxspec.models.heads.borrowed import drawn, in_float32
from jaxspec.models.heads.reading import Blocks, Reading
from jaxspec.models.layers import INIT, Dense, RMSNorm
from jaxspec.models.vocabulary import output_rows
from jaxspec.typing import Array, Float, Int, Params


class MarkovHead(nn.Module):
    """Return what tokens add to the scores of their followers, by a matrix of low rank."""

    config: DFlashConfig

    def setup(self) -> None:
        c = self.config
        self.markov_w1 = nn.Embed(c.text_config.vocab_size, c.markov, embedding_init=INIT)
        self.markov_w2 = Dense(c.text_config.scored_tokens, bias=False, widens=True)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T words"]:
        return self.markov_w2(self.markov_w1(tokens)).astype(jnp.float32)


class DFlashHead(nn.Module):
    """Hold a head's parameters, and run its training pass."""

    config: DFlashConfig

    def setup(self) -> None:
        text = self.config.text_config
        self.layers = [Layer(text, FreeAttention) for _ in range(text.num_hidden_layers)]
        self.norm, self.hidden_norm = RMSNorm(text.rms_norm_eps), RMSNorm(text.rms_norm_eps)
        self.fc = Dense(text.hidden_size, bias=False)
        if self.config.markov:
            self.markov_head = MarkovHead(self.config)

    def contexts(
        self, states: Float[Array, "B L fused"], slots: Int[Array, "B L"]
    ) -> list[tuple[Float[Array, "B L K H"], Float[Array, "B L K H"]]]:
        """Return each layer's keys and values of committed tokens.

        Args:
          states: The target's hidden states at the tokens.
          slots: The target's slots of the tokens, which are their rotary positions.
        """
        combined = self.hidden_norm(self.fc(states))
        return [layer.self_attn.keys_values(combined, slots) for layer in self.layers]

    def correction(
        self, tokens: Int[Array, "B T"], embeds: Float[Array, "B T D"]
    ) -> Float[Array, "B T words"]:
        """Return what tokens add to the scores of their followers."""
        return self.markov_head(tokens)

    def __call__(
        self,
        newest: Float[Array, "B A D"],
        mask: Float[Array, " D"],
        slots: Int[Array, "B A block"],
        states: Float[Array, "B L fused"],
    ) -> Float[Array, "B A J D"]:
        """Return the final-normed hidden states that score the J tokens after each anchor.

        Args:
          newest: Embeddings of the tokens at the anchors.
          mask: Embedding of the mask token.
          slots: Slots of the blocks' tokens in the target's rows, of which the first is the anchor.
          states: The target's hidden states over whole rows.
        """
        whole = jnp.broadcast_to(jnp.arange(states.shape[1]), states.shape[:2])
        contexts = [Context(k, v, whole) for k, v in self.contexts(states, whole)]
        read = block_reader(self.layers, contexts, slots[..., 0])
        x = jnp.broadcast_to(mask, (*slots.shape, mask.shape[-1])).at[:, :, 0].set(newest)
        return self.norm(read(x, slots))[:, :, slice(not self.config.anchored, None)]

    @nn.nowrap
    def slots(self, slot_images: Sequence[np.ndarray], width: int, images: int) -> None:
        """Return no slots: it reads hidden states instead of keys."""

    @nn.nowrap
    def reading(self, read: Callable[[tuple[int, ...] | None], tuple[Array, KVCache]]) -> Reading:
        """Return what training keeps of a target's pass, see `KVHead.reading`."""
        hidden, cache = read(self.config.target_states)
        assert cache.hidden is not None
        return Reading(hidden, states=cache.hidden[:, 0])

    @nn.nowrap
    def inputs(self, blocks: Blocks, reading: Reading) -> tuple[Any, ...]:
        """Return the arguments of `__call__` for blocks of whole rows."""
        mask = blocks.embed(jnp.full((1, 1), self.config.mask_token))[0, 0]
        block = jnp.arange(self.config.slots_of(blocks.at.shape[-1]))
        return blocks.embeds[:, :, 0], mask, blocks.anchors[..., None] + block, reading.states

    @nn.nowrap
    def initial(self, target: Params | None, key: jax.Array) -> Params:
        """Return initial parameters, float32: random, but the target's norm and output matrix.

        The Markov head adds nothing at first.
        """
        c, text = self.config, self.config.text_config
        embeds, slots = jnp.zeros((1, 1, text.hidden_size)), jnp.zeros((1, 1, 1), jnp.int32)
        states = jnp.zeros((1, 1, len(c.target_layers) * text.hidden_size))
        params = drawn(self, key, embeds, embeds[0, 0], slots, states)
        if c.markov:
            params["markov_head"] = {
                "markov_w1": {"embedding": INIT(key, (text.vocab_size, c.markov), jnp.float32)},
                "markov_w2": {"weight": jnp.zeros((text.scored_tokens, c.markov))},
            }
        if c.has_output:
            shape = (text.hidden_size, text.scored_tokens)
            params["lm_head"] = {"weight": INIT(key, shape, jnp.float32).T}
        if c.own_embedding:
            shape = (text.vocab_size, text.hidden_size)
            params["embed_tokens"] = {"embedding": INIT(key, shape, jnp.float32)}
        if target is None:
            return params
        params |= in_float32({"norm": target["model"]["norm"]})
        if c.has_output:
            tokens = text.draft_vocabulary or tuple(range(text.vocab_size))
            params |= in_float32({"lm_head": {"weight": output_rows(target, tokens)}})
        return params
