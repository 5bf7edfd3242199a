"""Tokens per block, foretold from one teacher-forced pass: no engine, no decoding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.typing import Array, Bool, Float, Int


def count_blocks(
    agree: Bool[Array, "B L"], mask: Bool[Array, "B L"], gamma: int
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """(tokens, blocks) that greedy speculative decoding would take to write the masked answers.

    `agree[b, t]` says that the draft, shown the row up to t - 1, would have drafted token t. As long as drafts are
    accepted the draft has seen exactly that row, so that a block is a run of agreements, cut at gamma, and the token
    that the target adds to it. Its sum over rows is exact where the answers are the target's own greedy ones: `tokens
    / blocks` is then `mean_acceptance_length` of the engine, up to near-ties of the draft's logits.

    The first token of every answer comes from prefill and belongs to no block; a last block may be cut short.
    """
    # Tokens whose predecessor is of the same answer.
    drafted = mask & jnp.pad(mask, ((0, 0), (1, 0)))[:, :-1]

    def step(accepted: Array, at: tuple[Array, Array]) -> tuple[Array, Array]:
        right, live = at
        closes = (accepted == gamma) | ~right
        opens = live & (accepted == 0)
        return jnp.where(live & ~closes, accepted + 1, 0), opens

    none = jnp.zeros(agree.shape[0], jnp.int32)
    _, opens = jax.lax.scan(step, none, (agree.T, drafted.T))
    return drafted.sum(), opens.sum()


def agreement(logits: Float[Array, "B L V"], tokens: Int[Array, "B L"]) -> Bool[Array, "B L"]:
    """Whether a draft with these logits would have drafted token t, greedily, after the row up to t - 1."""
    return jnp.pad(logits[:, :-1].argmax(-1) == tokens[:, 1:], ((0, 0), (1, 0)))
