"""Decode one model plainly or speculatively (draft -> extend -> verify -> commit)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, TreeMask, keep_path
from jaxspec.decoding.drafting.drafter import Drafter
from jaxspec.decoding.drafting.weighting import Weighting
from jaxspec.decoding.inputs import Member, PromptBatch
from jaxspec.decoding.processors import History, PromptTokens, processed, prompt_tokens
from jaxspec.decoding.program import Program
from jaxspec.decoding.records import Trace
from jaxspec.decoding.sources.source import Committed, Prefilled, Source, Verified
from jaxspec.decoding.state import DecodeState, DecodeStats, commit, draw_next, step_keys
from jaxspec.models.language_model import LanguageModel
from jaxspec.sampling import Sampling, argmax, by_place, distribution, tempered
from jaxspec.typing import Array, Features, Float, Int, Params, Tokens
from jaxspec.verification import Draft, Verdict, chain_of_path, match, verify

WEIGHTS_STREAM = 1 << 20
"""Stream of a block's keys for weights. Below it are those of drafted places, and of a tree's nodes
with children; the verdict's is the last node, a leaf."""
TargetState = DecodeState[KVCache, DecodeStats]
"""State of a loop in which one model writes."""
Tree = TypeVar("Tree")


class TargetRead(NamedTuple):
    """Hold what the target made of B prompts."""

    logits: Float[Array, "B V"]
    """Logits of the token after each prompt."""
    features: Features | None
    """Features that its tower makes of the images; None without any."""
    cache: KVCache


class TargetProgram(Program[TargetState]):
    """Let one model write. `params["target"]` holds its parameters."""

    target: LanguageModel
    width: int
    """Tokens that each pass of the loop reads, padding included; 1 reads a block as it is."""

    @property
    def members(self) -> tuple[Member, ...]:
        return (Member(self.target),)

    def weights(self, params: Params) -> tuple[Params, ...]:
        return (params["target"],)

    def caches(self, state: TargetState) -> tuple[KVCache, ...]:
        return (state.target,)

    @property
    def target_states(self) -> tuple[int, ...] | None:
        """Return the hidden states that the target's cache keeps, see `KVCache.kept`."""
        states = (source.target_states for source in self.sources)
        return next((numbers for numbers in states if numbers is not None), None)

    def prefill(
        self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
    ) -> tuple[TargetState, Float[Array, "B V"]]:
        slots = batch.target.tokens.shape[1] + new_slots + self.spare_slots
        read = prefill_target(self.target, params["target"], batch, slots, self.target_states)
        return self.opened(params, batch, read, options, new_slots)

    def opened(
        self,
        params: Params,
        batch: PromptBatch,
        read: TargetRead,
        options: Sampling,
        new_slots: int,
    ) -> tuple[TargetState, Float[Array, "B V"]]:
        """Return what `prefill` does, once the target has read the prompts."""
        prompt = prompt_tokens(batch.prompt, read.logits.shape[-1], options.processors)
        logits, cache, prompt = copied((read.logits, read.cache, prompt), batch, options)
        first = first_token(logits, prompt, options)
        stats = DecodeStats.zeros(len(first), self.most_tokens - 1)
        state = DecodeState.prefilled(logits, first, cache, stats, options, new_slots, prompt)
        return state, logits

    def begin(
        self, params: Params, state: TargetState, logits: Float[Array, "B V"], options: Sampling
    ) -> TargetState:
        return state.begun(logits, first_token(logits, state.prompt, options), options)

    @property
    def compiler_options(self) -> dict[str, bool]:
        """Return the option that rounds where the program says so, if passes have one width.

        By default XLA leaves out some roundings to 16 bits, and which ones depends on the rest of
        the program. So the target's image features would depend on a draft that reads them too.
        """
        return {"xla_allow_excess_precision": False} if self.width > 1 else {}

    def extend(
        self, params: Params, tokens: Tokens, cache: KVCache, tree: TreeMask | None = None
    ) -> tuple[Float[Array, "B T V"], KVCache]:
        """Return the logits after each of T tokens, or nodes of a tree, and the cache.

        The cache holds their keys, but keeps its length.

        The last bit of a product depends on the number of rows that are multiplied together. A
        plain step reads 1 token and a block of gamma = 3 reads 4, so their logits differ a little,
        and so may answers, above all in 16 bits. At one width both are the same function of the
        tokens before: with width 8 the step reads 1 token and 7 of padding, the block 4 and 4.
        Tokens do not see the padding behind them, and the next pass overwrites its keys.
        """
        count = tokens.shape[1]
        padded = jnp.pad(tokens, ((0, 0), (0, max(self.width - count, 0))))
        logits, written = self.target.extend(params["target"], padded, cache, tree)
        return logits[:, :count], written.replace(length=cache.length)


