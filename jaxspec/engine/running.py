"""Decode the rows of a batch in several runs of the loop; between two of them the batch may change.

*Growing caches* (`RunningBatch`). A pass reads all slots of a cache, filled or not. So caches start
with room for 128 new tokens and grow fourfold whenever an answer needs more. Each size is a program
of its own, compiled when the first answer reaches it. Tokens do not change, because a row attends
only to the slots that it has filled.

*Coming and going* (`LiveBatch`). A finished row costs computation until its batch ends. So requests
join the free rows of a batch while the others decode, and leave it when they end or nobody waits
for them. The number of rows and of their slots never changes, so no program does. A request's draws
depend only on its own key and position, not on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.data.images import Picture
from jaxspec.decoding.state import DecodeState, Pause
from jaxspec.decoding.steps import grow, insert_rows, run_decode
from jaxspec.decoding.trace import trace_record
from jaxspec.engine.batcher import Batcher, Together
from jaxspec.engine.compile_cache import Held, compiled_ms, executable, timed
from jaxspec.engine.config import BATCH_BUCKETS
from jaxspec.engine.memory import (
    MemoryReport,
    Sizes,
    abstract_inputs,
    abstract_state,
    plan_memory,
)
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.errors import InputError
from jaxspec.prompts.rows import bucket
from jaxspec.prompts.stops import ReasonedText
from jaxspec.runtime import usual_settings
from jaxspec.sampling import Sampling
from jaxspec.sharding import replicated

STRIDE = 8
"""Tokens between two looks at an answer that is streamed or may stop at a string."""


Kind = Literal["greedy", "sampled", "full"]
"""Kind of a loop: all rows are greedy, some sample, or some have processors or `logprobs`."""


class Rows:
    """Run the loop over a state, and read the answers that its rows have written so far."""

    state: DecodeState
    options: Sampling

    def __init__(self, batcher: Batcher, together: Together) -> None:
        self.batcher, self.together = batcher, together
        self.requests: dict[int, EncodedRequest] = {}
        """Requests that have a row or had one, by a number of the caller's."""
        self.busy: dict[int, int] = {}
        """Number of the request that each row decodes."""
        self.texts: dict[int, ReasonedText] = {}
        """Tokens and texts so far, by number of the request."""
        self.so_far: dict[int, dict[str, Any]] = {}
        """Fields of the results so far, by number of the request."""
        self.prefill_ms, self.decode_ms = 0.0, 0.0
        self.compiled = compiled_ms()

    @property
    def rows(self) -> int:
        return len(self.options.temperature)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest unfinished answer; 1 before any is read."""
        counts = (len(self.texts[i].tokens) for i in self.busy.values() if i in self.texts)
        return max(counts, default=1)

    @property
    def loop_options(self) -> Sampling:
        """Return the options of the next run of the loop."""
        return self.options

    @property
    def stops(self) -> bool:
        """Return whether an answer may end at a string, which the loop does not see."""
        return any(self.requests[i].stop for i in self.busy.values())

    def run(self, ended: int, count: int) -> None:
        """Run the loop until `ended` rows are done or an answer has `count` tokens; then read."""
        pause: Any = np.asarray([ended, count], np.int32)
        args = self.state, self.loop_options, Pause(*pause)
        self.state, ms = timed(run_decode, self.together.held, *args)
        self.decode_ms += ms
        self.read()

    def read(self) -> None:
        """Read the answers of all busy rows, and free the rows whose answers have ended."""
        names = ("done", "tokens", "count", "stats", "trace", "logprobs")
        columns = jax.tree.map(np.array, {name: getattr(self.state, name) for name in names})
        done, eos, stopped = columns["done"], self.batcher.eos, False
        for row, i in self.busy.items():
            text = self._extend(i, row, columns)
            stop = text.stop is not None
            stopped |= stop and not done[row]
            done[row] |= stop
            if done[row]:
                stop |= any(token in eos for token in text.tokens[-1:])
                self.so_far[i]["finish_reason"] = "stop" if stop else "length"
        if stopped:
            self.end(done)
        self.busy = {row: i for row, i in self.busy.items() if not done[row]}

    def _extend(self, i: int, row: int, columns: Mapping[str, Any]) -> ReasonedText:
        """Add the new tokens of a row to the answer to request `i`."""
        trace, record = columns["trace"], columns["logprobs"]
        request, fields = self.requests[i], self.so_far.setdefault(i, {})
        if i not in self.texts:
            encoder, records = self.batcher.encoder, trace is not None
            self.texts[i] = ReasonedText(encoder, request.prompt, request.stop, records)
        text = self.texts[i]
        before = len(text.tokens)
        text.extend(columns["tokens"][row, before : columns["count"][row]].tolist())
        new = slice(before, len(text.tokens))
        if trace is not None:
            part = {"pieces": text.pieces[new], "reasoning": text.reasons[new]}
            part |= trace_record(trace, row, new)
            earlier = fields.get("trace", {})
            fields["trace"] = {name: [*earlier.get(name, ()), *part[name]] for name in part}
        if record is not None and request.logprobs is not None:
            part = record.of_row(row, new, request.logprobs)
            fields |= {name: (*fields.get(name, ()), *part[name]) for name in part}
        fields |= {
            "text": text.text,
            "reasoning": text.reasoning,
            "tokens": tuple(text.tokens),
            "stats": jax.tree.map(
                lambda x: x[row].item() if x.ndim == 1 else x[row], columns["stats"]
            ),
            "stop_string": text.stop,
        }
        return text

    def end(self, done: np.ndarray) -> None:
        """Let these rows be done."""
        self.state = self.state.replace(done=jax.device_put(done, self.state.done.sharding))

    def result(self, i: int, **times: Any) -> Result:
        """Return the result so far of a request that has started."""
        fields, request = self.so_far[i], self.requests[i]
        return Result(**fields, **times, caption_ms=request.caption_ms)


class RunningBatch(Rows):
    """Decode requests of one bucket that start together; the constructor prefills them.

    Args:
      one_prompt: Whether the requests are samples of one prompt.
      past: Cache of an earlier turn, whose slots begin the only prompt.
    """

    def __init__(
        self,
        batcher: Batcher,
        requests: Sequence[EncodedRequest],
        one_prompt: bool = False,
        past: KVCache | None = None,
    ) -> None:
        super().__init__(batcher, batcher.together(requests, one_prompt, past))
        self.requests = dict(enumerate(requests))
        self.room, *self.larger = batcher.rooms(self.together.sizes)
        self.block = batcher.program.most_tokens
        self.busy = {row: row for row in self.requests}
        self.state, self.options, self.prefill_ms = batcher.prefill(
            self.together, requests, self.room
        )

    def decode(self, stride: int | None = None) -> None:
        """Run the loop until all rows are done, caches are full, or `stride` tokens are added.

        stride: Number of tokens that the longest answer gains; None runs on.
        """
        full = self.room - self.block + 1 if self.larger else self.room + 1
        stride = stride or (STRIDE if self.stops else full)
        self.run(self.rows, min(full, self.longest + stride))

    def results(self) -> list[Result]:
        """Return the results so far of all requests, in their order."""
        times = {
            "prefill_ms": self.prefill_ms,
            "decode_ms": self.decode_ms,
            "batch": len(self.requests),
            "compile_ms": compiled_ms() - self.compiled,
        }
        return [self.result(i, **times) for i in self.requests]

    def grow(self) -> None:
        """Enlarge the caches if the longest answer has filled them."""
        if self.larger and self.longest >= self.room - self.block + 1:
            more = self.larger[0] - self.room
            self.state, ms = timed(grow, Held(more, self.batcher.mesh, self.state))
            self.decode_ms += ms
            self.room, *self.larger = self.larger


class LiveBatch(Rows):
    """Decode requests that join and leave while others decode.

    It begins empty. `join` prefills requests into free rows, `decode` runs the loop, `results`
    tells how far each answer is, and `leave` frees the rows of requests that nobody waits for.

    Args:
      examples: Requests whose sizes and kinds of loop the batch has programs for. A request that
        joins is padded to the smallest of these sizes that holds it.
      few: Number of rows of a prefill. With 1 a prompt is read as it would be by itself.
    """

    def __init__(self, batcher: Batcher, examples: Sequence[EncodedRequest], few: int = 1) -> None:
        super().__init__(batcher, batcher.together(examples)._replace(greedy=False))
        self.examples, self.few, self.sizes = examples, few, _sizes(batcher, examples)
        program, params = batcher.program, self.together.held.params
        size = batcher.config.batch_size
        inputs, _ = abstract_inputs(program, size, self.capacity)
        options = self._empty_options(size)
        shapes = abstract_state(program, params, inputs, options, self.capacity.new)
        with usual_settings():
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), shapes)
            self.state = empty.replace(done=~empty.done)
        mesh = batcher.mesh
        self.options = options if mesh is None else jax.device_put(options, replicated(mesh))
        self.times: dict[int, tuple[float, float]] = {}
        """Milliseconds of each request's prefill, and of the loop before it joined."""

    @property
    def capacity(self) -> Sizes:
        """Return the sizes of the batch, which hold every request."""
        return self.together.sizes

    @property
    def loop_options(self) -> Sampling:
        return _options(self.options, self.kind)

    @property
    def kind(self) -> Kind:
        return _kind([self.requests[i] for i in self.busy.values()])

    @property
    def free(self) -> list[int]:
        """Return the rows that decode nothing."""
        return [row for row in range(self.rows) if row not in self.busy]

    def memory(self) -> MemoryReport:
        """Return the bytes that the batch takes on a device."""
        program, params = self.batcher.program, self.together.held.params
        sizes, fresh = self.capacity, bucket(self.few, BATCH_BUCKETS, "batch")
        options_of = self._empty_options
        return plan_memory(program, params, self.rows, sizes, fresh, options_of=options_of)

    def _empty_options(self, rows: int) -> Sampling:
        return self.together.options([], self.batcher.eos, rows)

    def fit(self, request: EncodedRequest) -> Sizes:
        """Return the smallest sizes that hold the request; InputError if none does."""
        sizes = next((sizes for sizes in self.sizes if _holds(sizes, request.sizes)), None)
        limits = {"max_new_tokens": (request.max_new_tokens, self.capacity.new)}
        limits |= self.together.limits(request, self.batcher.eos)
        length, images = len(request.rows[0]), request.prompt.images
        largest = max((example.prompt.images for example in self.examples), key=_pixels)
        if sizes is None:
            limits |= {"images": (len(images), len(largest))}
            limits |= {"prompt tokens": (length, self.capacity.length)}
        over = (f"{name}: {n} of at most {most}" for name, (n, most) in limits.items() if n > most)
        if what := next(over, "" if sizes else "prompt: no room"):
            mend = "shorten the request"
            if images and largest and sizes is None:
                count = int((request.rows[0].images >= 0).sum())
                what += f", with {count} for images of {_sides(images)} pixels"
                tiles = zip(request.sizes.tiles, self.capacity.tiles, strict=True)
                if all(n <= most for n, most in tiles):
                    mend = "shorten the text"
                elif request.max_soft_tokens is not None:
                    mend = f"give less than {request.max_soft_tokens} max_soft_tokens"
                else:
                    mend = f"give images of at most {_sides(largest)} pixels"
            raise InputError(f"{what}; {mend}")
        assert sizes is not None
        return sizes

    def join(self, requests: Mapping[int, EncodedRequest]) -> None:
        """Prefill requests, at most `few`, and insert them in free rows.

        requests: By a number of the caller's, which names them in `results` and `leave`.
        """
        prefilled = list(requests.values())
        for request in prefilled:
            self.fit(request)
        together = replace(prefilled[0], sizes=self.batcher.largest(prefilled))
        rows = self.free[: len(prefilled)]
        ms = self._insert(self.fit(together), prefilled, rows)
        self.prefill_ms += ms
        self.busy |= dict(zip(rows, requests))
        self.requests |= requests
        self.times |= dict.fromkeys(requests, (ms, self.decode_ms))

    def _insert(
        self, sizes: Sizes, requests: Sequence[EncodedRequest], rows: Sequence[int]
    ) -> float:
        """Prefill requests into these rows, or into none; return the prefill's milliseconds."""
        together = self.together._replace(sizes=sizes)
        fresh, options, ms = self.batcher.prefill(together, requests, sizes.new, self.few)
        dropped = [self.rows] * (len(fresh.count) - len(rows))
        destinations = np.asarray([*rows, *dropped], np.int32)
        held = Held(self.rows, self.batcher.mesh, self.state)
        (self.state, self.options), _ = timed(
            insert_rows, held, self.options, fresh, options, destinations
        )
        return ms

    def leave(self, gone: Collection[int]) -> None:
        """Free the rows of requests that nobody waits for; they have no result."""
        done = np.array(self.state.done)
        done[[row for row, i in self.busy.items() if i in gone]] = True
        self.end(done)
        self.busy = {row: i for row, i in self.busy.items() if i not in gone}
        self._forget(gone)

    def decode(self, stride: int | None = None, ended: int = 1) -> None:
        """Run the loop until `ended` rows have ended, or until `stride` tokens are added.

        stride: Number of tokens that the longest answer gains, 1 for one block; None runs on.
        """
        stride = stride or (STRIDE if self.stops else self.capacity.new)
        kind, before = self.kind, self.state
        self.state = _needed(before, kind)
        self.run(min(len(self.free) + ended, self.rows), self.longest + stride)
        if kind != "full":
            self.state = self.state.replace(logprobs=before.logprobs, prompt=before.prompt)

    def results(self) -> tuple[dict[int, Result], dict[int, Result]]:
        """Return the answers so far of busy rows, and those that have ended, which it forgets."""
        every = {i: self.result(i, **self._times(i)) for i in self.so_far}
        busy = set(self.busy.values())
        ended = {i: result for i, result in every.items() if i not in busy}
        self._forget(ended)
        return {i: result for i, result in every.items() if i in busy}, ended

    def _times(self, i: int) -> dict[str, Any]:
        prefill_ms, before = self.times[i]
        decode_ms = self.decode_ms - before
        return {"prefill_ms": prefill_ms, "decode_ms": decode_ms, "batch": len(self.busy)}

    def _forget(self, numbers: Collection[int]) -> None:
        for fields in (self.requests, self.texts, self.so_far, self.times):
            for i in numbers:
                fields.pop(i, None)

    def programs(self) -> list[Callable[[], object]]:
        """Return calls that compile, together, each program that requests as the examples need."""

        def prefill(sizes: Sizes) -> None:
            example = next(each for each in self.examples if _holds(sizes, each.sizes))
            self._insert(sizes, [example], [])

        def decode(kind: Kind) -> None:
            pause: Any = np.zeros(2, np.int32)
            state, options = _needed(self.state, kind), _options(self.options, kind)
            executable(run_decode, self.together.held, state, options, Pause(*pause))

        kinds: set[Kind] = {_kind([example]) for example in self.examples}
        prefills = [partial(prefill, sizes) for sizes in self.sizes]
        return [*prefills, *(partial(decode, kind) for kind in kinds)]


