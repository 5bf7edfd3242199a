"""On-policy distillation: the draft is taught on what it says itself (DistillSpec, arXiv 2310.08461).

The draft answers inside the training step, from its parameters at that step: batches stay a function of the step, and
a run that was stopped goes on as if it had not been.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.decoding.views import View
from jaxspec.models import LanguageModel
from jaxspec.models.inputs import TEXT, PromptRows
from jaxspec.training.conversations import TEACHER
from jaxspec.typing import Array, Bool, Float, Int, Params


def answered(
    model: LanguageModel,
    params: Params,
    batch: Mapping[str, Array],
    rows: PromptRows,
    features: Float[Array, "B U P E"] | None,
    view: View,
    max_new_tokens: int,
) -> dict[str, Array]:
    """The batch with all that follows each row's first question written anew by the draft, sampled at temperature 1.
    `features` are the tower's, of the draft's images.

    An answer ends with EOS, after `max_new_tokens`, or where a row of the batch ends, the draft's or the teacher's.
    Rows without an answer to learn stay so. No gradient goes through the sampling.
    """
    params, features = jax.lax.stop_gradient((params, features))
    begin = jnp.maximum(batch["mask"].argmax(axis=1), 1)
    tokens, live = _sample(model, params, batch, rows.replace(length=begin), features, view, max_new_tokens)
    shift = jnp.take_along_axis(batch["before"], begin[:, None] - 1, axis=1)[:, 0] + 1 - begin
    width = batch["tokens"].shape[1]
    inside = begin[:, None] + jnp.arange(max_new_tokens)
    live &= inside < jnp.minimum(width, batch[f"{TEACHER}tokens"].shape[1] - shift)[:, None]
    count = live.sum(axis=1)
    out = dict(batch) | _written(batch, "", begin, tokens, live) | _written(batch, TEACHER, begin + shift, tokens, live)
    places = jnp.arange(width)
    out["mask"] = (places >= begin[:, None]) & (places < (begin + count)[:, None])
    out["before"] = jnp.maximum(places + shift[:, None], 0)
    return out


def _sample(
    model: LanguageModel,
    params: Params,
    batch: Mapping[str, Array],
    rows: PromptRows,
    features: Float[Array, "B U P E"] | None,
    view: View,
    count: int,
) -> tuple[Int[Array, "B J"], Bool[Array, "B J"]]:
    """Tokens that follow the rows, and which of them belong to the answers."""
    embeds = model.embed(params, rows, features, view.pool)
    logits, cache = model.prefill(params, embeds, rows, rows.tokens.shape[1] + count)
    keys = jax.vmap(jax.random.key)(batch["seed"])
    eos = model.text.eos_token_id
    ends = jnp.asarray([eos] if isinstance(eos, int) else list(eos or (-1,)))

    def step(carry: Any, number: Array) -> tuple[Any, tuple[Array, Array]]:
        logits, cache, live = carry
        token = jax.vmap(jax.random.categorical)(jax.vmap(jax.random.fold_in, (0, None))(keys, number), logits)
        after, cache = model.extend(params, token[:, None], cache)
        return (after[:, 0], cache, live & ~jnp.isin(token, ends)), (token, live)

    start = logits, cache, batch["mask"].any(axis=1)
    _, (tokens, live) = jax.lax.scan(step, start, jnp.arange(count))
    return tokens.T, live.T


def _written(batch: Mapping[str, Array], form: str, begin: Array, tokens: Array, live: Array) -> dict[str, Array]:
    """The arrays of one form of the rows, with the tokens from `begin` on in place of what was there."""
    old = batch[f"{form}tokens"]
    after = jnp.arange(old.shape[1]) >= begin[:, None]
    where = jnp.where(live, begin[:, None] + jnp.arange(tokens.shape[1]), old.shape[1])
    row = jnp.arange(len(old))[:, None]
    out = {
        f"{form}tokens": jnp.where(after, 0, old).at[row, where].set(tokens, mode="drop"),
        f"{form}length": begin + live.sum(axis=1),
    }
    if f"{form}sources" in batch:
        out[f"{form}sources"] = jnp.where(after[..., None], TEXT, batch[f"{form}sources"])
    return out
