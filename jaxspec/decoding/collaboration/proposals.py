"""Decode collaboratively: M models write from one combined distribution.

| program                | method                                                        |
|------------------------|---------------------------------------------------------------|
| `OneProposer`, gamma 0 | standard collaborative decoding: all models read each token   |
| `OneProposer`          | Naive-CoS: one model proposes, all models score (Theorem 3.1) |
| `OneProposer`, bonus   | the same with a bonus token, as in speculative decoding       |
| `Alternating`          | CoS: each model proposes in turn                              |

All draw from the combined distribution, and at temperature 0 they write the same tokens.

Reference: Collaborative Decoding via Speculation (arXiv 2502.01662, ICML 2025).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration.combination import joint_law
from jaxspec.decoding.inputs import PromptBatch, Prompts
from jaxspec.decoding.processors import History, PromptTokens, processed, prompt_tokens
from jaxspec.decoding.program import Program
from jaxspec.decoding.speculative import copied
from jaxspec.decoding.state import DecodeState, draw_next, same_values, step_keys
from jaxspec.sampling import Sampling, by_place, distribution, filtered
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Draft, Verdict, match, rejection

VERIFY = 1
"""Stream of a step's keys for verification. `state.DRAW` draws every proposal for a place, at most
one of which is ever verified."""


class CollaborationStats(struct.PyTreeNode):
    """Count the loop's passes, proposals and tokens, for each row or one request.

    The prefill token is not counted. Models keep their order in the list.
    """

    emitted: Int[Array, " B"]
    verified: Int[Array, " B"]
    """Number of verified runs: cycles."""
    calls: Int[Array, "B M"]
    """Forward passes of the loop in which the row took part."""
    tested: Int[Array, "B M"]
    """Proposals of each model that were accepted or rejected."""
    accepted: Int[Array, "B M"]
    overlap: Float[Array, "B M"]
    """Sum over tested proposals of the acceptance chance sum_x min(d(x), r(x)) = 1 - TV(d, r)."""
    passes: Int[Array, "B M"]
    """Forward passes of the loop, whether the row took part or not."""

    __eq__ = same_values


SharedState = DecodeState[tuple[KVCache, ...], CollaborationStats]
"""State of collaborating models, each with a cache of its own."""


class Collaboration(Program[SharedState]):
    """Share what all collaborative programs need.

    `params` is {"models": a tuple of parameters, "combination": a `Combination`}.
    """

    def weights(self, params: Params) -> tuple[Params, ...]:
        return params["models"]

    def caches(self, state: SharedState) -> tuple[KVCache, ...]:
        return state.target

    def begin(
        self, params: Params, state: SharedState, logits: Float[Array, "M B V"], options: Sampling
    ) -> SharedState:
        first = first_combined(params, logits, state.prompt, options)
        return state.begun(log_combined(params, logits), first, options)

    def pending(self, rows: int) -> Any:
        """Return the pending proposals before the first step; None if the program keeps none."""
        return None

    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> tuple[SharedState, Float[Array, "M B V"]]:
        """Prefill every member, and draw the first new token from their combination."""
        logits, caches, slots = [], [], new_slots + self.spare_slots
        prompts = (Prompts(batch.target, batch.images), *batch.peers)
        for member, weights, prompt in zip(self.members, params["models"], prompts, strict=True):
            embeds = member.embed(weights, prompt)
            room = prompt.rows.tokens.shape[1] + slots
            after, cache = member.model.prefill(weights, embeds, prompt.rows, room)
            logits.append(after)
            caches.append(cache)
        prompt = prompt_tokens(batch.target, logits[0].shape[-1], options.processors)
        logits, caches, prompt = copied((logits, tuple(caches), prompt), batch, options)
        stacked = jnp.stack(logits)
        first = first_combined(params, stacked, prompt, options)
        zero = jnp.zeros_like(first)
        per_model = jnp.zeros((len(zero), len(caches)), jnp.int32)
        overlap = per_model.astype(jnp.float32)
        stats = CollaborationStats(zero, zero, per_model, per_model, per_model, overlap, per_model)
        logs = log_combined(params, stacked)
        state = DecodeState.prefilled(logs, first, caches, stats, options, slots, prompt)
        return state.replace(drafter=self.pending(len(first))), stacked


def first_combined(
    params: Params, logits: Float[Array, "M B V"], prompt: PromptTokens | None, options: Sampling
) -> Int[Array, " B"]:
    """Draw the first new token of each row from the combined distribution."""
    zero = jnp.zeros(logits.shape[1], jnp.int32)
    history = History.of(prompt, zero[:, None], zero)
    return draw_combined(params, logits, zero, options, history)


def log_combined(params: Params, logits: Float[Array, "M *B V"]) -> Float[Array, "*B V"]:
    """Return the logarithm of the combined distribution at temperature 1."""
    combination, ones = params["combination"], jnp.ones(logits.shape[1])

    def soft(logits: Float[Array, "M B V"]) -> Float[Array, "B V"]:
        return combination.soft(logits, ones)

    return jnp.log(soft(logits) if logits.ndim == 3 else by_place(soft)(logits))


def draw_combined(
    params: Params,
    logits: Float[Array, "M B V"],
    index: Int[Array, " B"],
    options: Sampling,
    history: History | None,
) -> Int[Array, " B"]:
    """Draw the token at an index from the combined distribution."""
    law, best = joint_law(params["combination"], logits[:, :, None], options, history)
    law, best = law[:, 0], best[:, 0]
    return draw_next(lambda: best, lambda: filtered(law, options, best), index, options)


class Checked(struct.PyTreeNode):
    """Hold what the combination says of one model's run of proposals."""

    verdict: Verdict
    overlap: Float[Array, "B J"]
    """Chance of acceptance at each place, sum_x min(d(x), r(x))."""
    logs: Float[Array, "B T V"] | None
    """Logarithm of the combined distribution at temperature 1; None if nothing records it."""


