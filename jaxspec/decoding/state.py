"""What the decode loops carry, and the one rule by which a verified block becomes committed
tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.models.inputs import PromptRows
from jaxspec.models.kv_head import HeadRows
from jaxspec.sampling import Sampling, draw
from jaxspec.sharding import CACHE_AXES, constrain
from jaxspec.typing import Array, Bool, Float, Int
from jaxspec.verification import Draft, Verdict


class Prompts(struct.PyTreeNode):
    """Prompts of B requests as one model reads them."""

    rows: PromptRows
    images: dict[str, Float[Array, "B U ..."]] | None = None
    """The tiles of each row's images; None where no row has any."""


class PromptBatch(struct.PyTreeNode):
    """Prompts of B requests, as the target reads them and in R views for the draft."""

    target: PromptRows
    images: dict[str, Float[Array, "B U ..."]] | None
    """The tiles of each row's images; None where no row has any."""
    views: tuple[PromptRows, ...] = ()
    view_images: dict[str, Float[Array, "B U ..."]] | None = None
    """Tiles for the draft's own tower; None when it reads the target's features, or none."""
    weights: Float[Array, "B R"] | None = None
    """Initial weights of the views."""
    head: HeadRows | None = None
    """What a KV head reads of the target's rows; None without one."""
    whole: PromptRows | None = None
    """The target's whole rows, where `target` is only what follows those of `past`."""
    past: KVCache | None = None
    """The target's cache of an earlier turn, where `target` is only what follows its tokens."""
    others: tuple[Prompts, ...] = ()
    """Prompts of the models that write together with the first, which reads `target` and
    `images`."""

    @property
    def prompt(self) -> PromptRows:
        """The target's whole prompt."""
        return self.target if self.whole is None else self.whole


class DecodeStats(struct.PyTreeNode):
    """Counts of each row, or of one request. A step is one target pass; the token that prefill
    gives is in none."""

    steps: Int[Array, " B"]
    emitted: Int[Array, " B"]
    """Tokens that steps added to the output: accepted drafts and the correction or bonus token."""
    drafted_at: Int[Array, "B J"]
    """Steps that proposed a token at this place of the block and had room left to emit it."""
    accepted_at: Int[Array, "B J"]
    """Steps whose token at this place was accepted and emitted."""
    histogram: Int[Array, "B J+1"]
    """Steps by the number of drafted tokens that they accepted."""

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> DecodeStats:
        none, per_place = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, gamma), jnp.int32)
        return cls(none, none, per_place, per_place, jnp.zeros((batch, gamma + 1), jnp.int32))

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a target pass of the loop, alias block efficiency; NaN where prefill gave the only
        token."""
        return float(self.emitted / self.steps) if self.steps else math.nan


class Trace(struct.PyTreeNode):
    """Where each token of an answer came from, one entry a new token; rubbish behind the last. For
    figures and pages of an evaluation, off in any other run."""

    place: Int[Array, "B C"]
    """The token's place in its block, from 0, if it was drafted; -1: the target wrote it."""
    weights: Float[Array, "B C R"]
    """The views' weights in its block."""
    agree: Bool[Array, "B C R"]
    """Whether it was the view's likeliest token."""
    asked: Bool[Array, "B C"]
    """Whether the views were asked at all: not for the token of prefill, nor for the one behind a
    whole block."""


class DecodeState(struct.PyTreeNode):
    """The carry of every decode loop. Caches hold all committed tokens but the newest one."""

    tokens: Int[Array, "B C"]
    """New tokens; from `count` on proposals of models that write together, or rubbish."""
    count: Int[Array, " B"]
    """New tokens committed."""
    done: Bool[Array, " B"]
    target: Any
    """The target's `KVCache`; of models that write together a tuple with one each."""
    drafter: Any
    """What the drafter carries; of alternating proposers their `Pending` proposals."""
    weighting: Any
    stats: Any
    """`DecodeStats`, or `CollaborationStats` of models that write together."""
    trace: Trace | None = None
    """Where each token came from, in programs that keep it."""


