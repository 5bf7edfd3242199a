"""CoS: collaborative decoding in which every model proposes in turn (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration import (
    Collaboration,
    commit_run,
    count_calls,
    prefill_members,
    verify_combined,
)
from jaxspec.decoding.program import Member
from jaxspec.decoding.speculative import next_token
from jaxspec.decoding.state import DecodeState, Pause, PromptBatch, keep_decoding
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Bool, Float, Int, Params
from jaxspec.verification import Verdict


class Pending(struct.PyTreeNode):
    """Proposals that are not yet committed. They lie in `DecodeState.tokens` behind the committed
    tokens."""

    turn: Int[Array, " B"]
    """The model whose turn it is."""
    count: Int[Array, " B"]
    logits: tuple[Float[Array, "B window V"], ...]
    """Each model's logits for the token at index i, in slot i mod W, where that model has read so
    far."""


@dataclass(frozen=True)
class Alternating(Collaboration):
    """CoS: every model proposes in turn. Static; `params` as in `prefill_members`.

    The models stand in a ring. In its turn a model reads all that it has not read, which is always
    the newest committed token and the pending ones. That one pass scores the proposals of the
    others and gives the distribution of the token after them, from which the model draws its own
    first proposal: the bonus token of plain speculative decoding is not emitted but pending. When
    all models have scored the oldest run of proposals, the run is verified against the combined
    distribution, with the distributions of the model that proposed it as the draft's. If it stands
    as a whole it is committed, and the model in turn extends its own run. At the first rejection
    all that is pending is dropped, and the default proposer begins anew (the paper's Algorithm 2,
    where a proposal after a rejection is an oversight).

    What follows from the ring, and is therefore not stored:
    - the oldest pending run is the next model's, so its owner and its length are static in each
      model's turn;
    - a run is verified in the turn before its owner's, and the owner has read all of it but the
      last token. So at a model's turn its cache holds all committed tokens but the newest one: one
      count a row serves all models.

    The output follows the combined distribution exactly, whatever the draft lengths, since a
    proposal is always conditioned on everything before it, committed and pending. (In the released
    code the context of an extension lacks what its own verification has just accepted.)

    Rows of a batch may be in different turns. A pass of the loop gives every model one turn, in
    ring order, for the rows that wait for it, and skips a model for which none waits: a single row
    never waits, a batch pays each model's pass for all its rows (`CollaborationStats.passes`
    against `calls`). Rows that wait are parked past the last slot, where cache writes are dropped,
    so that what a request draws does not depend on its neighbours.
    """

    members: tuple[Member, ...]
    gammas: tuple[int, ...]
    """Draft length of each model, 1 or more."""
    first: int = 0
    """The default proposer, which begins and begins anew after each rejection; the others follow in
    ring order."""

    @property
    def spare_slots(self) -> int:
        return sum(self.gammas) + 1

    @property
    def most_tokens(self) -> int:
        return sum(self.gammas)

    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> DecodeState:
        state = prefill_members(self.members, params, batch, options, new_slots, self.spare_slots)
        rows, window = len(state.count), sum(self.gammas) - min(self.gammas)
        rings = tuple(
            jnp.zeros((rows, window, member.model.text.vocab_size)) for member in self.members
        )
        zero = jnp.zeros_like(state.count)
        return state.replace(drafter=Pending(jnp.full_like(zero, self.first), zero, rings))

    def decode(
        self, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
    ) -> DecodeState:
        def step(state: DecodeState) -> DecodeState:
            for k in range(len(self.members)):
                model = (self.first + k) % len(self.members)
                waits = jnp.any((state.drafter.turn == model) & ~state.done)
                turn = partial(self.turn, model, params, options)
                state = jax.lax.cond(waits, turn, lambda state: state, state)
            return state

        return jax.lax.while_loop(lambda state: keep_decoding(state, pause), step, state)

    def turn(
        self, model: int, params: Params, options: Sampling, state: DecodeState
    ) -> DecodeState:
        """Take one model's turn, for the rows that wait for it: score; verify the oldest run if all
        have; propose."""
        owner = (model + 1) % len(self.members)
        run, others = self.gammas[owner], sum(self.gammas) - self.gammas[model]
        pending = state.drafter
        active = (pending.turn == model) & ~state.done
        verifying = active & (pending.count == others)

        with jax.named_scope("score"):
            newest = jnp.maximum(state.count, 1)[:, None] - 1  # and behind it what is pending
            fed = jnp.take_along_axis(state.tokens, newest + jnp.arange(others + 1), axis=1)
            logits, cache = self._extend(model, params, fed, state.target[model], active, 0)
            state = count_calls(state, model, active.astype(jnp.int32), 1)

        with jax.named_scope("verify"):
            drafted = fed[:, 1 : run + 1]

            def check() -> tuple[Verdict, Array]:
                slots = (state.count[:, None] + jnp.arange(run)) % pending.logits[0].shape[1]
                scores = [
                    logits[:, :run]
                    if m == model
                    else jnp.take_along_axis(ring, slots[..., None], axis=1)
                    for m, ring in enumerate(pending.logits)
                ]
                return verify_combined(
                    params, jnp.stack(scores), drafted, owner, state.count, options
                )

            none = (
                Verdict(jnp.zeros_like(state.count), jnp.zeros_like(state.count)),
                jnp.zeros(drafted.shape),
            )
            verdict, overlap = jax.lax.cond(jnp.any(verifying), check, lambda: none)
            falls = verifying & (verdict.count < run)
            wanted = jnp.where(verifying, verdict.count + falls, 0)

        index = (
            state.count + pending.count
        )  # of the model's first proposal, whether or not a run is now committed
        ring = pending.logits
        if len(self.members) > 2:  # else nothing stays pending that the model has scored
            kept = jnp.where(verifying, run, 0)[:, None] <= jnp.arange(others)
            kept &= (jnp.arange(others) < pending.count[:, None]) & (active & ~falls)[:, None]
            places = state.count[:, None] + jnp.arange(others)
            ring = _write(pending, model, places, kept, logits[:, :others])
        state = state.replace(target=_with(state.target, model, cache))
        state = commit_run(state, drafted, verdict, overlap, owner, wanted, options)

        with jax.named_scope("propose"):
            proposing = active & ~falls & ~state.done
            after = jnp.take_along_axis(logits, pending.count[:, None, None], axis=1)[:, 0]
            state, ring = self._propose(
                model, params, options, state, ring, after, index, proposing
            )

        left = jnp.where(falls, 0, pending.count - jnp.where(verifying, run, 0))
        onward = jnp.where(falls, self.first, owner)
        return state.replace(
            drafter=Pending(
                turn=jnp.where(active, onward, pending.turn),
                count=jnp.where(
                    active, left + jnp.where(proposing, self.gammas[model], 0), pending.count
                ),
                logits=ring,
            )
        )

    def _propose(
        self,
        model: int,
        params: Params,
        options: Sampling,
        state: DecodeState,
        rings: tuple[Array, ...],
        logits: Float[Array, "B V"],
        index: Int[Array, " B"],
        proposing: Bool[Array, " B"],
    ) -> tuple[DecodeState, tuple[Array, ...]]:
        """Propose the model's own run from `index` on, the first token drawn from `logits`, each
        next one by a pass."""
        gamma = self.gammas[model]
        rows = jnp.arange(len(index))

        def put(i: Any, logits: Array, tokens: Array, ring: Array) -> tuple[Array, Array, Array]:
            token = next_token(logits, index + i, options)
            tokens = tokens.at[rows, jnp.where(proposing, index + i, tokens.shape[1])].set(
                token, mode="drop"
            )
            slot = jnp.where(proposing, (index + i) % ring.shape[1], ring.shape[1])
            return token, tokens, ring.at[rows, slot].set(logits, mode="drop")

        def step(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            token, tokens, ring, cache = carry
            ahead = (
                index + i - state.count
            )  # past the newest token: those pending, and this run's so far
            logits, cache = self._extend(model, params, token[:, None], cache, proposing, ahead)
            return *put(i, logits[:, 0], tokens, ring), cache

        token, tokens, ring = put(0, logits, state.tokens, rings[model])
        if gamma > 1:
            passes = jnp.where(jnp.any(proposing), gamma - 1, 0)
            carry = (token, tokens, ring, state.target[model])
            _, tokens, ring, cache = jax.lax.fori_loop(1, passes + 1, step, carry)
            state = count_calls(state, model, proposing * (gamma - 1), passes)
            state = state.replace(target=_with(state.target, model, cache))
        return state.replace(tokens=tokens), _with(rings, model, ring)

    def _extend(
        self,
        model: int,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        active: Bool[Array, " B"],
        ahead: int | Int[Array, " B"],
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Run a pass over tokens `ahead` places past the cache's length, which stays; idle rows
        write nothing."""
        placed = cache.replace(length=jnp.where(active, cache.length + ahead, cache.slots))
        logits, written = self.members[model].model.extend(params["models"][model], tokens, placed)
        return logits, written.replace(length=cache.length)


def _write(
    pending: Pending,
    model: int,
    index: Int[Array, "B T"],
    kept: Bool[Array, "B T"],
    logits: Float[Array, "B T V"],
) -> tuple[Array, ...]:
    """Return the rings, with the model's logits for the tokens at these indices."""
    ring = pending.logits[model]
    slots = jnp.where(kept, index % ring.shape[1], ring.shape[1])
    ring = ring.at[jnp.arange(len(slots))[:, None], slots].set(logits, mode="drop")
    return _with(pending.logits, model, ring)


def _with(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    """Return the tuple with another item at a place."""
    return (*items[:at], item, *items[at + 1 :])
