"""Define the carry of the decode loops, and commit verified blocks to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.cache import KVCache
from jaxspec.decoding.drafting.weighting import Scores
from jaxspec.decoding.processors import History, PromptTokens
from jaxspec.decoding.records import LogProbs, Trace
from jaxspec.sampling import Sampling, draw
from jaxspec.sharding import CACHE_AXES, constrain
from jaxspec.typing import Array, Bool, Float, Int
from jaxspec.verification import Verdict

Caches = TypeVar("Caches", KVCache, tuple[KVCache, ...])
"""Target's cache, or one for each collaborating model."""
Stats = TypeVar("Stats")
"""Counts of the loop."""
Tree = TypeVar("Tree")


def same_values(first: Any, second: object) -> bool:
    """Return whether two structures are of one type, and their arrays are equal."""
    if type(first) is not type(second):
        return False
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


class DecodeStats(struct.PyTreeNode):
    """Count the loop's steps and tokens, for each row or one request.

    A step is one target pass. The prefill token is not counted.
    """

    steps: Int[Array, " B"]
    emitted: Int[Array, " B"]
    """Tokens added by steps: accepted drafts, and the correction or bonus token."""
    drafted_at: Int[Array, "B J"]
    """Steps that drafted a token at this place of the block, with room left to emit it."""
    accepted_at: Int[Array, "B J"]
    """Steps whose token at this place was accepted and emitted."""
    histogram: Int[Array, "B J+1"]
    """Steps by their number of accepted drafts."""

    __eq__ = same_values

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> DecodeStats:
        none, per_place = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, gamma), jnp.int32)
        return cls(none, none, per_place, per_place, jnp.zeros((batch, gamma + 1), jnp.int32))

    @property
    def tokens_per_pass(self) -> float:
        """Return the tokens per target pass, the papers' block efficiency; NaN if no pass ran."""
        return float(self.emitted / self.steps) if self.steps else math.nan


class Pause(struct.PyTreeNode):
    """Set the conditions on which a loop returns before all rows are done."""

    rows: Int[Array, ""]
    """Pause once this many rows are done."""
    count: Int[Array, ""]
    """Pause once an unfinished row has this many tokens."""


class DecodeState(struct.PyTreeNode, Generic[Caches, Stats]):
    """Carry all that a decode loop changes. Caches hold every committed token except the newest."""

    tokens: Int[Array, "B C"]
    """New tokens; from `count` on pending proposals (`Alternating`), or undefined."""
    count: Int[Array, " B"]
    """Number of committed new tokens."""
    done: Bool[Array, " B"]
    target: Caches
    """Target's cache, or one for each collaborating model."""
    drafter: Any
    """State of each source of drafts, `Pending` proposals (`Alternating`), or None."""
    weighting: Scores | Float[Array, "B R"] | None
    """State of the weighting: `Scores` of an adaptive rule, or the weights."""
    stats: Stats
    """`DecodeStats`, or `CollaborationStats` of collaborating models."""
    trace: Trace | None = None
    """Origin of each token, if the program traces."""
    logprobs: LogProbs | None = None
    """Log probabilities, if the options record them."""
    prompt: PromptTokens | None = None
    """What processors read of the prompts, if there are processors."""

    @classmethod
    def prefilled(
        cls,
        logits: Float[Array, "B V"],
        first: Int[Array, " B"],
        target: Caches,
        stats: Stats,
        options: Sampling,
        slots: int,
        prompt: PromptTokens | None,
    ) -> Self:
        """Return the state after prefill, with one new token, drawn by the target from `logits`.

        Nothing drafts yet.
        """
        zeros = jnp.zeros_like(first)
        state: Any = cls(
            tokens=jnp.zeros((len(first), slots), jnp.int32),
            count=zeros,
            done=zeros.astype(bool),
            target=map_caches(lambda cache: cache.replace(split=True), target),
            drafter=None,
            weighting=None,
            stats=stats,
            prompt=prompt,
        )
        return state.begun(logits, first, options)

    def begun(
        self, logits: Float[Array, "B V"], first: Int[Array, " B"], options: Sampling
    ) -> Self:
        """Return a state after prefill with these first new tokens, drawn from `logits`.

        Rows whose limit is at most one token start out done.
        """
        ended = jnp.any(first[:, None] == options.eos, axis=1)
        tokens, record = self.tokens.at[:, 0].set(first), None
        if options.logprobs is not None:
            most = min(options.logprobs, logits.shape[-1])
            record = LogProbs.zeros(len(first), tokens.shape[1], most)
            record = record.extended(jnp.zeros_like(first), tokens, logits[:, None])
        return self.replace(
            tokens=tokens,
            count=jnp.minimum(1, options.max_new_tokens),
            done=ended | (options.max_new_tokens <= 1),
            logprobs=record,
        )

    @property
    def newest(self) -> Int[Array, " B"]:
        """Return each row's last committed token, which the target has not read yet."""
        last = jnp.maximum(self.count, 1)[:, None] - 1
        return jnp.take_along_axis(self.tokens, last, axis=1)[:, 0]

    @property
    def history(self) -> History | None:
        """Return the tokens before each row's next score; None without processors."""
        return History.of(self.prompt, self.tokens, self.count)

    def goes_on(self, pause: Pause | None) -> Bool[Array, ""]:
        """Return whether the loop continues."""
        if pause is None:
            return ~jnp.all(self.done)
        return (jnp.sum(self.done) < pause.rows) & jnp.all(self.done | (self.count < pause.count))

    def appended(
        self,
        drafted: Int[Array, "B J"],
        verdict: Verdict,
        most: Int[Array, " B"],
        options: Sampling,
        logits: Float[Array, "B T V"] | None,
    ) -> tuple[DecodeState[Caches, Stats], Int[Array, " B"]]:
        """Append at most `most` of the accepted drafts and next token, up to EOS or the limit.

        With 2 of 3 drafts accepted the block is [d0, d1, next, -], and `most` 3 takes all that is
        verified. Returns the state with its tokens, count, done and lengths of the target's caches
        advanced, and the number of tokens that each row emitted.

        logits: Logits of the block's tokens, for the record of log probabilities.
        """
        places = jnp.arange(drafted.shape[1] + 1)
        padded = jnp.pad(drafted, ((0, 0), (0, 1)))
        block = jnp.where(places == verdict.count[:, None], verdict.next_token[:, None], padded)
        emitted = jnp.minimum(most, options.max_new_tokens - self.count)
        ends = jnp.any(block[..., None] == options.eos, axis=-1) & (places < emitted[:, None])
        ended = jnp.any(ends, axis=1)
        emitted = jnp.where(ended, jnp.argmax(ends, axis=1) + 1, emitted)
        slots = self.count[:, None] + places
        slots = jnp.where(places < emitted[:, None], slots, self.tokens.shape[1])
        count = self.count + emitted
        tokens = self.tokens.at[jnp.arange(len(count))[:, None], slots].set(block, mode="drop")
        record = self.logprobs
        if record is not None:
            assert logits is not None
            record = record.extended(self.count, tokens, logits)
        target = map_caches(lambda cache: cache.replace(length=cache.length + emitted), self.target)
        state = self.replace(
            tokens=tokens,
            logprobs=record,
            count=count,
            done=self.done | ended | (count >= options.max_new_tokens),
            target=target,
        )
        return state, emitted


