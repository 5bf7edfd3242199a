"""Decode collaboratively with CoS: every model proposes in turn (Algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration import proposals
from jaxspec.decoding.collaboration.proposals import SharedState
from jaxspec.decoding.inputs import Member
from jaxspec.decoding.processors import History, processed
from jaxspec.decoding.speculative import next_token
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Bool, Float, Int, Params


class Pending(struct.PyTreeNode):
    """Track proposals not yet committed, which follow the committed tokens in `tokens`."""

    turn: Int[Array, " B"]
    """Index of the model whose turn it is."""
    count: Int[Array, " B"]
    """Number of pending proposals."""
    logits: tuple[Float[Array, "B window V"], ...]
    """Each model's logits for the token at index i, in slot i % window, if it has read that far."""


@dataclass(frozen=True)
class Alternating(proposals.Collaboration):
    """Let every model propose in turn (CoS).

    The models form a ring. In its turn a model reads all tokens that it has not read: the newest
    committed token and the pending ones. This one pass scores the other models' proposals and gives
    the distribution of the token after them, from which the model draws its own first proposal. So
    the bonus token of speculative decoding is not emitted but pending. Once all models have scored
    the oldest run of proposals, the run is verified against the combined distribution, with its
    owner's distributions as the draft's. If all of it is accepted it is committed, and the model in
    turn extends its own run. A rejection drops all pending proposals, and the default proposer
    starts again (Algorithm 2; its proposal after a rejection is an oversight of the paper).

    The ring determines two facts, which need no state:
    - The oldest pending run belongs to the next model, so its owner and its length are static in
      each model's turn.
    - A run is verified in the turn before its owner's, and the owner has read all of it except the
      last token. So at a model's turn its cache holds every committed token except the newest: one
      count for each row serves all models.

    The output follows the combined distribution exactly for any draft lengths, because a proposal
    is conditioned on all tokens before it, committed and pending. (In the released code the context
    of an extension lacks the tokens that its own verification has just accepted.)

    Rows of a batch may be in different turns. An iteration of the loop gives every model one turn,
    in ring order, for the rows in its turn, and skips a model without any. A batch pays each
    model's pass for all its rows (`CollaborationStats.passes` against `calls`). Rows in another
    turn are moved past the last slot, where cache writes are dropped, so a request's draws do not
    depend on its neighbours.
    """

    members: tuple[Member, ...]
    gammas: tuple[int, ...]
    """Draft length of each model, at least 1."""
    first: int = 0
    """Index of the default proposer, which starts, and starts again after each rejection."""

    @property
    def spare_slots(self) -> int:
        return sum(self.gammas) + 1

    @property
    def most_tokens(self) -> int:
        return sum(self.gammas)

    def pending(self, rows: int) -> Pending:
        window = sum(self.gammas) - min(self.gammas)
        rings = tuple(
            jnp.zeros((rows, window, member.model.text.vocab_size)) for member in self.members
        )
        return Pending(jnp.full(rows, self.first), jnp.zeros(rows, jnp.int32), rings)

    def step(self, params: Params, state: SharedState, options: Sampling) -> SharedState:
        """Give every model one turn, in ring order."""
        for k in range(len(self.members)):
            model = (self.first + k) % len(self.members)
            waits = jnp.any((state.drafter.turn == model) & ~state.done)
            turn = partial(self.turn, model, params, options)
            state = jax.lax.cond(waits, turn, lambda state: state, state)
        return state

    def turn(
        self, model: int, params: Params, options: Sampling, state: SharedState
    ) -> SharedState:
        """Take one model's turn for its rows: score, verify the oldest run if due, propose."""
        owner = (model + 1) % len(self.members)
        run, unscored = self.gammas[owner], sum(self.gammas) - self.gammas[model]
        pending = state.drafter
        active = (pending.turn == model) & ~state.done
        verifying = active & (pending.count == unscored)

        with jax.named_scope("score"):
            newest = jnp.maximum(state.count, 1)[:, None] - 1  # pending proposals follow it
            tokens = jnp.take_along_axis(state.tokens, newest + jnp.arange(unscored + 1), axis=1)
            logits, cache = self._extend(model, params, tokens, state.target[model], active, 0)
            state = proposals.count_calls(state, model, active.astype(jnp.int32), 1)

        with jax.named_scope("verify"):
            drafted = tokens[:, 1 : run + 1]

            def check() -> proposals.Checked:
                slots = (state.count[:, None] + jnp.arange(run)) % pending.logits[0].shape[1]
                at = partial(jnp.take_along_axis, indices=slots[..., None], axis=1)
                scores = _replaced(tuple(map(at, pending.logits)), model, logits[:, :run])
                scores = jnp.stack(scores)
                return proposals.check_run(params, state, scores, drafted, owner, options)

            none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(check))
            checked = jax.lax.cond(jnp.any(verifying), check, lambda: none)
            falls = verifying & (checked.verdict.count < run)
            most = jnp.where(verifying, checked.verdict.count + falls, 0)

        # Index of the model's first proposal, whether or not a run is now committed.
        index = state.count + pending.count
        ring = pending.logits
        if len(self.members) > 2:  # with two models no scored proposal stays pending
            stays = jnp.where(verifying, run, 0)[:, None] <= jnp.arange(unscored)
            stays &= (jnp.arange(unscored) < pending.count[:, None]) & (active & ~falls)[:, None]
            window, rows = ring[model].shape[1], jnp.arange(len(state.count))[:, None]
            slots = jnp.where(stays, (state.count[:, None] + jnp.arange(unscored)) % window, window)
            extended = ring[model].at[rows, slots].set(logits[:, :unscored], mode="drop")
            ring = _replaced(ring, model, extended)
        pending, target = pending.replace(logits=ring), _replaced(state.target, model, cache)
        state = state.replace(target=target, drafter=pending)
        state = proposals.commit_run(state, drafted, checked, owner, most, options)

        with jax.named_scope("propose"):
            proposing = active & ~falls & ~state.done
            after = jnp.take_along_axis(logits, pending.count[:, None, None], axis=1)[:, 0]
            state = self._propose(model, params, options, state, after, index, proposing)

        unverified = jnp.where(falls, 0, pending.count - jnp.where(verifying, run, 0))
        onward = jnp.where(falls, self.first, owner)
        count = unverified + jnp.where(proposing, self.gammas[model], 0)
        return state.replace(
            drafter=state.drafter.replace(
                turn=jnp.where(active, onward, pending.turn),
                count=jnp.where(active, count, pending.count),
            )
        )

    def _propose(
        self,
        model: int,
        params: Params,
        options: Sampling,
        state: SharedState,
        logits: Float[Array, "B V"],
        index: Int[Array, " B"],
        proposing: Bool[Array, " B"],
    ) -> SharedState:
        """Propose a run from `index` on: the first token from `logits`, each next one by a pass."""
        gamma, rings = self.gammas[model], state.drafter.logits
        rows = jnp.arange(len(index))

        def put(i: Any, logits: Array, tokens: Array, ring: Array) -> tuple[Array, Array, Array]:
            history = History.of(state.prompt, tokens, index + i)
            scores = processed(logits[:, None], history, options.processors)
            token = next_token(scores[:, 0], index + i, options)
            tokens = tokens.at[rows, jnp.where(proposing, index + i, tokens.shape[1])].set(
                token, mode="drop"
            )
            slot = jnp.where(proposing, (index + i) % ring.shape[1], ring.shape[1])
            return token, tokens, ring.at[rows, slot].set(logits, mode="drop")

        def step(i: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            token, tokens, ring, cache = carry
            ahead = index + i - state.count  # pending proposals, this run's included
            logits, cache = self._extend(model, params, token[:, None], cache, proposing, ahead)
            return *put(i, logits[:, 0], tokens, ring), cache

        token, tokens, ring = put(0, logits, state.tokens, rings[model])
        if gamma > 1:
            passes = jnp.where(jnp.any(proposing), gamma - 1, 0)
            carry = (token, tokens, ring, state.target[model])
            _, tokens, ring, cache = jax.lax.fori_loop(1, passes + 1, step, carry)
            state = proposals.count_calls(state, model, proposing * (gamma - 1), passes)
            state = state.replace(target=_replaced(state.target, model, cache))
        drafter = state.drafter.replace(logits=_replaced(rings, model, ring))
        return state.replace(tokens=tokens, drafter=drafter)

    def _extend(
        self,
        model: int,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: KVCache,
        active: Bool[Array, " B"],
        ahead: int | Int[Array, " B"],
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Run a pass over tokens `ahead` slots past the cache's length, and keep that length.

        Inactive rows write nothing.
        """
        moved = cache.replace(length=jnp.where(active, cache.length + ahead, cache.slots))
        logits, extended = self.members[model].model.extend(params["models"][model], tokens, moved)
        return logits, extended.replace(length=cache.length)


def _replaced(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    """Return the tuple with one item replaced."""
    return (*items[:at], item, *items[at + 1 :])
