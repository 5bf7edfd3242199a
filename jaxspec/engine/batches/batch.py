"""Decode requests in the rows of a batch, in several runs of the loop between which it may change.

*Coming and going*. A finished row costs computation until its batch ends. So requests join the
free rows of a batch while the others decode, and leave it when they end or nobody waits for them.
A live batch has as many rows as are busy, rounded up to a power of two, so that one request pays
for one row. A request's draws depend only on its own key and position, not on its batch.

*Growing caches*. A pass reads all slots of a cache, filled or not. So caches start with room for
128 new tokens and grow fourfold whenever an answer needs more. Those of a live batch have fewer
slots while all its prompts and answers are short. Each size is a program of its own, compiled when
the first answer reaches it. Tokens do not change, because a row attends only to the slots that it
has filled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxspec.cache import KVCache
from jaxspec.decoding.state import DecodeState, Pause
from jaxspec.decoding.steps import run_decode
from jaxspec.engine.batches.batcher import Batcher
from jaxspec.engine.batches.fitting import Kind, fitting, has_room, live_forms, live_sizes
from jaxspec.engine.batches.pace import Pace
from jaxspec.engine.batches.reading import Reader, ReadPrompt
from jaxspec.engine.batches.states import Rows, States
from jaxspec.engine.batches.writing import Start, Written
from jaxspec.engine.compile_cache import Held, compiled_ms, timed
from jaxspec.engine.memory import MemoryReport, Sizes, plan_memory
from jaxspec.engine.requests import EncodedRequest, Result
from jaxspec.sampling import Sampling
from jaxspec.sharding import replicated

STRIDE = 8
"""Tokens between two looks at an answer that is streamed or may stop at a string."""


class Batch:
    """Decode requests that join and leave while others decode.

    `join` prefills requests into free rows, `decode` runs the loop, `results` says how far each
    answer is, and `leave` frees the rows of requests that nobody waits for. `answers` does all of
    it for a list of requests.

    Args:
      examples: Requests whose sizes and kinds of loop the batch has programs for. All others must
        fit in these sizes.
      rows: Maximum rows; None means as many as the examples need.
      live: Whether requests come one by one without an end. The batch then begins empty and with
        room for the longest answer, and a prompt is padded to the smallest example that holds it.
      one_prompt: Whether the requests are samples of one prompt.
      past: Cache of an earlier turn, whose slots begin the only prompt.
      prefixes: Maximum bytes that a live batch keeps of prompts, for others that begin alike.
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
        shared = batcher.together(examples)
        self.together = shared._replace(one_prompt=one_prompt, past=past)
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
        rooms = batcher.rooms(self.capacity)
        self.forms = [self.capacity._replace(new=room) for room in rooms]
        """Growing sizes that its rows may have."""
        self.smaller = list[Sizes]()
        """Sizes that a live batch may have once their programs are compiled, see `use`."""
        if live:
            *self.smaller, last = live_forms(self.sizes, rooms)
            self.forms = [last]
        self.form = self.forms[0]
        """Sizes that its rows have."""
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
        self.states = States(self.together)
        self.reader: Reader | None = None
        """What reads the prompts of a live batch."""
        if live:
            self.state, self.options = self.states.empty(self.width, self.form)
            alone = {form: self.states.empty(1, form)[0].target for form in self.every_form}
            self.reader = Reader(batcher, self.together, self.sizes, alone, prefixes)

    @property
    def capacity(self) -> Sizes:
        """Return the sizes of the batch, which hold every request."""
        return self.together.sizes

    @property
    def every_form(self) -> list[Sizes]:
        """Return all sizes that the rows have or may get, in order."""
        return sorted({*self.smaller, *self.forms})

    @property
    def kind(self) -> Kind:
        """Return the kind of the loop's next run.

        A live batch compiles loops that no example needed when a request first needs them.
        """
        needed = Kind.of(self.requests)
        unguided = needed._replace(guided=False)
        kind = next((kind for kind in self.kinds if kind.serves(unguided)), unguided)
        return kind._replace(guided=kind.guided or needed.guided)

    @property
    def free(self) -> list[int]:
        """Return the rows that decode nothing."""
        return [row for row in range(self.rows) if row not in self.busy]

    @property
    def requests(self) -> list[EncodedRequest]:
        """Return the requests of the busy rows, in order."""
        return [self.written.answers[i].request for i in self.busy.values()]

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest unfinished answer; 1 before any is read."""
        texts = (self.written.answers[i].text for i in self.busy.values())
        return max((1, *(len(text.tokens) for text in texts)))

    def full(self, form: Sizes) -> int:
        """Return the number of tokens of an answer at which rows of these sizes must grow."""
        block = 0 if form.new == self.capacity.new else self.batcher.program.most_tokens
        return form.new - block + 1

    def answers(
        self, requests: Sequence[EncodedRequest], stride: int | None = None
    ) -> Iterator[list[Result]]:
        """Decode these requests; yield the answers so far at each pause, at last the whole ones.

        The text of an answer so far is what no later token changes.

        stride: Number of tokens between two pauses; None yields only the whole answers.
        """
        waiting, results = dict(enumerate(requests)), dict[int, Result]()
        while waiting or self.busy:
            self.join(waiting)
            self.decode(stride, self.few if waiting else self.rows)
            results |= self.results()
            if stride is None and (waiting or self.busy):
                continue  # for many requests, lists of the answers so far would fill the memory
            times: dict[str, Any] = {"prefill_ms": self.prefill_ms, "decode_ms": self.decode_ms}
            times |= {"batch": len(requests), "compile_ms": compiled_ms() - self.compiled}
            yield [replace(results[i], **times) for i in sorted(results)]

    def fit(self, request: EncodedRequest) -> Sizes:
        """Return the smallest sizes that hold the request; InputError if none does."""
        limits = {"max_new_tokens": (request.max_new_tokens, self.capacity.new)}
        limits |= self.together.limits(request)
        return fitting(request, self.sizes, self.examples, limits)

    def join(self, waiting: dict[int, EncodedRequest]) -> None:
        """Prefill requests into the free rows, in order, and take them out of `waiting`.

        A live batch in which others decode may read only a part of a long prompt: it then returns,
        and reads on in the next call, if the same request is the first one.

        waiting: Requests by a number of the caller's, which names them in `results` and `leave`.
        """
        while waiting and (free := self.free):
            count = min(self.few, len(free)) if self.started else self.rows
            joining = {i: waiting[i] for i in islice(waiting, count)}
            prompt, requests = None, [*joining.values()]
            sizes = [*map(self.fit, requests)]
            if self.reader is not None:
                wait = self.run_ms if self.busy else math.inf
                prompt = self.reader.read(requests[0], sizes[0], wait)
                if prompt is None:
                    return
            self.resize(requests)
            rows = self.free[: len(joining)]
            if prompt is None:
                start = self.prefill(requests, rows)
            else:
                start = self.insert(prompt, requests, rows)
            self.prefill_ms += start.prefill_ms
            self.busy |= dict(zip(rows, joining))
            self.written.begin(joining, start, self.state.trace is not None)
            for i in joining:
                del waiting[i]

    def prefill(self, requests: Sequence[EncodedRequest], rows: Sequence[int]) -> Start:
        """Prefill a list of requests together, into these rows or into none."""
        count = self.few if self.started else self.rows
        room, options = self.batcher.rooms(self.capacity)[0], self.together.options(requests, count)
        fresh, ms = self.batcher.prefill(self.together, requests, options, room)
        if self.started:
            self.put((fresh, options), rows)
        else:
            self.state, self.started = fresh, True
            self.options = options.with_grammars(None)
        return Start(ms, self.decode_ms)

    def insert(
        self, prompt: ReadPrompt, requests: Sequence[EncodedRequest], rows: Sequence[int]
    ) -> Start:
        """Insert a prompt of a live batch for a request into this row, or into none."""
        fresh, logits = (prompt.state, self.together.options(requests, 1)), prompt.logits
        if len(self.widths) > 1:
            # In one form for prompts of all sizes, so that each width needs one program.
            fresh = self.states.inserted(self.states.empty(1, self.form), fresh, [0], logits)
            logits = None
        self.put(fresh, rows, logits)
        return Start(prompt.ms, self.decode_ms, prompt.cached)

    def put(self, fresh: Rows, rows: Sequence[int], logits: Any = None) -> None:
        """Insert the first fresh rows at these places, see `States.inserted`."""
        old = self.state, self.options
        self.state, self.options = self.states.inserted(old, fresh, rows, logits)

    def resize(self, joining: Sequence[EncodedRequest] = ()) -> None:
        """Move the busy rows, in order, into the least state that holds them and those that join.

        Only a live batch gets smaller.
        """
        if not self.started:
            return
        requests = [*self.requests, *joining]
        goal = next(width for width in self.widths if width >= len(requests))
        form = next(form for form in self.forms if self._holds(form, requests))
        if self.live and not self.busy:
            self.hold(goal, form)
        elif form != self.form and (self.live or form > self.form):
            self.move(self.width, form)
        while self.width != goal:  # by one step, so that few programs are needed
            at = self.widths.index(self.width) + (1 if goal > self.width else -1)
            self.move(self.widths[at], self.form)

    def _holds(self, form: Sizes, requests: Sequence[EncodedRequest]) -> bool:
        """Return whether rows of these sizes have room for the prompts and the next block."""
        if form == self.forms[-1]:
            return True
        prompts = all(has_room(form, request.sizes) for request in requests)
        return prompts and self.longest < self.full(form)

    def move(self, width: int, form: Sizes) -> None:
        """Move the busy rows into a state of other sizes."""
        moved = {row: new for new, row in enumerate(self.busy)}
        rows = [moved.get(row, width) for row in range(self.width)]
        old = self.state, self.options
        self.state, self.options = self.states.inserted(self.states.empty(width, form), old, rows)
        self.busy = dict(enumerate(self.busy.values()))
        self.width, self.form = width, form

    def hold(self, width: int, form: Sizes) -> None:
        """Take an empty state of these sizes, while nothing decodes."""
        if (width, form) != (self.width, self.form):
            self.state, self.options = self.states.empty(width, form)
            self.width, self.form = width, form

    def use(self, form: Sizes) -> None:
        """Let rows have these sizes from now on."""
        self.forms = sorted({form, *self.forms})

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
        self.decode_ms -= self.states.ms
        self.resize()
        self.decode_ms += self.states.ms
        stops = any(request.stop for request in self.requests)  # at strings, unseen by the loop
        stride = stride or (STRIDE if stops else self.full(self.form))
        kind, held, busy = self.kind, self.together.held, [*self.busy.values()]
        if self.pace is not None:
            names = self.sizes_name(kind), self.loop_key(kind)
            held, most = self.pace.next(busy, self.longest, *names)
            stride = min(stride, most)
        rows = min(self.width - len(self.busy) + ended, self.width)
        count, earlier = min(self.full(self.form), self.longest + stride), compiled_ms()
        self.run_ms = self.run(kind, held, rows, count)
        compiled = compiled_ms() - earlier
        self.decode_ms += self.run_ms
        self.read()
        if self.pace is not None:
            self.pace.learn(self.run_ms, compiled, self.written.progress(busy))

    def run(self, kind: Kind, held: Held, rows: int, count: int) -> float:
        """Run the loop until `rows` are done or an answer has `count` tokens; return its ms."""
        state = self.state
        pause: Any = np.asarray([rows, count], np.int32)
        self.state, ms = timed(run_decode, held, *self.read_by(kind), Pause(*pause))
        if not kind.changed:
            self.state = self.state.replace(logprobs=state.logprobs, prompt=state.prompt)
        return ms

    def sizes_name(self, kind: Kind) -> str:
        """Return a name for the sizes on which the time of a plan's block depends."""
        guided = " guided" if kind.guided else ""  # the host is asked for each drafted token
        return f"{self.width}x{self.form.slots}{guided}"

    def loop_key(self, kind: Kind) -> Hashable:
        """Return a key of what a plan's loop is compiled for."""
        together = self.together.logprobs, self.together.processing
        return self.width, self.form, *together, kind

    def read_by(self, kind: Kind) -> tuple[DecodeState, Sampling]:
        """Return the state and the options with what a loop of this kind reads."""
        state, options = self.state, self.options.replace(greedy=not kind.sampled)
        if kind.guided:
            numbers = np.zeros(self.width, np.int32)
            for row, request in zip(self.busy, self.requests):
                numbers[row] = request.settings.grammar
            mesh = self.batcher.mesh
            placed: Any = numbers if mesh is None else jax.device_put(numbers, replicated(mesh))
            return state, options.with_grammars(placed)
        if kind.changed:
            return state, options
        smaller = state.replace(logprobs=None, prompt=None)
        return smaller, options.replace(processors=None, logprobs=None)

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
        """End these rows."""
        self.state = self.state.replace(done=jax.device_put(done, self.state.done.sharding))

    def results(self) -> dict[int, Result]:
        """Return the answers so far. It forgets those that have ended, with a `finish_reason`."""
        results = self.written.results(self.decode_ms, len(self.busy))
        self.written.forget([i for i, result in results.items() if result.finish_reason])
        return results

    def memory(self) -> MemoryReport:
        """Return the bytes that the batch takes on a device."""
        extra, forms = self.few if self.waits else 0, self.every_form
        if len(self.widths) > 1:
            extra += self.widths[-2]  # rows that move into the largest state
        report = plan_memory(
            self.batcher.program,
            self.together.held.params,
            self.rows,
            forms[-1],
            (extra, forms[-1 if self.live else 0]) if extra else None,
            forms[-2] if len(forms) > 1 else None,
            partial(self.together.host_options, []),
        )
        return replace(report, prefixes=self.reader.prefixes.most if self.reader else 0)