def map_caches(
    change: Callable[[KVCache], Any], tree: Any, rest: Callable[[Array], Any] = lambda leaf: leaf
) -> Any:
    """Return the tree with its caches changed, and its other leaves by `rest`."""

    def changed(part: Any) -> Any:
        return change(part) if isinstance(part, KVCache) else rest(part)

    return jax.tree.map(changed, tree, is_leaf=lambda part: isinstance(part, KVCache))


def whole(tree: Any) -> Any:
    """Have the tree whole on every device of a mesh."""
    return jax.tree.map(constrain, tree)


def split(tree: Any) -> Any:
    """Have its caches split on a mesh as the heads are that write them, and their rows; all else
    whole."""

    def split_cache(cache: KVCache) -> KVCache:
        k, v = (
            tuple(constrain(leaf, *CACHE_AXES) for leaf in leaves) for leaves in (cache.k, cache.v)
        )
        return whole(cache.replace(k=(), v=())).replace(k=k, v=v)

    return map_caches(split_cache, tree, constrain)


def place(state: DecodeState) -> DecodeState:
    """Split the caches of the target and of its KV head on a mesh as heads are; all else is whole
    on every device."""
    rest = whole(state.replace(target=None, drafter=None))
    return rest.replace(target=split(state.target), drafter=place_drafter(state.drafter))


def place_drafter(drafter: Any) -> Any:
    """Have the cache of its KV head split on a mesh, where it has one, and all else whole."""
    head = getattr(drafter, "head", None)
    return (
        whole(drafter)
        if head is None
        else whole(drafter.replace(head=None)).replace(head=split(head))
    )


def init_state(
    first: Int[Array, " B"],
    target: Any,
    stats: Any,
    options: Sampling,
    slots: int,
    drafter: Any = None,
    weighting: Any = None,
) -> DecodeState:
    """Return the state after prefill: one new token, drawn by the target. Rows that may emit
    nothing start out done."""
    ended = jnp.any(first[:, None] == options.eos, axis=1)
    return DecodeState(
        tokens=jnp.zeros((len(first), slots), jnp.int32).at[:, 0].set(first),
        count=jnp.minimum(1, options.max_new_tokens),
        done=ended | (options.max_new_tokens <= 1),
        target=target,
        drafter=drafter,
        weighting=weighting,
        stats=stats,
    )


def rewound(after: Any, before: Any) -> Any:
    """Return a state, or caches, with all but floats as before: where its rows were; what was
    written since is not read."""
    return jax.tree.map(
        lambda new, old: new if jnp.issubdtype(old.dtype, jnp.floating) else old, after, before
    )


def newest(state: DecodeState) -> Int[Array, " B"]:
    """Return the last committed token of each row: the one that the target has not read yet."""
    return jnp.take_along_axis(state.tokens, jnp.maximum(state.count, 1)[:, None] - 1, axis=1)[:, 0]


DRAW = 0
"""Stream of a step's keys with which a model's own next token is drawn."""


class Pause(struct.PyTreeNode):
    """When a loop returns before all rows are done."""

    rows: Int[Array, ""]
    """So many are done."""
    count: Int[Array, ""]
    """A row that is not done has so many tokens."""


def keep_decoding(state: DecodeState, pause: Pause | None = None) -> Array:
    """Return whether a loop goes on."""
    if pause is None:
        return ~jnp.all(state.done)
    return (jnp.sum(state.done) < pause.rows) & jnp.all(state.done | (state.count < pause.count))


def step_keys(options: Sampling, count: Int[Array, " B"], stream: int | Array) -> Array:
    """Keys of one step: a function of the row's key and its position alone, whatever the batch or
    the slot in it."""
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(options.keys, count), jnp.full_like(count, stream))


def draw_next(
    best: Callable[[], Int[Array, " B"]],
    probs: Callable[[], Float[Array, "B V"]],
    count: Int[Array, " B"],
    options: Sampling,
) -> Int[Array, " B"]:
    """Return one token a row, drawn from `probs()`, which is one-hot at `best()` for greedy rows.

    Where the program is of greedy rows alone nothing is drawn and no distribution made.
    """
    if options.greedy:
        return best()
    return draw(step_keys(options, count, DRAW), probs(), options.temperature == 0)


