"""Language models that are tables serve as oracles, with the exact laws of what several of them
write together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache, write
from jaxspec.decoding.inputs import Member, PromptBatch, Prompts
from jaxspec.models.inputs import PromptRows
from jaxspec.sampling import Sampling
from jaxspec.typing import Array

ORDER = 3
"""Tokens that decide what follows."""
Logits = Callable[[np.ndarray], np.ndarray]


class Text(NamedTuple):
    vocab_size: int


@dataclass(frozen=True)
class TableModel:
    """Read a table [V**ORDER, V] of logits at the newest tokens in the cache, whatever lies
    there.
    """

    vocabulary: int

    @property
    def text(self) -> Text:
        return Text(self.vocabulary)

    def embed(self, params: Array, rows: PromptRows, features: None, pool: None) -> Array:
        return rows.tokens

    def prefill(
        self, params: Array, embeds: Array, rows: PromptRows, slots: int
    ) -> tuple[Array, KVCache]:
        kept = jnp.pad(embeds, ((0, 0), (0, slots - embeds.shape[1])))[:, None, :, None]
        kept = kept.astype(jnp.float32)
        cache = KVCache((kept,), (), rows.length, jnp.zeros_like(rows.length))
        return self._logits(params, kept, rows.length[:, None] - 1)[:, 0], cache

    def extend(
        self, params: Array, tokens: Array, cache: KVCache, tree: None = None
    ) -> tuple[Array, KVCache]:
        at = cache.length[:, None] + jnp.arange(tokens.shape[1])
        kept = write(cache.k[0], tokens[..., None, None].astype(jnp.float32), at)
        return self._logits(params, kept, at), cache.replace(
            k=(kept,), length=cache.length + tokens.shape[1]
        )

    def _logits(self, table: Array, kept: Array, at: Array) -> Array:
        state, tokens = jnp.zeros_like(at), kept[:, 0, :, 0].astype(jnp.int32)
        for back in range(ORDER - 1, -1, -1):
            state = state * self.vocabulary + jnp.take_along_axis(
                tokens, at - back, axis=1, mode="clip"
            )
        return table[state]


def members(count: int, vocabulary: int) -> tuple[Member, ...]:
    return tuple(Member(TableModel(vocabulary)) for _ in range(count))  # type: ignore[arg-type]


def tables(count: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    """Return logits [M, V**ORDER, V] of models that agree now and then."""
    rng = np.random.default_rng(seed)
    shape = (vocabulary**ORDER, vocabulary)
    return (rng.normal(size=shape) + 1.2 * rng.normal(size=(count, *shape))).astype(np.float32)


def prompts(count: int, contexts: np.ndarray) -> PromptBatch:
    """Return the same prompts [B, ORDER] for every member."""
    tokens = jnp.asarray(contexts, jnp.int32)
    rows = PromptRows(tokens, jnp.full(len(tokens), ORDER, jnp.int32))
    return PromptBatch(rows, None, peers=(Prompts(rows),) * (count - 1))


def options(temperature: np.ndarray, new: int, seed: int, **fields: Any) -> Sampling:
    rows = len(temperature)
    return Sampling(
        temperature=jnp.asarray(temperature, jnp.float32),
        top_k=jnp.full(rows, fields.get("top_k", 0), jnp.int32),
        top_p=jnp.full(rows, fields.get("top_p", 1.0), jnp.float32),
        max_new_tokens=jnp.full(rows, new, jnp.int32),
        eos=jnp.asarray([-1]),
        key_data=jax.random.key_data(
            jax.random.split(jax.random.key(seed, impl="threefry2x32"), rows)
        ),
    )


def joint(
    table: np.ndarray, law: Callable[[np.ndarray], np.ndarray], context: np.ndarray, new: int
) -> np.ndarray:
    """Return P(x_1 ... x_new | context) [V, ..., V], where `law` makes logits [M, V] the next
    token's distribution.
    """
    vocabulary = table.shape[-1]
    follows = np.stack(
        [law(table[:, state].astype(np.float64)) for state in range(vocabulary**ORDER)]
    )
    probs = np.ones(())
    for depth in range(new):
        steps = np.stack(
            [
                follows[state_of((*context, *prefix), vocabulary)]
                for prefix in np.ndindex(*[vocabulary] * depth)
            ]
        )
        probs = probs[..., None] * steps.reshape(*[vocabulary] * depth, vocabulary)
    return probs


def state_of(tokens: Any, vocabulary: int) -> int:
    state = 0
    for token in tokens[-ORDER:]:
        state = state * vocabulary + int(token)
    return state
