"""The compiled steps of an engine, and a batch while it is decoded: what is done between two runs of the loop.

*Growth.* A pass reads all slots of a cache, filled or not, and memory is taken for all. So caches begin with room for
few new tokens, and get four times as many each time that an answer needs it. Each room is a decode program of its own,
compiled when the first answer gets there. Tokens do not change: a row reads the slots that it has filled.

*Refill.* A row that is done is computed all the same until the batch is. So while requests of the same bucket wait, the
loop returns as soon as a few rows are done; the next prompts are prefilled as a small batch of their own, and take the
places that came free. What a request draws depends on its own key and position alone, whatever its batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.collaborative import Member, Program
from jaxspec.decoding.compile_cache import Held, compiled_ms, timed
from jaxspec.decoding.requests import EncodedRequest, Result
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import (
    DecodeState,
    Pause,
    PromptBatch,
    Prompts,
    map_caches,
    place,
    split,
    trace_record,
    whole,
)
from jaxspec.sampling import Sampling
from jaxspec.sharding import on_mesh
from jaxspec.typing import Array, Float, Int, Params

FIRST, FACTOR = 128, 4
"""Room for new tokens at first, and by how much it grows."""
STRIDE = 8
"""Tokens between two looks at an answer that is streamed or may stop at a string: a block or two."""

Start = Callable[[Sequence[EncodedRequest], int, int], tuple[DecodeState, Sampling, float]]
"""(requests, least rows, room) -> the state after their prefill, their options, milliseconds."""


@partial(jax.jit, static_argnames=("program", "new_slots"))
def run_prefill(
    program: Program, params: Params, batch: PromptBatch, options: Sampling, new_slots: int
) -> DecodeState:
    return place(program.prefill(params, batch, options, new_slots))


@partial(jax.jit, static_argnames=("program",), donate_argnames=("state",))
def run_decode(
    program: Program,
    params: Params,
    state: DecodeState,
    options: Sampling,
    pause: Pause | None = None,
) -> DecodeState:
    return place(program.decode(params, state, options, pause))


@partial(jax.jit, static_argnames=("program",))
def run_logprobs(
    program: Program,
    params: Params,
    prompts: tuple[Prompts, ...],
    answer: Int[Array, "1 T"],
    starts: Int[Array, " forms"],
) -> Float[Array, " T"]:
    """Return the log-probabilities of one row's answer, which each form's prompt ends with.

    Args:
      starts: the place in each form of the token before the answer.
    """
    combination = params.get("combination")
    if isinstance(program, Autoregressive | Speculator):
        members, weights = (Member(program.target),), (params["target"],)
    else:
        members, weights = program.members, params["models"]
    logits = jnp.stack([
        _logits(member, own, prompt, start, answer.shape[1])
        for member, own, prompt, start in zip(members, weights, prompts, starts, strict=True)
    ])  # fmt: skip
    if combination is None:
        logs = jax.nn.log_softmax(logits[0])
    else:
        logs = jnp.log(combination.soft(logits, jnp.ones(answer.shape[1])))
    return jnp.take_along_axis(logs, answer[0][:, None], axis=1)[:, 0]


def _logits(
    member: Member, params: Params, prompt: Prompts, start: Int[Array, ""], count: int
) -> Float[Array, "T V"]:
    """Return what one model says at `start` and the places behind it."""
    model, rows = member.model, prompt.rows
    features = None if prompt.images is None else model.encode(params, prompt.images)
    embeds = model.embed(params, rows, features, member.pool)
    hidden, _ = model.read(params, embeds, rows, rows.tokens.shape[1])
    return model.logits(params, jax.lax.dynamic_slice_in_dim(hidden[0], start, count))


class RunningBatch:
    """Requests of one bucket, decoded `most` at once.

    Args:
      held: the program with its parameters.
      start: prefills some of the requests.
      rooms: as `rooms` lists them.
      block: the most tokens that a step of the loop gives a row.
    """

    def __init__(
        self,
        requests: Sequence[EncodedRequest],
        most: int,
        held: Held,
        start: Start,
        rooms: Sequence[int],
        block: int,
    ) -> None:
        self.requests, self.held, self.start, self.block = requests, held, start, block
        self.room, *self.larger = rooms
        self.few = refill_rows(most)
        first, self.compiled = range(min(most, len(requests))), compiled_ms()
        self.busy = {row: row for row in first}
        """The request that each row decodes."""
        self.waiting = list(range(len(first), len(requests)))
        self.state, self.options, self.prefill_ms = start(
            [requests[i] for i in first], 1, self.room
        )
        self.decode_ms, self.longest = 0.0, 1
        self.found: dict[int, dict[str, Any]] = {}

    def decode(self, decoder: Any, stride: int | None) -> None:
        """Run the loop until rows are free for others, caches are full, or the longest answer is a stride longer."""
        width = len(self.options.temperature)
        until = min(width - len(self.busy) + self.few, width) if self.waiting else width
        full = self.room - self.block + 1 if self.larger else self.room + 1
        if stride is None and any(self.requests[i].stop for i in self.busy.values()):
            stride = STRIDE
        pause: Any = np.asarray([until, min(full, self.longest + (stride or full))], np.int32)
        self.state, ms = timed(run_decode, self.held, self.state, self.options, Pause(*pause))
        self.decode_ms += ms
        state = self.state
        done, *told = jax.tree.map(
            np.array, (state.done, state.tokens, state.count, state.stats, state.trace)
        )
        self.told = {
            i: _result(decoder, self.requests[i], row, *told) for row, i in self.busy.items()
        }
        stopped = [
            row for row, i in self.busy.items() if self.told[i].pop("stopped") and not done[row]
        ]
        if stopped:
            done[stopped] = True
            self.state = state.replace(done=done)
        self.free = [row for row in self.busy if done[row]]
        for row in self.free:
            i = self.busy.pop(row)
            self.found[i] = self.told[i]
        self.longest = max((int(told[1][row]) for row in self.busy), default=0)

    def results(self) -> list[Result]:
        """Return what the requests that have begun have come to, in their order."""
        times = {
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "batch": len(self.requests),
        }
        times["compile_ms"] = compiled_ms() - self.compiled
        known = self.told | self.found
        return [
            Result(**known[i], **times, caption_ms=self.requests[i].caption_ms)
            for i in sorted(known)
        ]

    def refill(self) -> None:
        """Let the requests that wait take the places of those that are done."""
        for begin in range(0, min(len(self.free), len(self.waiting)), self.few):
            places = self.free[begin : begin + self.few]
            taken, self.waiting = self.waiting[: len(places)], self.waiting[len(places) :]
            ready, options, ms = self.start([self.requests[i] for i in taken], self.few, self.room)
            self.prefill_ms += ms
            self.busy |= dict(zip(places, taken))
            nowhere = [len(self.options.temperature)] * (len(ready.count) - len(taken))
            rows = np.asarray(places[: len(taken)] + nowhere, np.int32)
            with on_mesh(self.held.mesh):
                self.state, self.options = insert_rows(
                    self.state, self.options, ready, options, rows
                )

    def grow(self) -> None:
        """Give the caches more slots where an answer has come to their end."""
        if self.larger and self.longest >= self.room - self.block + 1:
            self.state, ms = timed(
                grow, Held(self.larger[0] - self.room, self.held.mesh, self.state)
            )
            self.decode_ms += ms
            self.room, *self.larger = self.larger


def _result(
    decoder: Any, request: EncodedRequest, row: int, tokens: Any, count: Any, stats: Any, trace: Any
) -> dict[str, Any]:
    """Return what a row has come to: the fields of a `Result`, and whether it has come to a string to stop at."""
    said = tokens[row, : count[row]].tolist()
    text = decoder.decode(said)
    end = _first(text, request.stop)
    if end is not None:
        whole = [
            _first(decoder.decode(said[:n]), request.stop) is not None for n in range(len(said))
        ]
        text, said = text[:end], said[: bisect_left(whole, True)]
    return {
        "text": text,
        "tokens": tuple(said),
        "stats": jax.tree.map(lambda x: x[row].item() if x.ndim == 1 else x[row], stats),
        "trace": trace and trace_record(trace, row, len(said), decoder.pieces(said)),
        "stopped": end is not None,
    }


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of the strings begins in the text."""
    return min((place for place in map(text.find, stops) if place >= 0), default=None)


