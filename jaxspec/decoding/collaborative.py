"""Collaborative decoding: M models write from one combined distribution.

| program                | how                                                                                 |
|------------------------|-------------------------------------------------------------------------------------|
| `OneProposer`, gamma 0 | standard collaborative decoding: all models read each token, the next one is drawn  |
| `OneProposer`          | one model proposes, all score: the paper's Naive-CoS (Theorem 3.1)                  |
| `OneProposer`, bonus   | likewise with a bonus token, as in plain speculative decoding                       |
| `Alternating`          | CoS: each model proposes in turn                                                    |

All draw from one law, the combined distribution, and at temperature 0 they write the same tokens.

Reference: Collaborative Decoding via Speculation (arXiv 2502.01662, ICML 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.decoding.combination import combined, greedy_token
from jaxspec.decoding.speculative import Autoregressive, Speculator, copied, next_token
from jaxspec.decoding.state import (
    DecodeState,
    Pause,
    PromptBatch,
    Prompts,
    append,
    draw_next,
    init_state,
    keep_decoding,
    newest,
    step_keys,
)
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import Pool
from jaxspec.sampling import Sampling, by_place, distribution
from jaxspec.typing import Array, Bool, Float, Int, Params
from jaxspec.verification import Draft, Verdict, match, rejection

VERIFY = 1
"""Stream of a step's keys for verification. A place's `state.DRAW` serves every proposal for it, of which one at
most is ever verified."""


@dataclass(frozen=True)
class Member:
    """One of the models and how it is shown images. Static: part of the compiled program."""

    model: LanguageModel
    pool: Pool | None = None


class CollaborationStats(struct.PyTreeNode):
    """Counts of each row, or of one request, models by identity; the token that prefill gives is in none."""

    emitted: Int[Array, " B"]
    verified: Int[Array, " B"]
    """Runs verified: cycles."""
    calls: Int[Array, "B M"]
    """Forward passes of the loop that the row had a part in."""
    tested: Int[Array, "B M"]
    """Proposals of each model that were accepted or rejected."""
    accepted: Int[Array, "B M"]
    overlap: Float[Array, "B M"]
    """Sum over tested proposals of sum_x min(d(x), r(x)) = 1 - TV(d, r), the chance of acceptance."""
    passes: Int[Array, "B M"]
    """Forward passes of the loop, whether or not the row had a part in them."""


def prefill_members(
    members: Sequence[Member],
    params: Params,
    batch: PromptBatch,
    options: Sampling,
    new_slots: int,
    spare: int,
) -> DecodeState:
    """Run every member's prompts; the first new token is drawn from their combination.

    Args:
      params: {"models": a tuple of parameters, "combination": a `Combination`}.
      spare: slots past the last new token that a pass may write to.
    """
    logits, caches = [], []
    prompts = (Prompts(batch.target, batch.images), *batch.others)
    for member, weights, prompt in zip(members, params["models"], prompts, strict=True):
        model, rows = member.model, prompt.rows
        features = None if prompt.images is None else model.encode(weights, prompt.images)
        embeds = model.embed(weights, rows, features, member.pool)
        after, cache = model.prefill(
            weights, embeds, rows, rows.tokens.shape[1] + new_slots + spare
        )
        logits.append(after)
        caches.append(cache)
    logits, caches = copied((logits, tuple(caches)), batch, options)
    zero = jnp.zeros(len(logits[0]), jnp.int32)
    first = draw_combined(params, jnp.stack(logits), zero, options)
    per_model = jnp.zeros((len(zero), len(members)), jnp.int32)
    overlap = per_model.astype(jnp.float32)
    stats = CollaborationStats(zero, zero, per_model, per_model, per_model, overlap, per_model)
    return init_state(first, caches, stats, options, new_slots + spare)


def draw_combined(
    params: Params, logits: Float[Array, "M B V"], index: Int[Array, " B"], options: Sampling
) -> Int[Array, " B"]:
    """Return the token at an index, from the combined distribution."""
    combination = params["combination"]
    return draw_next(
        lambda: greedy_token(combination, logits),
        lambda: combined(combination, logits, options),
        index,
        options,
    )


def verify_combined(
    params: Params,
    logits: Float[Array, "M B T V"],
    drafted: Int[Array, "B J"],
    proposer: int,
    count: Int[Array, " B"],
    options: Sampling,
) -> tuple[Verdict, Float[Array, "B J"]]:
    """Verifies a run that one model proposed against the combination at its places (and, if T = J + 1, after it).

    Returns the verdict and the chance that each place had to be accepted, sum_x min(d(x), r(x)).
    """
    if not drafted.shape[1]:
        token = draw_combined(params, logits[:, :, 0], count, options)
        return Verdict(jnp.zeros_like(token), token), jnp.zeros(drafted.shape)
    combination, length = params["combination"], drafted.shape[1]
    if options.greedy:
        best = jax.vmap(partial(greedy_token, combination), in_axes=-2, out_axes=-1)(logits)
        unread = jnp.zeros((0, *drafted.shape, logits.shape[-1]))
        return match(best, Draft(drafted, None, unread)), (drafted == best[:, :length]).astype(
            jnp.float32
        )
    r = by_place(lambda place: combined(combination, place, options))(logits)
    d = by_place(lambda place: distribution(place, options))(logits[proposer, :, :length])
    keys = step_keys(options, count, VERIFY)
    verdict = rejection(r, Draft(drafted, d, d[None]), keys, options.temperature == 0)
    return verdict, jnp.minimum(r[:, :length], d).sum(-1)


def commit_run(
    state: DecodeState,
    drafted: Int[Array, "B J"],
    verdict: Verdict,
    overlap: Float[Array, "B J"],
    proposer: int,
    wanted: Int[Array, " B"],
    options: Sampling,
) -> DecodeState:
    """Append the first `wanted` of the accepted proposals and the token after them, and count them; see `append`."""
    state, emitted = append(state, drafted, verdict, wanted, options)
    own = jnp.arange(len(state.target)) == proposer
    accepted = jnp.minimum(verdict.count, emitted)
    # Of the block the first rejection was tested too, if its replacement was emitted.
    tested = accepted + ((verdict.count < emitted) & (verdict.count < drafted.shape[1]))
    chance = jnp.where(jnp.arange(drafted.shape[1]) < tested[:, None], overlap, 0.0).sum(-1)
    stats = state.stats
    stats = stats.replace(
        emitted=stats.emitted + emitted,
        verified=stats.verified + (wanted > 0),
        tested=stats.tested + own * tested[:, None],
        accepted=stats.accepted + own * accepted[:, None],
        overlap=stats.overlap + own * chance[:, None],
    )
    return state.replace(stats=stats)


def count_calls(
    state: DecodeState, model: int, calls: Int[Array, " B"], passes: int | Array
) -> DecodeState:
    """Adds forward passes of a model: of each row, and of the batch."""
    stats = state.stats
    stats = stats.replace(
        calls=stats.calls.at[:, model].add(calls), passes=stats.passes.at[:, model].add(passes)
    )
    return state.replace(stats=stats)


@dataclass(frozen=True)
class OneProposer:
    """One model proposes every run and all score it. Static; `params` as in `prefill_members`."""

    members: tuple[Member, ...]
    gamma: int
    """Proposals of a run; 0 is standard collaborative decoding."""
    proposer: int = 0
    bonus: bool = False
    """Whether a run that stands as a whole brings one more token, for which the proposer reads its last proposal."""

    @property
    def spare_slots(self) -> int:
        """Slots past the last new token that a run may write to."""
        return self.gamma + 1

    @property
    def most_tokens(self) -> int:
        """The most tokens that one step of the loop may give a row."""
        return self.gamma + 1

    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> DecodeState:
        """Run the prompts; the state holds each row's first new token."""
        return prefill_members(self.members, params, batch, options, new_slots, self.spare_slots)

    def decode(
        self, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
    ) -> DecodeState:
        """Decode in runs until every row is done, or the loop is to pause."""
        return jax.lax.while_loop(
            lambda state: keep_decoding(state, pause),
            lambda state: self.run(params, state, options),
            state,
        )

    def run(self, params: Params, state: DecodeState, options: Sampling) -> DecodeState:
        """Run once for all rows: propose, score, verify, commit."""
        live = (~state.done).astype(jnp.int32)
        last = newest(state)
        places = self.gamma + (self.bonus or not self.gamma)
        model = self.members[self.proposer].model

        def propose(
            carry: tuple[Array, KVCache], place: Array
        ) -> tuple[tuple[Array, KVCache], tuple[Array, Array]]:
            token, cache = carry
            logits, cache = model.extend(params["models"][self.proposer], token[:, None], cache)
            token = next_token(logits[:, 0], state.count + place, options)
            return (token, cache), (token, logits[:, 0])

        logits, caches = [], []
        with jax.named_scope("propose"):
            start = (last, state.target[self.proposer])
            (_, cache), (tokens, own) = jax.lax.scan(propose, start, jnp.arange(places))
            drafted = jnp.moveaxis(tokens, 0, 1)[:, : self.gamma]
        with jax.named_scope("score"):
            fed = jnp.concatenate([last[:, None], drafted], axis=1)[:, :places]
            for m, member in enumerate(self.members):
                if m == self.proposer:
                    scores, written = jnp.moveaxis(own, 0, 1), cache
                else:
                    scores, written = member.model.extend(params["models"][m], fed, state.target[m])
                logits.append(scores)
                caches.append(written.replace(length=state.target[m].length))
                passes = places if m == self.proposer else 1
                state = count_calls(state, m, passes * live, passes)
        with jax.named_scope("verify"):
            verdict, overlap = verify_combined(
                params, jnp.stack(logits), drafted, self.proposer, state.count, options
            )
            more = (verdict.count < self.gamma) | (places > self.gamma)
        state = state.replace(target=tuple(caches))
        return commit_run(
            state, drafted, verdict, overlap, self.proposer, live * (verdict.count + more), options
        )


