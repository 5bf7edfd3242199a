"""Process scores by the tokens before them: biases, penalties and bans.

A token may lower its own score after it, so the scores at a place of a block depend on the drafted
tokens before that place; at a node of a tree, on its ancestors. The target's scores are processed
before they are verified, so speculation stays exact. A draft's are processed too, because that
raises acceptance. The order is that of transformers' `generate`, with vLLM's penalties behind:

| processor                   | score of token x                                              |
|-----------------------------|---------------------------------------------------------------|
| biases                      | + value, for the first `until` new tokens or behind a prefix  |
| repetition penalty r        | / r if it is positive, else * r, for x in prompt or answer    |
| frequency and presence f, p | - f * n - p, for x that is n > 0 times in the answer          |
| n-grams of size n           | -inf, if the last n - 1 tokens and x are in prompt and answer |
| grammar                     | -inf, if no answer of its form goes on with x                 |

A grammar wins over the others: where they ban all its tokens, these are equally likely.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decoding.grammars import allowed_tokens
from jaxspec.models.inputs import PromptRows
from jaxspec.sampling import Biases, Processors
from jaxspec.typing import Array, Bool, Float, Int

NO_TOKEN = -1
"""Id of padding, and of lookup's image slots, which equals no token."""


class PromptTokens(struct.PyTreeNode):
    """Hold what processors read of the prompts, which stays while answers are written."""

    contains: Bool[Array, "B V"]
    """Whether a token is in the prompt."""
    text: Int[Array, "B L"] | None
    """Prompts that end at slot L, `NO_TOKEN` before them; None if no processor reads the order."""

    def fitted(self, other: PromptTokens) -> PromptTokens:
        """Return the prompts with as many slots as others."""
        if self.text is None or other.text is None:
            return self
        return self.replace(text=ending_at(self.text, other.text.shape[1]))


def prompt_tokens(
    rows: PromptRows, size: int, processors: Processors | None
) -> PromptTokens | None:
    """Return the prompts for a vocabulary of `size`; None without processors."""
    if processors is None:
        return None
    text = right_aligned(rows.tokens, rows.length)
    contains = jnp.zeros((len(text), size), bool)
    contains = contains.at[jnp.arange(len(text))[:, None], _vocabulary_index(size, text)].set(
        True, mode="drop"
    )
    return PromptTokens(contains, text if processors.reads_order else None)


def right_aligned(tokens: Int[Array, "B L"], length: Int[Array, " B"]) -> Int[Array, "B L"]:
    """Return right-padded rows moved to the end, with `NO_TOKEN` before them."""
    width = tokens.shape[1]
    slots = jnp.arange(width) - width + length[:, None]
    moved = jnp.take_along_axis(tokens, jnp.maximum(slots, 0), axis=1)
    return jnp.where(slots < 0, NO_TOKEN, moved)


def ending_at(text: Int[Array, "B L"], end: int) -> Int[Array, "B end"]:
    """Return texts that end at slot `end`: with `NO_TOKEN` before them, or without their first."""
    padding = ((0, 0, 0), (end - text.shape[1], 0, 0))
    return jax.lax.pad(text, jnp.asarray(NO_TOKEN, text.dtype), padding)


class History(struct.PyTreeNode):
    """Hold the tokens before each of T scores: prompt, new tokens, and some of N drafted ones."""

    prompt: PromptTokens
    tokens: Int[Array, "B C"]
    """New tokens; entries from `count` on are undefined."""
    count: Int[Array, " B"]
    occurrences: Int[Array, "B V"]
    """Number of times that a token is among the new ones."""
    drafted: Int[Array, "B N"]
    before: Bool[Array, "#B T N"]
    """Whether a drafted token comes before the score. Parents come before children."""

    @classmethod
    def of(
        cls, prompt: PromptTokens | None, tokens: Int[Array, "B C"], count: Int[Array, " B"]
    ) -> History | None:
        """Return the history of one score behind `count` new tokens; None without processors."""
        if prompt is None:
            return None
        rows, size = jnp.arange(len(count))[:, None], prompt.contains.shape[1]
        new = jnp.where(jnp.arange(tokens.shape[1]) < count[:, None], tokens, NO_TOKEN)
        occurrences = jnp.zeros(prompt.contains.shape, jnp.int32)
        occurrences = occurrences.at[rows, _vocabulary_index(size, new)].add(1, mode="drop")
        none = jnp.zeros((len(count), 0), jnp.int32), jnp.zeros((1, 1, 0), bool)
        return cls(prompt, tokens, count, occurrences, *none)

    def behind(self, drafted: Int[Array, "B N"], before: Bool[Array, "#B T N"]) -> History:
        """Return the history of T scores, with the drafted tokens before each."""
        return self.replace(drafted=drafted, before=before)

    @property
    def index(self) -> Int[Array, "B T"]:
        """Return the number of new and drafted tokens before each score."""
        return self.count[:, None] + self.before.sum(-1)

    @property
    def text(self) -> Int[Array, "B T S"]:
        """Return all tokens before each score in order, `NO_TOKEN` in all other slots.

        The answer begins at slot L, behind the prompt.
        """
        prompt = self.prompt.text
        assert prompt is not None
        begin, new = prompt.shape[1], self.tokens.shape[1]
        answer = jnp.where(jnp.arange(new) < self.count[:, None], self.tokens, NO_TOKEN)
        room = jnp.full_like(self.drafted, NO_TOKEN)
        text = jnp.concatenate([prompt, answer, room], axis=1)[:, None]
        depth = jnp.cumsum(self.before, axis=-1) - 1
        slots = jnp.where(self.before, begin + self.count[:, None, None] + depth, text.shape[-1])
        rows, scores = _first_indices(slots)
        text = jnp.broadcast_to(text, (*slots.shape[:2], text.shape[-1]))
        return text.at[rows, scores, slots].set(self.drafted[:, None], mode="drop")


