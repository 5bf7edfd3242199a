"""Continuous refill: where rows of a batch are done, waiting requests take their places, and the loop goes on.

Answers differ in length, and a row that is done is computed all the same until the batch is. So while requests of the
same bucket wait, the loop returns as soon as a few rows are done; the next prompts are prefilled as a small batch of
their own, and their rows are put into the places that came free. What a request draws depends on its own key and
position alone, so its answer is what it is in any other batch.
"""

from __future__ import annotations

from functools import partial

import jax

from jaxspec.decoding.state import DecodeState, place
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Int


def refill_rows(batch_size: int) -> int:
    """Rows that are done before the loop returns for others: few waste little, many share a prefill."""
    return max(1, batch_size // 4)


@partial(jax.jit, donate_argnames=("state",))
def take_in(
    state: DecodeState, options: Sampling, fresh: DecodeState, its_options: Sampling, rows: Int[Array, " fresh"]
) -> tuple[DecodeState, Sampling]:
    """The state and options with row i of the fresh ones, N after prefill, in row `rows[i]`; B and more: nowhere."""
    batch = len(state.count)

    def put(old: Array, new: Array) -> Array:
        # A draft's rows are view-major, R*B; all other leaves have B.
        views = len(old) // batch
        parts = old.reshape(views, batch, *old.shape[1:])
        parts = parts.at[:, rows].set(new.reshape(views, len(rows), *new.shape[1:]), mode="drop")
        return parts.reshape(old.shape)

    mixed = jax.tree.map(put, options.replace(eos=None), its_options.replace(eos=None))
    return place(jax.tree.map(put, state, fresh)), mixed.replace(eos=options.eos)
