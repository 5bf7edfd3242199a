"""Collaborative decoding: M models write from one combined distribution. The plain loops, and what all share.

| program                | how                                                                                 |
|------------------------|-------------------------------------------------------------------------------------|
| `OneProposer`, gamma 0 | standard collaborative decoding: all models read each token, the next one is drawn  |
| `OneProposer`          | one model proposes, all score: the paper's Naive-CoS (Theorem 3.1)                  |
| `OneProposer`, bonus   | likewise with a bonus token, as in plain speculative decoding                       |
| `Alternating`          | CoS: each model proposes in turn; see `jaxspec.decoding.alternating`                |

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
from jaxspec.decoding.speculative import next_token
from jaxspec.decoding.state import cut, draw_next, step_keys
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import Pool, PromptRows
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


class MemberPrompts(struct.PyTreeNode):
    """Prompts of B requests in the form that one member reads."""

    rows: PromptRows
    images: dict[str, Float[Array, "B U ..."]] | None = None


class CollaborationStats(struct.PyTreeNode):
    """Counts of each row, models by identity; the token that prefill gives is in none."""

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
    passes: Int[Array, " M"]
    """Forward passes of the whole batch."""


class CollaborativeState(struct.PyTreeNode):
    """The carry of the loops. Each cache holds all committed tokens but the newest one."""

    tokens: Int[Array, "B C"]
    """New tokens; from `count` on proposals, then rubbish."""
    count: Int[Array, " B"]
    """New tokens committed."""
    done: Bool[Array, " B"]
    caches: tuple[KVCache, ...]
    pending: Any
    """What `Alternating` carries besides."""
    stats: CollaborationStats


def prefill_members(
    members: Sequence[Member],
    params: Params,
    prompts: Sequence[MemberPrompts],
    options: Sampling,
    new_slots: int,
    spare: int,
) -> CollaborativeState:
    """Runs every member's prompts; the first new token is drawn from their combination.

    Args:
      params: {"models": a tuple of parameters, "combination": a `Combination`}.
      spare: slots past the last new token that a pass may write to.
    """
    batch = prompts[0].rows.length.shape[0]
    logits, caches = [], []
    for member, weights, prompt in zip(members, params["models"], prompts, strict=True):
        model, rows = member.model, prompt.rows
        features = None if prompt.images is None else model.encode(weights, prompt.images)
        embeds = model.embed(weights, rows, features, member.pool)
        after, cache = model.prefill(weights, embeds, rows, rows.tokens.shape[1] + new_slots + spare)
        logits.append(after)
        caches.append(cache)
    zero = jnp.zeros(batch, jnp.int32)
    first = draw_combined(params, jnp.stack(logits), zero, options)
    per_model = jnp.zeros((batch, len(members)), jnp.int32)
    return CollaborativeState(
        tokens=jnp.zeros((batch, new_slots + spare), jnp.int32).at[:, 0].set(first),
        count=jnp.minimum(1, options.max_new_tokens),
        done=jnp.any(first[:, None] == options.eos, axis=1) | (options.max_new_tokens <= 1),
        caches=tuple(caches),
        pending=None,
        stats=CollaborationStats(
            zero, zero, per_model, per_model, per_model, per_model.astype(jnp.float32), per_model[0]
        ),
    )


def draw_combined(
    params: Params, logits: Float[Array, "M B V"], index: Int[Array, " B"], options: Sampling
) -> Int[Array, " B"]:
    """The token at an index, from the combined distribution."""
    combination = params["combination"]
    return draw_next(
        lambda: greedy_token(combination, logits), lambda: combined(combination, logits, options), index, options
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
    greedy = options.temperature == 0

    def matched() -> tuple[Verdict, Array]:
        best = jax.vmap(partial(greedy_token, combination), in_axes=-2, out_axes=-1)(logits)
        unread = jnp.zeros((0, *drafted.shape, logits.shape[-1]))
        return match(best, Draft(drafted, None, unread)), (drafted == best[:, :length]).astype(jnp.float32)

    def drawn() -> tuple[Verdict, Array]:
        r = by_place(lambda place: combined(combination, place, options))(logits)
        d = by_place(lambda place: distribution(place, options))(logits[proposer, :, :length])
        verdict = rejection(r, Draft(drafted, d, d[None]), step_keys(options, count, VERIFY), greedy)
        return verdict, jnp.minimum(r[:, :length], d).sum(-1)

    return jax.lax.cond(jnp.all(greedy), matched, drawn)


def commit_run(
    state: CollaborativeState,
    drafted: Int[Array, "B J"],
    verdict: Verdict,
    overlap: Float[Array, "B J"],
    proposer: int,
    wanted: Int[Array, " B"],
    options: Sampling,
) -> CollaborativeState:
    """Appends the first `wanted` of the accepted proposals and the token after them, cut at EOS or the limit.

    A row whose `wanted` is 0 stays as it was.
    """
    places = jnp.arange(drafted.shape[1] + 1)
    padded = jnp.pad(drafted, ((0, 0), (0, 1)))
    block = jnp.where(places == verdict.count[:, None], verdict.next_token[:, None], padded)
    emitted, ended = cut(block, wanted, options.max_new_tokens - state.count, options)
    slots = jnp.where(places < emitted[:, None], state.count[:, None] + places, state.tokens.shape[1])
    count = state.count + emitted

    own = jnp.arange(len(state.caches)) == proposer
    accepted = jnp.minimum(verdict.count, emitted)
    # Of the block the first rejection was tested too, if its replacement was emitted.
    tested = accepted + ((verdict.count < emitted) & (verdict.count < drafted.shape[1]))
    chance = jnp.where(places[:-1] < tested[:, None], overlap, 0.0).sum(-1)
    stats = state.stats
    return state.replace(
        tokens=state.tokens.at[jnp.arange(len(count))[:, None], slots].set(block, mode="drop"),
        count=count,
        done=state.done | ended | (count >= options.max_new_tokens),
        caches=tuple(cache.replace(length=cache.length + emitted) for cache in state.caches),
        stats=stats.replace(
            emitted=stats.emitted + emitted,
            verified=stats.verified + (wanted > 0),
            tested=stats.tested + own * tested[:, None],
            accepted=stats.accepted + own * accepted[:, None],
            overlap=stats.overlap + own * chance[:, None],
        ),
    )


def count_calls(
    state: CollaborativeState, model: int, calls: Int[Array, " B"], passes: int | Array
) -> CollaborativeState:
    """Adds forward passes of a model: of each row, and of the batch."""
    stats = state.stats
    stats = stats.replace(calls=stats.calls.at[:, model].add(calls), passes=stats.passes.at[model].add(passes))
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

    def prefill(
        self, params: Params, prompts: Sequence[MemberPrompts], options: Sampling, new_slots: int
    ) -> CollaborativeState:
        """Runs the prompts; the state holds each row's first new token."""
        return prefill_members(self.members, params, prompts, options, new_slots, self.spare_slots)

    def decode(self, params: Params, state: CollaborativeState, options: Sampling) -> CollaborativeState:
        """Runs until every row is done, in one `while_loop`."""
        return jax.lax.while_loop(
            lambda state: ~jnp.all(state.done), lambda state: self.run(params, state, options), state
        )

    def run(self, params: Params, state: CollaborativeState, options: Sampling) -> CollaborativeState:
        """One run for all rows: propose, score, verify, commit."""
        live = (~state.done).astype(jnp.int32)
        newest = jnp.take_along_axis(state.tokens, newest_index(state), axis=1)
        places = self.gamma + (self.bonus or not self.gamma)
        model = self.members[self.proposer].model

        def propose(carry: tuple[Array, KVCache], place: Array) -> tuple[tuple[Array, KVCache], tuple[Array, Array]]:
            token, cache = carry
            logits, cache = model.extend(params["models"][self.proposer], token[:, None], cache)
            token = next_token(logits[:, 0], state.count + place, options)
            return (token, cache), (token, logits[:, 0])

        logits, caches = [], []
        with jax.named_scope("propose"):
            start = (newest[:, 0], state.caches[self.proposer])
            (_, cache), (tokens, own) = jax.lax.scan(propose, start, jnp.arange(places))
            drafted = jnp.moveaxis(tokens, 0, 1)[:, : self.gamma]
        with jax.named_scope("score"):
            fed = jnp.concatenate([newest, drafted], axis=1)[:, :places]
            for m, member in enumerate(self.members):
                if m == self.proposer:
                    scores, written = jnp.moveaxis(own, 0, 1), cache
                else:
                    scores, written = member.model.extend(params["models"][m], fed, state.caches[m])
                logits.append(scores)
                caches.append(written.replace(length=state.caches[m].length))
                passes = places if m == self.proposer else 1
                state = count_calls(state, m, passes * live, passes)
        with jax.named_scope("verify"):
            verdict, overlap = verify_combined(params, jnp.stack(logits), drafted, self.proposer, state.count, options)
            more = (verdict.count < self.gamma) | (places > self.gamma)
        state = state.replace(caches=tuple(caches))
        return commit_run(state, drafted, verdict, overlap, self.proposer, live * (verdict.count + more), options)


def newest_index(state: CollaborativeState) -> Int[Array, "B 1"]:
    """Return the index of the last committed token in `tokens`."""
    return jnp.maximum(state.count, 1)[:, None] - 1