@dataclass(frozen=True)
class Autoregressive(TargetProgram):
    """Decode only with the target, one token in each step."""

    target: LanguageModel
    width: int = 1

    @property
    def spare_slots(self) -> int:
        return self.width if self.width > 1 else 0

    @property
    def most_tokens(self) -> int:
        return 1

    def step(self, params: Params, state: TargetState, options: Sampling) -> TargetState:
        logits, cache = self.extend(params, state.newest[:, None], state.target)
        scores = processed(logits, state.history, options.processors)
        token = next_token(scores[:, 0], state.count, options)
        verdict = Verdict(jnp.zeros_like(token), token)
        nothing = jnp.zeros((len(token), 0), jnp.int32)
        return commit(state.replace(target=cache), nothing, verdict, options, logits)[0]


@dataclass(frozen=True)
class Speculator(TargetProgram):
    """Decode with a target, a drafter and a weighting of its sources.

    `params` also has an entry for each source with parameters, by its name.
    """

    target: LanguageModel
    drafter: Drafter
    weighting: Weighting
    traces: bool = False
    """Whether to record the origin of each token."""
    width: int = 1

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.drafter.sources

    @property
    def spare_slots(self) -> int:
        return max(self.width, self.drafter.nodes + 1)

    @property
    def most_tokens(self) -> int:
        return self.drafter.gamma + 1

    def opened(
        self,
        params: Params,
        batch: PromptBatch,
        read: TargetRead,
        options: Sampling,
        new_slots: int,
    ) -> tuple[TargetState, Float[Array, "B V"]]:
        """Run the prompts through the draft, and draw the first token from the target.

        The released TABED code drafts that token too, in a block that contains the prompt. Here
        it belongs to no block.
        """
        state, logits = super().opened(params, batch, read, options, new_slots)
        assert batch.weights is not None
        room = new_slots + max(self.drafter.nodes, self.drafter.reads) + 1
        prefilled = Prefilled(params, batch, read.features, read.cache, room)
        parts = self.drafter.prefill(prefilled), batch.weights
        drafter, weights = copied(parts, batch, options)
        trace = Trace.of_prefill(weights, new_slots) if self.traces else None
        weighting = self.weighting.init(weights)
        return state.replace(drafter=drafter, weighting=weighting, trace=trace), logits

    def step(self, params: Params, state: TargetState, options: Sampling) -> TargetState:
        """Run one block for all rows; each row accepts as many drafts as its own verdict says."""
        gamma = self.drafter.gamma
        last, history = state.newest, state.history
        weights = self.weighting.weights(
            state.weighting, step_keys(options, state.count, WEIGHTS_STREAM)
        )
        with jax.named_scope("draft"):
            reads = self.drafter.reads
            committed = Committed(params, state.tokens, state.count, state.target, reads)
            draft, scratch = self.drafter.draft(committed, state.drafter, weights, options, history)
        with jax.named_scope("extend"):
            tokens = jnp.concatenate([last[:, None], draft.tokens], axis=1)
            mask = None if draft.tree is None else draft.tree.mask
            logits, cache = self.extend(params, tokens, state.target, mask)
        with jax.named_scope("verify"):
            behind = history and history.behind(draft.tokens, draft.before)
            scores = processed(logits, behind, options.processors)
            verdict = self.judge(scores, draft, state, options)
        with jax.named_scope("commit"):
            valid = (jnp.arange(gamma) <= verdict.count[:, None]) & ~state.done[:, None]
            soft = by_place(lambda scores: tempered(scores, options.temperature))(scores)
            path = None
            if verdict.path is not None:  # from here on the accepted path is a chain
                cache = keep_path(cache, state.target.length, verdict.path)
                draft, nodes, read = chain_of_path(draft, verdict.path)
                soft, logits = (
                    jnp.take_along_axis(x, nodes[..., None], axis=1) for x in (soft, logits)
                )
                valid, path = valid & (read[:, :-1] >= 0), read[:, 1:]
            # `soft`, not the verified distribution: filters and one-hots hide how close a view is.
            weighting = self.weighting.observe(
                state.weighting, weights, soft[:, :gamma], draft.view_probs, valid
            )
            state = state.replace(target=cache, weighting=weighting)
            count = state.count
            state, emitted = commit(state, draft.tokens, verdict, options, logits)
            if state.trace is not None:
                trace = state.trace.extended(count, state.tokens, draft, verdict, weights, valid)
                state = state.replace(trace=trace)
            drafter = self.drafter.commit(state.drafter, scratch, Verified(emitted, path))
            return state.replace(drafter=drafter)

    def judge(
        self, scores: Float[Array, "B T V"], draft: Draft, state: TargetState, options: Sampling
    ) -> Verdict:
        """Return the verdict on a draft, given the target's scores after each token it read."""
        if options.greedy:
            return match(argmax(scores), draft)
        p = by_place(lambda scores: distribution(scores, options))(scores)
        return verify(
            p, draft, step_keys(options, state.count, self.drafter.nodes), options.temperature == 0
        )