def _kind(requests: Sequence[EncodedRequest]) -> Kind:
    """Return the loop that decodes these requests together."""
    if any(r.logprobs is not None or r.settings.changed for r in requests):
        return "full"
    return "greedy" if all(r.temperature == 0 for r in requests) else "sampled"


def _needed(state: DecodeState, kind: Kind) -> DecodeState:
    """Return the state with what a loop of this kind changes or reads."""
    return state if kind == "full" else state.replace(logprobs=None, prompt=None)


def _options(options: Sampling, kind: Kind) -> Sampling:
    """Return the options as a loop of this kind reads them."""
    if kind == "full":
        return options
    return options.replace(greedy=kind == "greedy", processors=None, logprobs=None)


def _sizes(batcher: Batcher, examples: Sequence[EncodedRequest]) -> list[Sizes]:
    """Return the sizes of the examples and, with images and without, their maxima, in order."""
    new = max(example.sizes.new for example in examples)
    padded = [replace(example, sizes=example.sizes._replace(new=new)) for example in examples]
    alike: dict[tuple[bool, ...], list[EncodedRequest]] = {}
    for example in padded:
        alike.setdefault(_reading(example.sizes), []).append(example)
    return sorted({example.sizes for example in padded} | {*map(batcher.largest, alike.values())})


def _sides(images: Sequence[Picture]) -> str:
    """Return the images' sizes in pixels, as people write them."""
    return ", ".join(f"{image.width}x{image.height}" for image in images)


def _pixels(images: Sequence[Picture]) -> int:
    return sum(image.width * image.height for image in images)


def _reading(sizes: Sizes) -> tuple[bool, ...]:
    """Return which towers read images; prompts for the same towers have the same fields."""
    return tuple(map(bool, sizes.tiles))


def _holds(sizes: Sizes, smaller: Sizes) -> bool:
    """Return whether prompts of the smaller sizes can be padded to these."""
    pairs = zip(sizes.flat, smaller.flat, strict=True)
    return _reading(sizes) == _reading(smaller) and all(most >= size for most, size in pairs)