class Pending(struct.PyTreeNode):
    """Proposals that are not yet committed. They lie in `DecodeState.tokens` behind the committed tokens."""

    turn: Int[Array, " B"]
    """The model whose turn it is."""
    count: Int[Array, " B"]
    logits: tuple[Float[Array, "B window V"], ...]
    """Each model's logits for the token at index i, in slot i mod W, where that model has read so far."""


@dataclass(frozen=True)
class Alternating:
    """CoS: every model proposes in turn. Static; `params` as in `prefill_members`.

    The models stand in a ring. In its turn a model reads all that it has not read, which is always the newest
    committed token and the pending ones. That one pass scores the proposals of the others and gives the
    distribution of the token after them, from which the model draws its own first proposal: the bonus token of
    plain speculative decoding is not emitted but pending. When all models have scored the oldest run of proposals,
    the run is verified against the combined distribution, with the distributions of the model that proposed it as
    the draft's. If it stands as a whole it is committed, and the model in turn extends its own run. At the first
    rejection all that is pending is dropped, and the default proposer begins anew (the paper's Algorithm 2, where a
    proposal after a rejection is an oversight).

    What follows from the ring, and is therefore not stored:
    - the oldest pending run is the next model's, so its owner and its length are static in each model's turn;
    - a run is verified in the turn before its owner's, and the owner has read all of it but the last token. So at a
      model's turn its cache holds all committed tokens but the newest one: one count a row serves all models.

    The output follows the combined distribution exactly, whatever the draft lengths, since a proposal is always
    conditioned on everything before it, committed and pending. (In the released code the context of an extension
    lacks what its own verification has just accepted.)

    Rows of a batch may be in different turns. A pass of the loop gives every model one turn, in ring order, for the
    rows that wait for it, and skips a model for which none waits: a single row never waits, a batch pays each
    model's pass for all its rows (`CollaborationStats.passes` against `calls`). Rows that wait are parked past the
    last slot, where cache writes are dropped, so that what a request draws does not depend on its neighbours.
    """

    members: tuple[Member, ...]
    gammas: tuple[int, ...]
    """Draft length of each model, 1 or more."""
    first: int = 0
    """The default proposer, which begins and begins anew after each rejection; the others follow in ring order."""

    @property
    def spare_slots(self) -> int:
        """Slots past the last new token that a turn may write to."""
        return sum(self.gammas) + 1

    @property
    def most_tokens(self) -> int:
        """The most tokens that one step of the loop, a turn of every model, may give a row."""
        return sum(self.gammas)

    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> DecodeState:
        """Run the prompts; the state holds each row's first new token and nothing pending."""
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
        """Decode in turns until every row is done, or the loop is to pause."""

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
        """Take one model's turn, for the rows that wait for it: score; verify the oldest run if all have; propose."""
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
        """Propose the model's own run from `index` on, the first token drawn from `logits`, each next one by a pass."""
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
        """Run a pass over tokens `ahead` places past the cache's length, which stays; idle rows write nothing."""
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


Program = Autoregressive | Speculator | OneProposer | Alternating
"""What decodes; static, part of the compiled program."""