def cut(
    block: Int[Array, "B T"], wanted: Int[Array, " B"], room: Int[Array, " B"], options: Sampling
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Return how many of the first `wanted` tokens a row emits: none past its room or behind an
    EOS; and whether one is."""
    places = jnp.arange(block.shape[1])
    emitted = jnp.minimum(wanted, room)
    ends = jnp.any(block[..., None] == options.eos, axis=-1) & (places < emitted[:, None])
    ended = jnp.any(ends, axis=1)
    return jnp.where(ended, jnp.argmax(ends, axis=1) + 1, emitted), ended


def append(
    state: DecodeState,
    drafted: Int[Array, "B J"],
    verdict: Verdict,
    wanted: Int[Array, " B"],
    options: Sampling,
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Append the first `wanted` of the accepted drafts and the next token, cut behind the first EOS
    or at the limit.

    With 2 of 3 drafts accepted the block is [d0, d1, next, -], and `wanted` 3 takes all that
    stands. Returns the state with tokens, count, done and the lengths of the target's caches
    advanced, and what each row emitted.
    """
    places = jnp.arange(drafted.shape[1] + 1)
    padded = jnp.pad(drafted, ((0, 0), (0, 1)))
    block = jnp.where(places == verdict.count[:, None], verdict.next_token[:, None], padded)
    emitted, ended = cut(block, wanted, options.max_new_tokens - state.count, options)
    slots = jnp.where(
        places < emitted[:, None], state.count[:, None] + places, state.tokens.shape[1]
    )
    count = state.count + emitted
    state = state.replace(
        tokens=state.tokens.at[jnp.arange(len(count))[:, None], slots].set(block, mode="drop"),
        count=count,
        done=state.done | ended | (count >= options.max_new_tokens),
        target=map_caches(lambda cache: cache.replace(length=cache.length + emitted), state.target),
    )
    return state, emitted


def commit(
    state: DecodeState, drafted: Int[Array, "B J"], verdict: Verdict, options: Sampling
) -> tuple[DecodeState, Int[Array, " B"]]:
    """Append what stands of a block to every row that is not done, and count it; see `append`."""
    live, room = ~state.done, (options.max_new_tokens - state.count)[:, None]
    state, emitted = append(state, drafted, verdict, jnp.where(live, verdict.count + 1, 0), options)
    accepted = jnp.minimum(verdict.count, emitted)[:, None]
    width, stats = drafted.shape[1], state.stats  # of this block; others may be longer
    places = jnp.arange(width + 1)
    stats = DecodeStats(
        steps=stats.steps + live,
        emitted=stats.emitted + emitted,
        drafted_at=stats.drafted_at.at[:, :width].add(live[:, None] & (places[:-1] < room)),
        accepted_at=stats.accepted_at.at[:, :width].add(places[:-1] < accepted),
        histogram=stats.histogram.at[:, : width + 1].add(live[:, None] & (places == accepted)),
    )
    return state.replace(stats=stats), emitted


def init_trace(weights: Float[Array, "B R"], slots: int) -> Trace:
    """Return the trace after prefill, whose token is the target's."""
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
    """Return the trace with a block that began when rows had `count` tokens; `tokens` are those
    after it.

    `asked` are the places of the block that were verified and whose distributions the draft has
    given.
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
    """Return one row of a trace of numpy arrays as the records hold it; `agree` is None where views
    were not asked."""
    place, weights, agree, asked = (np.asarray(leaf)[row, :count] for leaf in (
        trace.place, trace.weights, trace.agree, trace.asked
    ))  # fmt: skip
    return {
        "pieces": pieces,
        "place": place.tolist(),
        "agree": [views if known else None for views, known in zip(agree.tolist(), asked.tolist())],
        "weights": np.round(weights.astype(float), 4).tolist(),
    }
