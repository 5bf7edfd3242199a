"""Record the origin of each new token, for figures and pages of an evaluation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import longer
from jaxspec.typing import Array, Bool, Float, Int
from jaxspec.verification import Draft, Verdict


class Trace(struct.PyTreeNode):
    """Hold the origin of each new token. Entries past a row's `count` are undefined."""

    place: Int[Array, "B C"]
    """Place of the token in its block, from 0, if it was drafted; -1: the target wrote it."""
    weights: Float[Array, "B C R"]
    """Weights of the views in its block."""
    agree: Bool[Array, "B C R"]
    """Whether it was the view's likeliest token."""
    asked: Bool[Array, "B C"]
    """Whether the views gave a distribution: not for the prefill token or a bonus token."""

    def grown(self, slots: int) -> Trace:
        """Return the trace with `slots` more places for new tokens."""
        return jax.tree.map(lambda leaf: longer(leaf, 1, slots), self)


def init_trace(weights: Float[Array, "B R"], slots: int) -> Trace:
    """Return the trace after prefill, whose token the target wrote."""
    batch, views = weights.shape
    return Trace(
        place=jnp.full((batch, slots), -1, jnp.int32),
        weights=jnp.tile(weights.astype(jnp.float32)[:, None], (1, slots, 1)),
        agree=jnp.zeros((batch, slots, views), bool),
        asked=jnp.zeros((batch, slots), bool),
    )


def extend_trace(
    trace: Trace,
    count: Int[Array, " B"],
    tokens: Int[Array, "B C"],
    draft: Draft,
    verdict: Verdict,
    weights: Float[Array, "B R"],
    asked: Bool[Array, "B J"],
) -> Trace:
    """Return the trace extended by one block.

    Args:
      count: Number of tokens before the block.
      tokens: Tokens after the block.
      asked: Whether a place of the block was verified and the draft gave its distribution.
    """
    places = jnp.arange(draft.tokens.shape[1] + 1)
    slots = count[:, None] + places
    rows = jnp.arange(count.shape[0])[:, None]
    best = jnp.moveaxis(jnp.argmax(draft.view_probs, axis=-1), 0, -1)
    written = jnp.take_along_axis(tokens, jnp.minimum(slots[:, :-1], tokens.shape[1] - 1), axis=1)
    agree = best == written[..., None]
    return Trace(
        place=trace.place.at[rows, slots].set(
            jnp.where(places < verdict.count[:, None], places, -1), mode="drop"
        ),
        weights=trace.weights.at[rows, slots].set(weights[:, None], mode="drop"),
        agree=trace.agree.at[rows, slots[:, :-1]].set(agree, mode="drop"),
        asked=trace.asked.at[rows, slots].set(jnp.pad(asked, ((0, 0), (0, 1))), mode="drop"),
    )


def trace_record(trace: Trace, row: int, count: int, pieces: list[str]) -> dict[str, list]:
    """Return one row of a trace as lists; `agree` is None where the views gave no distribution."""
    place, weights, agree, asked = (np.asarray(leaf)[row, :count] for leaf in (
        trace.place, trace.weights, trace.agree, trace.asked
    ))  # fmt: skip
    return {
        "pieces": pieces,
        "place": place.tolist(),
        "agree": [views if known else None for views, known in zip(agree.tolist(), asked.tolist())],
        "weights": np.round(weights.astype(float), 4).tolist(),
    }