def processed(
    scores: Float[Array, "B T V"], history: History | None, processors: Processors | None
) -> Float[Array, "B T V"]:
    """Return the scores that the rows' processors make of these; without processors, the same."""
    if history is None or processors is None:
        return scores
    size, drafted = scores.shape[-1], history.drafted[:, None]
    text = history.text if processors.reads_order else None
    biases = processors.biases
    scores = scores.astype(jnp.float32)
    rows, columns = _first_indices(scores)
    values = jnp.where(_applies(biases, history, text), biases.values[:, None], 0.0)
    scores = scores.at[rows, columns, biases.tokens[:, None]].add(values, mode="drop")
    occurrences = jnp.broadcast_to(history.occurrences[:, None], scores.shape)
    fresh = _vocabulary_index(size, jnp.where(history.before, drafted, NO_TOKEN))
    occurrences = occurrences.at[rows, columns, fresh].add(1, mode="drop")
    repetition, presence, frequency = (
        penalty[:, None, None]
        for penalty in (processors.repetition, processors.presence, processors.frequency)
    )
    occurs = occurrences > 0
    penalised = jnp.where(scores < 0, scores * repetition, scores / repetition)
    scores = jnp.where(history.prompt.contains[:, None] | occurs, penalised, scores)
    scores = scores - frequency * occurrences - presence * occurs
    if processors.ngram is not None:
        assert text is not None
        repeated = _vocabulary_index(
            size, jnp.where(_repeats(text, history, processors.ngram), text, NO_TOKEN)
        )
        scores = scores.at[rows, columns, repeated].set(-jnp.inf, mode="drop")
    if processors.grammar is None:
        return scores
    arrays = history.tokens, history.count, history.drafted, history.before
    fits = allowed_tokens(processors.grammar, *arrays, size)
    masked = jnp.where(fits, scores, -jnp.inf)
    banned = (masked == -jnp.inf).all(-1, keepdims=True) & (processors.grammar > 0)[:, None, None]
    return jnp.where(banned & fits, 0.0, masked)


def allowed(
    probs: Float[Array, "B T V"], history: History | None, processors: Processors | None
) -> Float[Array, "B T V"]:
    """Return probabilities, which may sum to less than 1, without those of banned tokens."""
    if history is None or processors is None:
        return probs
    return jnp.where(processed(jnp.zeros_like(probs), history, processors) > -jnp.inf, probs, 0.0)


def _applies(
    biases: Biases, history: History, text: Int[Array, "B T S"] | None
) -> Bool[Array, "B T K"]:
    """Return whether each bias holds for each score."""
    holds = history.index[..., None] < biases.until[:, None]
    width = biases.prefix.shape[-1]
    if not width:
        return holds
    assert text is not None
    newest = jnp.stack(
        [_token_before(text, history, steps) for steps in range(width, 0, -1)], axis=-1
    )
    prefix = biases.prefix[:, None]
    fits = (prefix == NO_TOKEN) | (prefix == newest[:, :, None])
    return holds & jnp.all(fits, axis=-1)


def _repeats(
    text: Int[Array, "B T S"], history: History, size: Int[Array, " B"]
) -> Bool[Array, "B T S"]:
    """Return whether the token in a slot ended an n-gram that it would end again at the score.

    Behind `a b c a b`, for n = 3, the slot of c: the two tokens before it are the newest two.
    """
    size = jnp.where(size > text.shape[-1], 0, size)  # longer than the text, so none repeats
    slots, length = jnp.arange(text.shape[-1]), size[:, None, None] - 1

    def compare(steps: Array, same: Array) -> Array:
        newest = _token_before(text, history, steps)[..., None]
        earlier = jnp.where(slots >= steps, jnp.roll(text, steps, axis=-1), NO_TOKEN)
        return same & ((steps > length) | ((earlier == newest) & (newest != NO_TOKEN)))

    every = (text != NO_TOKEN) & (length >= 0)
    return jax.lax.fori_loop(1, jnp.maximum(size.max(), 1), compare, every)


def _token_before(
    text: Int[Array, "B T S"], history: History, steps: int | Array
) -> Int[Array, "B T"]:
    """Return the token `steps` steps before each score; `NO_TOKEN` before the prompt."""
    assert history.prompt.text is not None
    slots = history.prompt.text.shape[1] + history.index - steps
    tokens = jnp.take_along_axis(text, jnp.maximum(slots, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(slots < 0, NO_TOKEN, tokens)


def _first_indices(array: Array) -> tuple[Array, Array]:
    """Return the indices of the first two axes, to index three."""
    return jnp.arange(array.shape[0])[:, None, None], jnp.arange(array.shape[1])[:, None]


def _vocabulary_index(size: int, tokens: Array) -> Array:
    """Return the tokens as indices of a vocabulary; those outside it, `size`, which is dropped."""
    return jnp.where((tokens >= 0) & (tokens < size), tokens, size)
