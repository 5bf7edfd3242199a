"""Prefill, and the plain decode loop that every speed-up is measured against."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodeState, Pause, PromptBatch, commit, draw_next, going_on, init_state, newest
from jaxspec.models import LanguageModel
from jaxspec.sampling import Sampling, argmax, distribution
from jaxspec.typing import Array, Float, Int, Params
from jaxspec.verification import Verdict


@dataclass(frozen=True)
class Autoregressive:
    """A target on its own; static, part of the compiled program. `params` is {"target": ...}."""

    target: LanguageModel

    @property
    def spare_slots(self) -> int:
        """Cache slots past the last new token that a step may write to."""
        return 0

    def prefill(self, params: Params, batch: PromptBatch, options: Sampling, new_slots: int) -> DecodeState:
        """Runs the prompts; the state holds each row's first new token. `new_slots` bounds what a row may add."""
        slots = batch.target.tokens.shape[1] + new_slots
        first, _, cache = prefill_target(self.target, params["target"], batch, options, slots)
        return init_state(first, cache, None, None, options, new_slots, gamma=0)

    def decode(
        self, params: Params, state: DecodeState, options: Sampling, pause: Pause | None = None
    ) -> DecodeState:
        """One token a step until every row is done, or the loop is to pause, in one `while_loop`."""
        nothing = jnp.zeros((state.count.shape[0], 0), jnp.int32)

        def step(state: DecodeState) -> DecodeState:
            logits, cache = self.target.extend(params["target"], newest(state)[:, None], state.target)
            token = next_token(logits[:, 0], state.count, options)
            state = state.replace(target=cache.replace(length=state.target.length))
            return commit(state, nothing, Verdict(jnp.zeros_like(token), token), options)[0]

        return jax.lax.while_loop(lambda state: going_on(state, pause), step, state)


def prefill_target(
    model: LanguageModel,
    params: Params,
    batch: PromptBatch,
    options: Sampling,
    slots: int,
    keep_hidden: bool = False,
) -> tuple[Int[Array, " B"], Float[Array, "B U P E"] | None, KVCache]:
    """Runs the prompts: the first new tokens, the image features, and a cache of `slots`."""
    rows = batch.target
    features = None if batch.images is None else model.encode(params, batch.images)
    logits, cache = model.prefill(params, model.embed(params, rows, features), rows, slots, keep_hidden)
    return next_token(logits, jnp.zeros_like(rows.length), options), features, cache


def next_token(logits: Float[Array, "B V"], count: Int[Array, " B"], options: Sampling) -> Int[Array, " B"]:
    """One token a row from the model's own distribution."""
    return draw_next(lambda: argmax(logits), lambda: distribution(logits, options), count, options)