def rooms(new: int, block: int) -> list[int]:
    """Return room for new tokens, from the first to `new`; each but the last is larger than a block's tokens."""
    sizes = [FIRST]
    while sizes[-1] < new:
        sizes.append(FACTOR * sizes[-1])
    return [size for size in sizes[:-1] if size > block] + [new]


@partial(jax.jit, static_argnames=("slots",))
def grow(slots: int, state: DecodeState) -> DecodeState:
    """Return the state with so many more slots for new tokens in every row."""

    target, drafter = map_caches(partial(larger_cache, slots), (state.target, state.drafter))
    trace = jax.tree.map(lambda leaf: _longer(leaf, 1, slots), state.trace)
    return place(
        state.replace(
            target=target, drafter=drafter, trace=trace, tokens=_longer(state.tokens, 1, slots)
        )
    )


@partial(jax.jit, static_argnames=("slots",))
def larger_cache(slots: int, cache: KVCache) -> KVCache:
    """Return the cache with so many more slots behind those it has."""
    k, v = (tuple(_longer(leaf, 2, slots) for leaf in leaves) for leaves in (cache.k, cache.v))
    bias = cache.bias if cache.bias is None else _longer(cache.bias, 1, slots)
    # Of a row that has read nothing the last slot is in use, see `hidden_before`.
    hidden = cache.hidden if cache.hidden is None else _longer(cache.hidden, 2, slots, kept=1)
    return split(cache.replace(k=k, v=v, bias=bias, hidden=hidden))


def _longer(leaf: Array, axis: int, slots: int, kept: int = 0) -> Array:
    """Return the array with slots before the last `kept` of that axis."""
    front, back = jnp.split(leaf, [leaf.shape[axis] - kept], axis)
    space = jnp.zeros((*leaf.shape[:axis], slots, *leaf.shape[axis + 1 :]), leaf.dtype)
    return jnp.concatenate([front, space, back], axis)


def refill_rows(batch_size: int) -> int:
    """Rows that are done before the loop returns for others: few waste little, many share a prefill."""
    return max(1, batch_size // 4)


@partial(jax.jit, donate_argnames=("state",))
def insert_rows(
    state: DecodeState,
    options: Sampling,
    fresh: DecodeState,
    its_options: Sampling,
    rows: Int[Array, " fresh"],
) -> tuple[DecodeState, Sampling]:
    """Return the state and options with row i of the fresh ones, N after prefill, in row `rows[i]`; B and more:
    nowhere."""
    batch = len(state.count)

    def put(old: Array, new: Array) -> Array:
        # A draft's rows are view-major, R*B; all other leaves have B.
        views = len(old) // batch
        parts = old.reshape(views, batch, *old.shape[1:])
        parts = parts.at[:, rows].set(new.reshape(views, len(rows), *new.shape[1:]), mode="drop")
        return parts.reshape(old.shape)

    mixed = jax.tree.map(put, options.replace(eos=None), its_options.replace(eos=None))
    return place(jax.tree.map(put, state, fresh)), whole(mixed.replace(eos=options.eos))
