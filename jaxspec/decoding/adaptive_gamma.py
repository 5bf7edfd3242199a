"""Adaptive J: how many tokens the next block drafts, from what blocks cost here and how many drafts were accepted.

Lengths come from a short list, and one body of the loop serves all: the draft stops earlier, and the target reads as
many tokens as of the longest. When no length is expected to beat plain decoding the draft is given up, and the program
of plain decoding finishes the answer: so speculation costs little where it cannot pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.typing import Array, Bool, Float, Int

CHOICES = (1, 2, 3, 5, 7, 10, 15, 20)
MEMORY = 0.95
"""By how much what a block told still counts one block later, and what an answer told one batch later: about twenty are
remembered."""
PRIOR = (9.0, 10.0)
"""Accepted and tried tokens before any answer. They do not fade: where drafts have been given up, they are tried again
once what spoke against them is forgotten."""
WEIGHT = 15.0
"""Tried tokens that earlier answers count for in a new one. With few, one rejected block ends the drafts for good where
they gain little; with many, an answer that is hard to draft is noticed late."""
NOTHING = np.zeros(2)
"""Before any answer."""
BLOCKS = 4
"""How many are timed at once."""
ROUNDS, PATIENCE = 10, 2000.0
"""Costs are the least of so many rounds, or of as many as milliseconds allow: a large model on a CPU has one."""


class AdaptiveGamma(struct.PyTreeNode):
    """What the choice rests on. Costs are the batch's; acceptance is each row's own, from a common start."""

    costs: Float[Array, " gammas"]
    """Time of a block of each length, in any unit; the first is a plain step's."""
    start: Float[Array, ""]
    """The share of tried tokens that earlier answers accepted."""
    accepted: Float[Array, " B"]
    tried: Float[Array, " B"]

    def choose(self, lengths: tuple[int, ...], done: Bool[Array, " B"]) -> Int[Array, ""]:
        """Return the index of the length with the most expected tokens a time, over the rows that are not done.

        A block of g drafts is expected to give 1 + a + ... + a^g tokens, a being the row's running acceptance
        (Leviathan et al. 2023, Eq. 1).
        """
        alpha = (WEIGHT * self.start + self.accepted) / (WEIGHT + self.tried)
        powers = jnp.cumsum(alpha[:, None] ** jnp.arange(max(lengths) + 1), axis=1)
        expected = jnp.where(done[:, None], 0.0, powers[:, jnp.asarray(lengths)]).sum(0)
        return jnp.argmax(expected / self.costs)

    def observe(
        self, drafted: int | Int[Array, ""], count: Int[Array, " B"], done: Bool[Array, " B"]
    ) -> AdaptiveGamma:
        """Return the state after a block of `drafted` tokens of which `count` were accepted; rows that were done learn
        nothing."""
        accepted = MEMORY * self.accepted + count
        tried = MEMORY * self.tried + count + (count < drafted)
        return self.replace(
            accepted=jnp.where(done, self.accepted, accepted),
            tried=jnp.where(done, self.tried, tried),
        )

    def settle(self, plain: Bool[Array, ""]) -> AdaptiveGamma:
        """Return the same, or where it is to be plain from here on, one whose draft is given up."""
        return self.replace(costs=self.costs.at[0].multiply(jnp.where(plain, 0.0, 1.0)))

    @property
    def given_up(self) -> bool:
        """Whether all that follows is decoded plainly, which then costs nothing to choose."""
        return not np.asarray(self.costs)[0]


def init_gamma(costs: np.ndarray, batch: int, earlier: np.ndarray = NOTHING) -> AdaptiveGamma:
    """Return the state before the first block, as numpy; `earlier` is what `update_prior` kept of earlier answers."""
    accepted, tried = earlier + PRIOR
    none = np.zeros(batch)
    leaves: list[Any] = [
        np.asarray(leaf, np.float32) for leaf in (costs, accepted / tried, none, none)
    ]
    return AdaptiveGamma(*leaves)


def update_prior(earlier: np.ndarray, state: AdaptiveGamma) -> np.ndarray:
    """Return accepted and tried tokens of earlier answers and of a batch that has ended so, which counts most."""
    return MEMORY * earlier + [np.sum(state.accepted), np.sum(state.tried)]


def gammas_up_to(gamma: int) -> tuple[int, ...]:
    """Return the lengths to choose from, 0 being plain decoding."""
    return (0, *(g for g in CHOICES if g < gamma), gamma)


def measure_costs(
    lengths: tuple[int, ...], run: Callable[[np.ndarray], tuple[float, int]]
) -> np.ndarray:
    """Return milliseconds of a block of each length: the least of a few rounds, and of what longer blocks took.

    `run` decodes a little under the costs it is given and returns the milliseconds and the number of blocks; one
    length after the other is made to look free, so that it alone is chosen. What else a machine does only adds; and a
    shorter block takes no longer than a longer one, so that where it seems to, that was something else.
    """
    least, spent = np.full(len(lengths), np.inf), 0.0
    for _ in range(ROUNDS):
        for i in range(len(lengths)):
            time, blocks = run(np.where(np.arange(len(lengths)) == i, 0.0, 1.0))
            least[i] = min(least[i], time / max(blocks, 1))
            spent += time
        if spent > PATIENCE:
            break
    return np.minimum.accumulate(least[::-1])[::-1]