def check_run(
    params: Params,
    state: SharedState,
    logits: Float[Array, "M B T V"],
    drafted: Int[Array, "B J"],
    proposer: int,
    options: Sampling,
) -> Checked:
    """Verify one model's run of proposals, which follow the committed tokens.

    With T = J + 1 the logits after the run give a bonus token.
    """
    logs = None if state.logprobs is None else log_combined(params, logits)
    history, length = state.history, drafted.shape[1]
    if not length:
        token = draw_combined(params, logits[:, :, 0], state.count, options, history)
        return Checked(Verdict(jnp.zeros_like(token), token), jnp.zeros(drafted.shape), logs)
    if history is not None:
        history = history.behind(drafted, jnp.tri(logits.shape[2], length, -1, dtype=bool)[None])
    law, best = joint_law(params["combination"], logits, options, history)
    if options.greedy:
        unread = jnp.zeros((0, *drafted.shape, logits.shape[-1]))
        chance = (drafted == best[:, :length]).astype(jnp.float32)
        return Checked(match(best, Draft(drafted, None, unread)), chance, logs)
    draft_scores = processed(logits[proposer], history, options.processors)
    r = jax.vmap(filtered, in_axes=(1, None, 1), out_axes=1)(law, options, best)
    d = by_place(lambda scores: distribution(scores, options))(draft_scores[:, :length])
    keys = step_keys(options, state.count, VERIFY)
    verdict = rejection(r, Draft(drafted, d, d[None]), keys, options.temperature == 0)
    return Checked(verdict, jnp.minimum(r[:, :length], d).sum(-1), logs)


def commit_run(
    state: SharedState,
    drafted: Int[Array, "B J"],
    checked: Checked,
    proposer: int,
    most: Int[Array, " B"],
    options: Sampling,
) -> SharedState:
    """Append and count at most `most` of the accepted proposals and the token after them."""
    count = checked.verdict.count
    state, emitted = state.appended(drafted, checked.verdict, most, options, checked.logs)
    is_proposer = jnp.arange(len(state.target)) == proposer
    accepted = jnp.minimum(count, emitted)
    # The first rejected proposal was tested too, if its replacement was emitted.
    tested = accepted + ((count < emitted) & (count < drafted.shape[1]))
    places = jnp.arange(drafted.shape[1])
    chance = jnp.where(places < tested[:, None], checked.overlap, 0.0).sum(-1)
    stats = state.stats
    stats = stats.replace(
        emitted=stats.emitted + emitted,
        verified=stats.verified + (most > 0),
        tested=stats.tested + is_proposer * tested[:, None],
        accepted=stats.accepted + is_proposer * accepted[:, None],
        overlap=stats.overlap + is_proposer * chance[:, None],
    )
    return state.replace(stats=stats)


def count_calls(
    state: SharedState, model: int, calls: Int[Array, " B"], passes: int | Array
) -> SharedState:
    """Add a model's forward passes to the counts of each row and of the batch."""
    stats = state.stats
    stats = stats.replace(
        calls=stats.calls.at[:, model].add(calls), passes=stats.passes.at[:, model].add(passes)
    )
    return state.replace(stats=stats)
