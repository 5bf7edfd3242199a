"""Record the log probabilities and the origin of each new token.

Entries past a row's `count` are undefined.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.sampling import largest
from jaxspec.typing import Array, Bool, Float, Int
from jaxspec.verification import Draft, Verdict


class LogProbs(struct.PyTreeNode):
    """Hold natural logarithms at temperature 1, unfiltered."""

    new: Float[Array, "B C"]
    """Log probability of each new token."""
    top: Float[Array, "B C K"]
    """The K largest log probabilities in the place of each new token."""
    top_tokens: Int[Array, "B C K"]
    """Tokens of the K largest log probabilities."""

    @classmethod
    def zeros(cls, batch: int, slots: int, top: int) -> LogProbs:
        new, values = jnp.zeros((batch, slots)), jnp.zeros((batch, slots, top))
        return cls(new, values, values.astype(jnp.int32))

    def extended(
        self, count: Int[Array, " B"], tokens: Int[Array, "B C"], logits: Float[Array, "B T V"]
    ) -> LogProbs:
        """Return the record extended by one block.

        Args:
          count: Number of tokens before the block.
          tokens: Tokens after the block.
          logits: Logits for the token at each place of the block.
        """
        slots = count[:, None] + jnp.arange(logits.shape[1])
        rows = jnp.arange(len(count))[:, None]
        logs = jax.nn.log_softmax(logits.astype(jnp.float32))
        emitted = jnp.take_along_axis(tokens, jnp.minimum(slots, tokens.shape[1] - 1), axis=1)
        new = jnp.take_along_axis(logs, emitted[..., None], axis=-1)[..., 0]
        top, top_tokens = largest(logs, self.top.shape[-1]) if self.top.size else (0.0, 0)
        return LogProbs(
            new=self.new.at[rows, slots].set(new, mode="drop"),
            top=self.top.at[rows, slots].set(top, mode="drop"),
            top_tokens=self.top_tokens.at[rows, slots].set(top_tokens, mode="drop"),
        )

    def of_row(self, row: int, new: slice, top: int) -> dict[str, Any]:
        """Return fields of a `Result` for new tokens of a row, with `top` likeliest of each."""
        leaves = (self.top_tokens, self.top)
        tokens, values = (np.asarray(leaf)[row, new, :top].tolist() for leaf in leaves)
        return {
            "logprobs": tuple(np.asarray(self.new)[row, new].tolist()),
            "top_logprobs": tuple(dict(zip(*pair)) for pair in zip(tokens, values)),
        }


class Trace(struct.PyTreeNode):
    """Hold the origin of each new token, for figures and pages of an evaluation."""

    place: Int[Array, "B C"]
    """Place of a drafted token in its block, from 0; -1 if the target wrote the token."""
    weights: Float[Array, "B C R"]
    """Weights of the views in the token's block."""
    agree: Bool[Array, "B C R"]
    """Whether the token was the view's likeliest one."""
    drafted: Bool[Array, "B C"]
    """Whether the views gave a distribution: not for the prefill token or a bonus token."""
    shares: Float[Array, "B C 2"]
    """Smallest and largest share of the first view that makes it the mixture's likeliest token."""

    @classmethod
    def of_prefill(cls, weights: Float[Array, "B R"], slots: int) -> Trace:
        """Return the trace after prefill, whose token the target wrote."""
        batch, views = weights.shape
        return cls(
            place=jnp.full((batch, slots), -1, jnp.int32),
            weights=jnp.tile(weights.astype(jnp.float32)[:, None], (1, slots, 1)),
            agree=jnp.zeros((batch, slots, views), bool),
            drafted=jnp.zeros((batch, slots), bool),
            shares=jnp.zeros((batch, slots, 2), jnp.float32),
        )

    def extended(
        self,
        count: Int[Array, " B"],
        tokens: Int[Array, "B C"],
        draft: Draft,
        verdict: Verdict,
        weights: Float[Array, "B R"],
        drafted: Bool[Array, "B J"],
    ) -> Trace:
        """Return the trace extended by one block.

        Args:
          count: Number of tokens before the block.
          tokens: Tokens after the block.
          drafted: Whether a place of the block was verified and the draft gave its distribution.
        """
        places = jnp.arange(draft.tokens.shape[1] + 1)
        slots = count[:, None] + places
        rows, inside = jnp.arange(count.shape[0])[:, None], slots[:, :-1]
        best = jnp.moveaxis(jnp.argmax(draft.view_probs, axis=-1), 0, -1)
        emitted = jnp.take_along_axis(tokens, jnp.minimum(inside, tokens.shape[1] - 1), axis=1)
        shares = accepting_shares(draft.view_probs, weights, emitted)
        place = jnp.where(places < verdict.count[:, None], places, -1)
        drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
        return Trace(
            place=self.place.at[rows, slots].set(place, mode="drop"),
            weights=self.weights.at[rows, slots].set(weights[:, None], mode="drop"),
            agree=self.agree.at[rows, inside].set(best == emitted[..., None], mode="drop"),
            drafted=self.drafted.at[rows, slots].set(drafted, mode="drop"),
            shares=self.shares.at[rows, inside].set(shares, mode="drop"),
        )


def accepting_shares(
    probs: Float[Array, "R B J V"], weights: Float[Array, "B R"], tokens: Int[Array, "B J"]
) -> Float[Array, "B J 2"]:
    """Return the least and the largest share of the first view that make these tokens likeliest.

    The other views keep their proportions; with weights of 0 they share equally. A mixture is
    linear in the share, so the shares are an interval; (1, 0) without any.
    """
    shares = weights.T[1:, :, None, None]
    total = shares.sum(0)
    shares = jnp.where(total > 0, shares / jnp.where(total > 0, total, 1), 1 / max(len(shares), 1))
    first = probs[0]
    mean = (shares * probs[1:]).sum(0) if len(probs) > 1 else first
    # How much likelier the token is than each other, at share 0 and at share 1: y0 + (y1 - y0) w.
    y0, y1 = (
        jnp.take_along_axis(each, tokens[..., None], axis=-1) - each for each in (mean, first)
    )
    slope = y1 - y0
    root = -y0 / jnp.where(slope == 0, 1, slope)
    least = jnp.where(slope > 0, root, 0).max(-1)
    largest = jnp.where(slope < 0, root, 1).min(-1)
    never = ((slope == 0) & (y0 < 0)).any(-1) | (least > largest)
    none = jnp.asarray([1.0, 0.0])
    return jnp.where(never[..., None], none, jnp.stack([least, largest], axis=-1))


def trace_record(trace: Trace, row: int, new: slice) -> dict[str, list]:
    """Return a part of one row of a trace as lists, of the new tokens in a range.

    `agree` is None where the views gave no distribution. `shares` is also None where no share of
    the first view makes the token likeliest.
    """
    place, weights, agree, drafted, shares = (np.asarray(leaf)[row, new] for leaf in (
        trace.place, trace.weights, trace.agree, trace.drafted, trace.shares
    ))  # fmt: skip
    rounded = np.round(shares.astype(float), 4).tolist()
    return {
        "place": place.tolist(),
        "agree": [views if here else None for views, here in zip(agree.tolist(), drafted.tolist())],
        "shares": [
            interval if here and interval[0] <= interval[1] else None
            for interval, here in zip(rounded, drafted.tolist())
        ],
        "weights": np.round(weights.astype(float), 4).tolist(),
    }
