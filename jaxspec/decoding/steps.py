"""Compile an engine's steps: prefill, the loop, and changes of a state between two loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache import KVCache, resized
from jaxspec.decoding.inputs import Member, PromptBatch, Prompts
from jaxspec.decoding.program import Program
from jaxspec.decoding.speculative import TargetProgram, TargetRead, prefill_target
from jaxspec.decoding.state import DecodeState, Pause, place, whole
from jaxspec.sampling import Sampling
from jaxspec.typing import Array, Features, Float, Int, Params


@partial(jax.jit, static_argnames=("program", "new_slots"))
def run_prefill(
    program: Program, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
) -> tuple[DecodeState, Float[Array, "*M B V"]]:
    """Prefill the batch and place the state as the loop keeps it on a mesh.

    Return it with the logits, from which `insert_rows` may draw first tokens again.
    """
    return place(program.prefill(params, batch, options, new_slots))


@partial(jax.jit, static_argnames=("program",))
def run_tower(program: TargetProgram, params: Params, images: dict[str, Array]) -> Features:
    """Return what the target's tower makes of images."""
    return whole(program.target.encode(params["target"], images))


@partial(jax.jit, static_argnames=("program",))
def run_piece(
    program: TargetProgram, params: Params, past: KVCache, piece: PromptBatch
) -> tuple[Float[Array, "B V"], KVCache]:
    """Let the target read a piece of each prompt behind what `past` holds.

    Return the logits of the token after each piece, and the longer cache.
    """
    batch = piece.replace(past=past)
    logits, _, cache = prefill_target(program.target, params["target"], batch, past.slots)
    return place((logits, cache))


@partial(jax.jit, static_argnames=("program", "new_slots"))
def run_opened(
    program: TargetProgram,
    params: Params,
    batch: PromptBatch,
    options: Sampling,
    logits: Float[Array, "B V"],
    cache: KVCache,
    new_slots: int,
) -> tuple[DecodeState, Float[Array, "B V"]]:
    """Return what `run_prefill` does for prompts that the target has read."""
    read = TargetRead(logits, batch.features, cache)
    return place(program.opened(params, batch, read, options, new_slots))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def run_decode(
    program: Program,
    params: Params,
    state: DecodeState,
    options: Sampling,
    pause: Pause | None = None,
) -> DecodeState:
    """Run the loop until it ends or pauses."""
    return place(program.decode(params, state, options, pause))


@partial(jax.jit, static_argnames=("program",))
def run_logprobs(
    program: Program,
    params: Params,
    prompts: tuple[Prompts, ...],
    answer: Int[Array, "1 T"],
    starts: Int[Array, " forms"],
) -> Float[Array, " T"]:
    """Return the log-probabilities of the answer's tokens at temperature 1.

    Args:
      prompts: Prompt and answer in one row, for each member of the program.
      answer: Tokens, with padding that the prompts' rows may have no slots for.
      starts: Slot of the last prompt token in each row.
    """
    weights, combination = program.weights(params), params.get("combination")
    inputs = zip(program.members, weights, prompts, starts, strict=True)
    logits = jnp.stack([_logits(*arguments, answer.shape[1]) for arguments in inputs])
    if combination is None:
        logs = jax.nn.log_softmax(logits[0].astype(jnp.float32))
    else:
        logs = jnp.log(combination.soft(logits, jnp.ones(answer.shape[1])))
    return jnp.take_along_axis(logs, answer[0][:, None], axis=1)[:, 0]


def _logits(
    member: Member, params: Params, prompt: Prompts, start: Int[Array, ""], count: int
) -> Float[Array, "T V"]:
    """Return one model's logits at `count` slots from `start` on; past the last, at the last."""
    embeds, width = member.embed(params, prompt), prompt.rows.tokens.shape[1]
    hidden, _ = member.model.read(params, embeds, prompt.rows, width)
    slots = jnp.minimum(start + jnp.arange(count), width - 1)
    return member.model.logits(params, hidden[0, slots])


@partial(jax.jit, static_argnames=("slots",))
def resized_cache(slots: int, cache: KVCache) -> KVCache:
    """Return the cache with so many slots, see `KVCache.resized`."""
    return place(cache.resized(slots))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def insert_rows(
    program: Program,
    params: Params,
    state: DecodeState,
    options: Sampling,
    fresh: DecodeState,
    fresh_options: Sampling,
    rows: Int[Array, " fresh"],
    logits: Float[Array, "*M B V"] | None = None,
) -> tuple[DecodeState, Sampling]:
    """Return the state and options with row i of the fresh ones inserted at row `rows[i]`.

    Args:
      fresh: State that may have other numbers of slots, for prompts and for new tokens.
      rows: Destinations of the fresh rows; B or more drops a row.
      logits: Logits from which the fresh options draw first tokens; None keeps those of `fresh`.
    """
    batch = len(state.done)
    if logits is not None:
        fresh = program.begin(params, fresh, logits, fresh_options)
    fresh_options = fresh_options.with_grammars(None)

    def fitted(old: Any, new: Any) -> Any:
        """Return what is new with as many slots as what is old, behind its own or as it says."""
        if hasattr(old, "fitted"):
            return new.fitted(old)
        for axis in range(1, old.ndim):
            if new.shape[axis] != old.shape[axis]:
                new = resized(new, axis, old.shape[axis])
        return new

    fresh = jax.tree.map(fitted, state, fresh, is_leaf=lambda part: hasattr(part, "fitted"))

    def put(old: Array, new: Array) -> Array:
        # A draft's rows are view-major, R*B; all other leaves have B.
        views = len(old) // batch
        parts = old.reshape(views, batch, *old.shape[1:])
        parts = parts.at[:, rows].set(new.reshape(views, len(rows), *new.shape[1:]), mode="drop")
        return parts.reshape(old.shape)

    mixed = jax.tree.map(put, options.replace(eos=None), fresh_options.replace(eos=None))
    return place(jax.tree.map(put, state, fresh)), whole(mixed.replace(eos=options.eos))