def prefill_target(
    model: LanguageModel,
    params: Params,
    batch: PromptBatch,
    slots: int,
    layers: tuple[int, ...] | None = None,
) -> TargetRead:
    """Run the prompts.

    layers: Hidden states that the cache keeps, see `KVCache.kept`.
    """
    rows, features = batch.target, batch.features
    if batch.images is not None:
        features = model.encode(params, batch.images)
    embeds = model.embed(params, rows, features)
    if batch.past is None:
        logits, cache = model.prefill(params, embeds, rows, slots, layers)
    else:
        logits, cache = model.resume(params, embeds, rows, batch.past)
    return TargetRead(logits, features, cache)


def copied(tree: Tree, batch: PromptBatch, options: Sampling) -> Tree:
    """Repeat the rows of a tree n times if the options are for n samples of each prompt.

    Leaves are [B, ...] or view-major [R*B, ...]: n = 2 makes rows a b into a a b b, in each view.
    """
    rows = len(batch.target.length)
    copies = len(options.temperature) // rows

    def repeat(leaf: Array) -> Array:
        parts = leaf.reshape(len(leaf) // rows, rows, *leaf.shape[1:])
        return jnp.repeat(parts, copies, axis=1).reshape(len(leaf) * copies, *leaf.shape[1:])

    return tree if copies == 1 else jax.tree.map(repeat, tree)


def first_token(
    logits: Float[Array, "B V"], prompt: PromptTokens | None, options: Sampling
) -> Int[Array, " B"]:
    """Draw the first new token of each row."""
    zero = jnp.zeros(len(logits), jnp.int32)
    history = History.of(prompt, zero[:, None], zero)
    scores = processed(logits[:, None], history, options.processors)[:, 0]
    return next_token(scores, zero, options)


def next_token(
    scores: Float[Array, "B V"], count: Int[Array, " B"], options: Sampling
) -> Int[Array, " B"]:
    """Draw one token for each row from the model's own distribution."""
    return draw_next(lambda: argmax(scores), lambda: distribution(scores, options), count, options)