def map_caches(change: Callable[[KVCache], KVCache], caches: Caches) -> Caches:
    """Return what `change` makes of a cache, or of each cache of several."""
    return jax.tree.map(change, caches, is_leaf=lambda part: isinstance(part, KVCache))


def map_placed(split: Callable[[Any], Any], whole: Callable[[Any], Any], tree: Tree) -> Tree:
    """Map `split` over keys and values that a mesh splits, and `whole` over all else.

    What holds such keys and values has them as `k` and `v`, and says so by `split`.
    """

    def placed(part: Any) -> Any:
        if not getattr(part, "split", False):
            return whole(part)
        keys = jax.tree.map(split, (part.k, part.v))
        return whole(part.replace(k=(), v=())).replace(k=keys[0], v=keys[1])

    return jax.tree.map(placed, tree, is_leaf=lambda part: hasattr(part, "split"))


def whole(tree: Tree) -> Tree:
    """Replicate the tree on every device of a mesh."""
    return jax.tree.map(constrain, tree)


def place(tree: Tree) -> Tree:
    """Split keys and values over a mesh, and replicate the rest."""
    return map_placed(lambda leaf: constrain(leaf, *CACHE_AXES), whole, tree)


DRAW = 0
"""Stream of a step's keys that draws a model's own next token."""


def step_keys(options: Sampling, count: Int[Array, " B"], stream: int | Array) -> Array:
    """Return one step's keys, a function of the row's key, its position and the stream.

    They depend neither on the batch nor on the row's index in the batch.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(options.keys, count), jnp.full_like(count, stream))


def draw_next(
    best: Callable[[], Int[Array, " B"]],
    probs: Callable[[], Float[Array, "B V"]],
    count: Int[Array, " B"],
    options: Sampling,
) -> Int[Array, " B"]:
    """Draw one token for each row from `probs()`, which is one-hot at `best()` for greedy rows.

    A greedy program takes `best()` and computes no distribution.
    """
    if options.greedy:
        return best()
    return draw(step_keys(options, count, DRAW), probs(), options.temperature == 0)


def commit(
    state: DecodeState[Caches, DecodeStats],
    drafted: Int[Array, "B J"],
    verdict: Verdict,
    options: Sampling,
    logits: Float[Array, "B T V"],
) -> tuple[DecodeState[Caches, DecodeStats], Int[Array, " B"]]:
    """Append the verified tokens of a block to every unfinished row and count them.

    logits: Logits of the block's tokens.
    """
    live, room = ~state.done, (options.max_new_tokens - state.count)[:, None]
    most = jnp.where(live, verdict.count + 1, 0)
    state, emitted = state.appended(drafted, verdict, most, options, logits)
    accepted = jnp.minimum(verdict.count, emitted)[:, None]
    width, stats = drafted.shape[1], state.stats  # the width of this block; others may be longer
    places = jnp.arange(width + 1)
    stats = DecodeStats(
        steps=stats.steps + live,
        emitted=stats.emitted + emitted,
        drafted_at=stats.drafted_at.at[:, :width].add(live[:, None] & (places[:-1] < room)),
        accepted_at=stats.accepted_at.at[:, :width].add(places[:-1] < accepted),
        histogram=stats.histogram.at[:, : width + 1].add(live[:, None] & (places == accepted)),
    )
    return state.replace(stats=stats), emitted
