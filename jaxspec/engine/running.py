"""Decode a batch in several runs of the loop: grow caches and insert rows between them.

*Growing caches.* A pass reads all slots of a cache, filled or not. So caches start with room for
128 new tokens and grow fourfold whenever an answer needs more. Each size is a program of its own,
compiled when the first answer reaches it. Tokens do not change, because a row attends only to the
slots that it has filled.

*Continuous batching.* A finished row costs computation until its batch ends. So while requests of
the same bucket wait, the loop returns as soon as a few rows are done. The next prompts are
prefilled as a small batch and take the free rows. A request's draws depend only on its own key and
position, not on its batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.collaboration.proposals import CollaborationStats
from jaxspec.decoding.state import DecodeStats, Pause
from jaxspec.decoding.steps import grow, insert_rows, run_decode
from jaxspec.decoding.trace import Trace, trace_record
from jaxspec.engine.batcher import Batcher, rows_per_insert
from jaxspec.engine.compile_cache import Held, compiled_ms, timed
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.prompts.encoder import PromptEncoder
from jaxspec.sharding import on_mesh

STRIDE = 8
"""Tokens between two looks at an answer that is streamed or may stop at a string."""


class RunningBatch:
    """Decode requests of one bucket; the constructor prefills the first ones.

    Args:
      prompts: Number of different prompts, if the requests are samples of the first ones.
      past: Cache of an earlier turn, whose slots begin the only prompt.
    """

    def __init__(
        self,
        batcher: Batcher,
        requests: Sequence[EncodedRequest],
        prompts: int | None = None,
        past: KVCache | None = None,
    ) -> None:
        self.batcher, self.requests = batcher, requests
        most = len(requests) if prompts else batcher.config.batch_size
        self.together = batcher.together(requests, prompts, past)
        self.room, *self.larger = batcher.rooms(self.together.sizes)
        self.block = batcher.program.most_tokens
        self.few = rows_per_insert(most)
        first, self.compiled = range(min(most, len(requests))), compiled_ms()
        self.busy = {row: row for row in first}
        """Index of the request that each row decodes."""
        self.free: list[int] = []
        """Rows that the last run of the loop finished."""
        self.waiting = list(range(len(first), len(requests)))
        fresh = [requests[i] for i in first]
        self.state, self.options, self.prefill_ms = batcher.prefill(self.together, fresh, self.room)
        self.decode_ms, self.longest = 0.0, 1
        self.so_far: dict[int, dict[str, Any]] = {}
        """Fields of the results so far, by index of the request."""

    def decode(self, stride: int | None = None) -> None:
        """Run the loop until rows are free, caches are full, or `stride` tokens are added.

        stride: Number of tokens that the longest answer gains; None runs on.
        """
        width = len(self.options.temperature)
        until = min(width - len(self.busy) + self.few, width) if self.waiting else width
        full = self.room - self.block + 1 if self.larger else self.room + 1
        if stride is None and any(self.requests[i].stop for i in self.busy.values()):
            stride = STRIDE
        limits: Any = np.asarray([until, min(full, self.longest + (stride or full))], np.int32)
        pause = Pause(*limits)
        self.state, ms = timed(run_decode, self.together.held, self.state, self.options, pause)
        self.decode_ms += ms
        state = self.state
        done, tokens, count, stats, trace, record = jax.tree.map(
            np.array,
            (state.done, state.tokens, state.count, state.stats, state.trace, state.logprobs),
        )
        eos, stopped = np.array(self.options.eos), False
        for row, i in self.busy.items():
            request, decoder = self.requests[i], self.batcher.encoder
            fields = _result(decoder, request, row, tokens, count, stats, trace)
            if record is not None and request.logprobs is not None:
                fields |= record.of_row(row, len(fields["tokens"]), request.logprobs)
            stop = fields["stop_string"] is not None
            stopped |= stop and not done[row]
            done[row] |= stop
            if done[row]:
                stop |= bool(np.isin(fields["tokens"][-1:], eos).any())
                fields["finish_reason"] = "stop" if stop else "length"
            self.so_far[i] = fields
        if stopped:
            self.state = state.replace(done=done)
        self.free = [row for row in self.busy if done[row]]
        for row in self.free:
            del self.busy[row]
        self.longest = max((int(count[row]) for row in self.busy), default=0)

    def results(self) -> list[Result]:
        """Return the results so far of all requests that have started, in their order."""
        times = {
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "batch": len(self.requests),
            "compile_ms": compiled_ms() - self.compiled,
        }
        return [
            Result(**fields, **times, caption_ms=self.requests[i].caption_ms)
            for i, fields in sorted(self.so_far.items())
        ]

    def insert_waiting(self) -> None:
        """Prefill waiting requests and insert them in the rows of finished ones."""
        for begin in range(0, min(len(self.free), len(self.waiting)), self.few):
            free = self.free[begin : begin + self.few]
            indices, self.waiting = self.waiting[: len(free)], self.waiting[len(free) :]
            fresh = [self.requests[i] for i in indices]
            ready, options, ms = self.batcher.prefill(self.together, fresh, self.room, self.few)
            self.prefill_ms += ms
            self.busy |= dict(zip(free, indices))
            nowhere = [len(self.options.temperature)] * (len(ready.count) - len(indices))
            rows = np.asarray(free[: len(indices)] + nowhere, np.int32)
            with on_mesh(self.batcher.mesh):
                self.state, self.options = insert_rows(
                    self.state, self.options, ready, options, rows
                )

    def grow(self) -> None:
        """Enlarge the caches if the longest answer has filled them."""
        if self.larger and self.longest >= self.room - self.block + 1:
            more = self.larger[0] - self.room
            self.state, ms = timed(grow, Held(more, self.batcher.mesh, self.state))
            self.decode_ms += ms
            self.room, *self.larger = self.larger


def _result(
    decoder: PromptEncoder,
    request: EncodedRequest,
    row: int,
    tokens: np.ndarray,
    count: np.ndarray,
    stats: DecodeStats | CollaborationStats,
    trace: Trace | None,
) -> dict[str, Any]:
    """Return the fields of a row's `Result` so far."""
    new = tokens[row, : count[row]].tolist()
    text, new, stop = _cut(decoder, new, request.stop)
    return {
        "text": text,
        "tokens": tuple(new),
        "stats": jax.tree.map(lambda x: x[row].item() if x.ndim == 1 else x[row], stats),
        "trace": trace and trace_record(trace, row, len(new), decoder.pieces(new)),
        "stop_string": stop,
    }


def _cut(
    decoder: PromptEncoder, tokens: list[int], stops: Sequence[str]
) -> tuple[str, list[int], str | None]:
    """Return the text before the first stop string, the tokens that complete it, and the string.

    The fewest tokens decide whose text holds any of the strings, so that the answer does not depend
    on the number of tokens between two looks at it.
    """
    text = decoder.decode(tokens)
    if not any(stop in text for stop in stops):
        return text, tokens, None

    def holds(count: int) -> bool:
        text = decoder.decode(tokens[:count])
        return any(stop in text for stop in stops)

    tokens = tokens[: bisect_left(range(len(tokens)), True, key=holds)]
    text = decoder.decode(tokens)
    stop = min((stop for stop in stops if stop in text), key=text.find)
    return text[: text.index(stop)], tokens, stop
