"""Decode requests in the rows of a batch, in several runs of the loop between which it may change.

*Coming and going*. A finished row costs computation until its batch ends. So requests join the
free rows of a batch while the others decode, and leave it when they end or nobody waits for them.
A live batch has as many rows as are busy, rounded up to a power of two, so that one request pays
for one row. A request's draws depend only on its own key and position, not on its batch.

*Growing caches*. A pass reads all slots of a cache, filled or not. So caches start with room for
128 new tokens and grow fourfold whenever an answer needs more. Each size is a program of its own,
compiled when the first answer reaches it. Tokens do not change, because a row attends only to the
slots that it has filled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodeState, Pause
from jaxspec.decoding.steps import grow, run_decode
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.fitting import Kind, fitting, holds, live_sizes
from jaxspec.engine.batches.reading import Prefilled, Reader
from jaxspec.engine.batches.states import Rows, States
from jaxspec.engine.batches.writing import Start, Written
from jaxspec.engine.compile_cache import Held, compiled_ms, executable, timed
from jaxspec.engine.memory import (
    MemoryReport,
    Sizes,
    plan_memory,
)
from jaxspec.engine.policy import Pace
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.sampling import Sampling
from jaxspec.sharding import replicated

STRIDE = 8
"""Tokens between two looks at an answer that is streamed or may stop at a string."""


class Batch:
    """Decode requests that join and leave while others decode.

    `join` prefills requests into free rows, `decode` runs the loop, `results` tells how far each
    answer is, and `leave` frees the rows of requests that nobody waits for. `answers` does all of
    it for a list of requests.

    Args:
      examples: Requests whose sizes and kinds of loop the batch has programs for. All others must
        fit in these sizes.
      rows: Most rows; None: as many as the examples need.
      live: Whether requests come one by one without an end. The batch then begins empty and with
        room for the longest answer, and a prompt is padded to the smallest example that holds it.
      one_prompt: Whether the requests are samples of one prompt.
      past: Cache of an earlier turn, whose slots begin the only prompt.
      prefixes: Most bytes that a live batch keeps of prompts, for others that begin alike.
    """

    state: DecodeState
    options: Sampling

    def __init__(
        self,
        batcher: Batcher,
        examples: Sequence[EncodedRequest],
        rows: int | None = None,
        *,
        live: bool = False,
        one_prompt: bool = False,
        past: KVCache | None = None,
        prefixes: int = 0,
    ) -> None:
        self.batcher, self.examples, self.live = batcher, examples, live
        self.together = batcher.together(examples, one_prompt, past)
        self.rows = rows or batcher.rows(len(examples))
        self.widths = batcher.widths(self.rows) if live else [self.rows]
        """Numbers of rows that its state may have."""
        self.width = self.widths[0]
        """Number of rows that its state has."""
        self.few = 1 if live else max(1, self.rows // 4)
        """Number of rows that are prefilled while others decode: fewer waste less of the loop,
        more share one prefill."""
        self.waits = live or len(examples) > self.rows
        """Whether requests join while others decode."""
        self.sizes = live_sizes(examples) if live else [self.capacity]
        self.kinds = sorted({Kind.of(examples)} | {Kind.of([r]) for r in examples if live})
        self.room, *self.larger = [self.capacity.new] if live else batcher.rooms(self.capacity)
        self.busy: dict[int, int] = {}
        """Number of the request that each row decodes, one of the caller's."""
        self.pace = None if batcher.policy is None else Pace(batcher.policy, batcher.plans)
        """What chooses among plans."""
        self.written = Written(batcher, self.pace)
        """Answers so far, by number of the request."""
        self.prefill_ms, self.decode_ms, self.compiled = 0.0, 0.0, compiled_ms()
        self.run_ms = 0.0
        """Milliseconds of the loop's newest run."""
        self.started = live
        """Whether there is a state; otherwise the first requests that join make it."""
        self.states = States(batcher, self.together)
        self.reader: Reader | None = None
        """What reads the prompts of a live batch."""
        if live:
            self.state, self.options = self.states.empty(self.width, self.room)
            row = self.states.empty(1, self.room)[0].target
            self.reader = Reader(batcher, self.together, self.sizes, row, prefixes)

    @property
    def capacity(self) -> Sizes:
        """Return the sizes of the batch, which hold every request."""
        return self.together.sizes

    @property
    def kind(self) -> Kind:
        """Return the kind of the loop's next run.

        A live batch compiles loops with grammars when a request first needs them.
        """
        needed = Kind.of([self.written.requests[i] for i in self.busy.values()])
        others = needed._replace(guided=False)
        kind = next(kind for kind in self.kinds if kind.serves(others))
        return kind._replace(guided=kind.guided or needed.guided)

    @property
    def free(self) -> list[int]:
        """Return the rows that decode nothing."""
        return [row for row in range(self.rows) if row not in self.busy]

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest unfinished answer; 1 before any is read."""
        texts = self.written.texts
        return max((len(texts[i].tokens) for i in self.busy.values() if i in texts), default=1)

    @property
    def stops(self) -> bool:
        """Return whether an answer may end at a string, which the loop does not see."""
        return any(self.written.requests[i].stop for i in self.busy.values())

    @property
    def full(self) -> int:
        """Return the number of tokens of an answer at which the caches must grow."""
        return self.room - self.batcher.program.most_tokens + 1 if self.larger else self.room + 1

    def answers(
        self, requests: Sequence[EncodedRequest], stride: int | None = None
    ) -> Iterator[list[Result]]:
        """Decode these requests; yield the answers so far at each pause, at last the whole ones.

        stride: Number of tokens between two pauses; None pauses only where the batch must.
        """
        waiting, results = dict(enumerate(requests)), dict[int, Result]()
        while waiting or self.busy:
            self.join(waiting)
            self.decode(stride, self.few if waiting else self.rows)
            busy, ended = self.results()
            results |= busy | ended
            times: dict[str, Any] = {"prefill_ms": self.prefill_ms, "decode_ms": self.decode_ms}
            times |= {"batch": len(requests), "compile_ms": compiled_ms() - self.compiled}
            yield [replace(results[i], **times) for i in sorted(results)]

    def fit(self, request: EncodedRequest) -> Sizes:
        """Return the smallest sizes that hold the request; InputError if none does."""
        limits = {"max_new_tokens": (request.max_new_tokens, self.capacity.new)}
        limits |= self.together.limits(request, self.batcher.eos)
        return fitting(request, self.sizes, self.capacity, self.examples, limits)

    def join(self, waiting: dict[int, EncodedRequest]) -> None:
        """Prefill requests into the free rows, in order, and take them out of `waiting`.

        A live batch in which others decode may read only a part of a long prompt: it then returns,
        and reads on in the next call, if the same request is the first one.

        waiting: Requests by a number of the caller's, which names them in `results` and `leave`.
        """
        while waiting and (free := self.free):
            count = min(self.few, len(free)) if self.started else self.rows
            some = {i: waiting[i] for i in islice(waiting, count)}
            prompt, requests = None, [*some.values()]
            sizes = [*map(self.fit, requests)]
            if self.reader is not None:
                wait = self.run_ms if self.busy else math.inf
                prompt = self.reader.read(requests[0], sizes[0], wait)
                if prompt is None:
                    return
            self.resize(len(self.busy) + len(some))
            rows = self.free[: len(some)]
            if prompt is None:
                start = self._prefill(requests, rows)
            else:
                start = self._insert(prompt, requests, rows)
            self.prefill_ms += start.prefill_ms
            self.busy |= dict(zip(rows, some))
            self.written.begin(some, start)
            for i in some:
                del waiting[i]

    def _prefill(self, requests: Sequence[EncodedRequest], rows: Sequence[int]) -> Start:
        """Prefill a list of requests together, into these rows or into none."""
        count = self.few if self.started else self.rows
        room, options = self.batcher.rooms(self.capacity)[0], self.states.options(requests, count)
        fresh, ms = self.batcher.prefill(self.together, requests, options, room)
        if self.started:
            self._put((fresh, options), rows)
        else:
            self.state, self.started = fresh, True
            self.options = options.with_grammars(None)
        return Start(ms, self.decode_ms)

    def _insert(
        self, prompt: Prefilled, requests: Sequence[EncodedRequest], rows: Sequence[int]
    ) -> Start:
        """Insert a prompt of a live batch for a request into this row, or into none."""
        fresh, logits = (prompt.state, self.states.options(requests, 1)), prompt.logits
        if len(self.widths) > 1:
            # In one form for prompts of all sizes, so that each width needs one program.
            fresh = self.states.inserted(self.states.empty(1, self.room), fresh, [0], logits)
            logits = None
        self._put(fresh, rows, logits)
        return Start(prompt.ms, self.decode_ms, prompt.cached)

    def _put(self, fresh: Rows, rows: Sequence[int], logits: Any = None) -> None:
        """Insert the first fresh rows at these places, see `States.inserted`."""
        old = self.state, self.options
        self.state, self.options = self.states.inserted(old, fresh, rows, logits)

    def resize(self, rows: int) -> None:
        """Move the busy rows, in order, into a state of the fewest rows that are so many."""
        goal = next((width for width in self.widths if width >= rows), self.width)
        while self.width != goal:  # by one step, so that few programs are needed
            at = self.widths.index(self.width) + (1 if goal > self.width else -1)
            self._move(self.widths[at])

    def _move(self, width: int) -> None:
        moved = {row: new for new, row in enumerate(self.busy)}
        rows = [moved.get(row, width) for row in range(self.width)]
        old = self.state, self.options
        empty = self.states.empty(width, self.room)
        self.state, self.options = self.states.inserted(empty, old, rows)
        self.busy = dict(enumerate(self.busy.values()))
        self.width = width

    def leave(self, gone: Collection[int]) -> None:
        """Free the rows of requests that nobody waits for; they have no result."""
        done = np.array(self.state.done)
        done[[row for row, i in self.busy.items() if i in gone]] = True
        self.end(done)
        self.busy = {row: i for row, i in self.busy.items() if i not in gone}
        self.written.forget(gone)

    def decode(self, stride: int | None = None, ended: int = 1) -> None:
        """Run the loop until `ended` more rows have ended, or until `stride` tokens are added.

        It also pauses where the caches are full, and enlarges them before the next run.

        stride: Number of tokens that the longest answer gains, 1 for one block; None runs on.
        """
        if self.larger and self.longest >= self.full:
            self.enlarge()
        self.resize(len(self.busy))
        stride = stride or (STRIDE if self.stops else self.full)
        kind, held, busy = self.kind, self.together.held, [*self.busy.values()]
        if self.pace is not None:
            held, most = self.pace.next(busy, self.longest, self._sized(kind), self._program(kind))
            stride = min(stride, most)
        rows = min(self.width - len(self.busy) + ended, self.width)
        count = min(self.full, self.longest + stride)
        earlier = compiled_ms()
        ms = self._run(kind, held, rows, count)
        compiled = compiled_ms() - earlier
        self.run_ms = ms
        self.decode_ms += ms
        self.read()
        if self.pace is not None:
            self.pace.learn(ms, compiled, self.written.progress(busy))

    def _run(self, kind: Kind, held: Held, rows: int, count: int) -> float:
        """Run the loop until so many rows are done, or until an answer has `count` tokens; return
        its milliseconds."""
        state = self.state
        pause: Any = np.asarray([rows, count], np.int32)
        self.state, ms = timed(run_decode, held, *self._read_by(kind), Pause(*pause))
        if not kind.changed:
            self.state = self.state.replace(logprobs=state.logprobs, prompt=state.prompt)
        return ms

    def _sized(self, kind: Kind) -> str:
        """Return a name of what the time of a plan's block depends on."""
        guided = " guided" if kind.guided else ""  # the host is asked for each drafted token
        return f"{self.width}x{self.capacity.length + self.room}{guided}"

    def _program(self, kind: Kind) -> Hashable:
        """Return a key of what a plan's loop is compiled for."""
        together = self.together.logprobs, self.together.processing
        return self.width, self.capacity, self.room, *together, kind

    def _read_by(self, kind: Kind) -> tuple[DecodeState, Sampling]:
        """Return the state and the options with what a loop of this kind reads."""
        state, options = self.state, self.options.replace(greedy=not kind.sampled)
        if kind.guided:
            numbers = np.zeros(self.width, np.int32)
            for row, i in self.busy.items():
                numbers[row] = self.written.requests[i].settings.grammar
            mesh = self.batcher.mesh
            placed: Any = numbers if mesh is None else jax.device_put(numbers, replicated(mesh))
            return state, options.with_grammars(placed)
        if kind.changed:
            return state, options
        rest = state.replace(logprobs=None, prompt=None)
        return rest, options.replace(processors=None, logprobs=None)

    def enlarge(self) -> None:
        """Give the caches their next size."""
        more = self.larger[0] - self.room
        self.state, ms = timed(grow, Held(more, self.batcher.mesh, self.state))
        self.decode_ms += ms
        self.room, *self.larger = self.larger

    def read(self) -> None:
        """Read the answers of all busy rows, and free the rows whose answers have ended."""
        names = ("done", "tokens", "count", "stats", "trace", "logprobs")
        columns = jax.tree.map(np.array, {name: getattr(self.state, name) for name in names})
        done, stopped = columns["done"], False
        for row, i in self.busy.items():
            stop = self.written.extend(i, row, columns)
            stopped |= stop and not done[row]
            done[row] |= stop
            if done[row]:
                self.written.end(i)
        if stopped:
            self.end(done)
        self.busy = {row: i for row, i in self.busy.items() if not done[row]}

    def end(self, done: np.ndarray) -> None:
        """Let these rows be done."""
        self.state = self.state.replace(done=jax.device_put(done, self.state.done.sharding))

    def results(self) -> tuple[dict[int, Result], dict[int, Result]]:
        """Return the answers so far of busy rows, and those that have ended, which it forgets."""
        numbers, busy = [*self.written.so_far], set(self.busy.values())
        every = {i: self.written.result(i, self.decode_ms, len(busy)) for i in numbers}
        ended = {i: result for i, result in every.items() if i not in busy}
        self.written.forget(ended)
        return {i: result for i, result in every.items() if i in busy}, ended

    def memory(self) -> MemoryReport:
        """Return the bytes that the batch takes on a device."""
        beside = self.few if self.waits else 0
        if len(self.widths) > 1:
            beside += self.widths[-2]  # rows that move into the largest state
        report = plan_memory(
            self.batcher.program,
            self.together.held.params,
            self.rows,
            self.capacity,
            beside,
            [self.room, *self.larger],
            self.states.empty_options,
        )
        most = 0 if self.reader is None else self.reader.prefixes.most
        return replace(report, prefixes=most)

    def prepare(self, sizes: Sizes, whole: bool = True) -> None:
        """Prefill an example of these sizes into no row, in a live batch whole or in pieces."""
        example = next(each for each in self.examples if holds(sizes, each.sizes))
        if self.reader is None:
            self._prefill([example], [])
        else:
            self._insert(self.reader.prepare(example, sizes, whole), [example], [])

    def prepare_loop(self, width: int, kind: Kind, held: Held) -> None:
        """Compile a loop of so many rows, and what inserts a row into them."""
        if width != self.width:
            self.resize(width)
            self._put(self.states.empty(1, self.room), [])
        pause: Any = np.zeros(2, np.int32)
        executable(run_decode, held, *self._read_by(kind), Pause(*pause))

    def measure(self, width: int, plan: int) -> None:
        """Tell the policy how long a block of a plan takes, after a first one that takes longer."""
        assert self.pace is not None
        self.resize(width)
        for run in range(4):
            self.end(np.zeros(self.width, bool))
            count = int(np.max(self.state.count)) + 1
            ms = self._run(self.kinds[0], self.batcher.plans[plan], self.width, count)
            if run:
                self.pace.policy.measured(plan, self._sized(self.kinds[0]), ms)
        if self.live:
            self.end(np.ones(self.width, bool))
        self.pace.policy.compiled |= {(plan, self._program(kind)) for kind in self.kinds}
