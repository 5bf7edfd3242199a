"""Own the engine in one thread: requests join and leave its live batch between two runs.

A ticket is one answer. The event loop submits tickets and reads their parts; everything else about
them, and all of JAX, happens in this thread. A lane is one live batch: the server's own, and one
that decodes plainly, next to which the page races drafts. The lanes take turns, run by run, so each
is timed by itself. A run is a block, or as many as take 25 to 50 ms: the host needs one or two
between two runs, which is much next to a block of 5 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from jaxspec.config import text_config
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.batches.prefixes import image_names
from jaxspec.engine.batches.warmup import warmup_steps
from jaxspec.engine.compile_cache import crowded
from jaxspec.engine.engine import Engine
from jaxspec.engine.memory import spare_memory
from jaxspec.engine.requests import EncodedRequest, Request, Result, decoded
from jaxspec.errors import InputError
from jaxspec.serve.examples import scaled

Lane = Literal["drafted", "plain"]
"""Name of a live batch."""
RUN_MS = 50.0
"""Milliseconds of a run of several blocks, at most: what a stream or a new request waits for."""

SPARE = 0.25
"""Share of the machine's memory that a warm-up leaves: a program can take 50 MB of it on a CPU."""


class Full(Exception):
    """Say that the queue is full, and after how many seconds to try again."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"{seconds} s")
        self.seconds = seconds


class Unready(Exception):
    """Say that the server is warming up, or ending."""


class Late(Exception):
    """Say that an answer was not whole at its deadline."""


@dataclass(eq=False)
class Ticket:
    """Follow one answer from the queue to its end."""

    request: EncodedRequest
    deadline: float
    """When it ends at the latest, in seconds of `time.monotonic`."""
    news: asyncio.Event
    """Set by every longer answer and error; the tickets of one HTTP request share it."""
    loop: asyncio.AbstractEventLoop
    lane: Lane = "drafted"
    arrived: float = field(default_factory=time.monotonic)
    began: float = 0.0
    """When it took a row, in seconds of `time.monotonic`."""
    first: float = 0.0
    """When its first token came, in seconds of `time.monotonic`."""
    waiting: int = 0
    """Place in its lane's queue, from 1; 0 once it has a row."""
    result: Result | None = None
    """Answer so far, whole if it has a `finish_reason`; the event loop may miss earlier ones."""
    error: Exception | None = None
    abandoned: bool = False
    """Whether nobody waits for it any more."""

    def publish(self, result: Result | None, error: Exception | None = None) -> None:
        """Let the event loop know of a longer answer, an error, or a new place in the queue."""
        if result is not None:
            self.first = self.first or time.monotonic()
            self.result = result
        self.error = error
        try:
            self.loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # the loop has ended
            self.abandoned = True

    @property
    def over(self) -> bool:
        """Return whether its row is better used by another."""
        return self.abandoned or time.monotonic() > self.deadline


def next_stride(stride: int, gained: int, ms: float) -> int:
    """Return the tokens of a lane's next run.

    Args:
      stride: Tokens that the longest answer was to gain in a run.
      gained: Tokens by which the longest answer is longer now; fewer if an answer ended.
      ms: Milliseconds that the run took.
    """
    if ms > RUN_MS:
        return max(1, stride // 2)
    return 2 * stride if gained >= stride and ms < RUN_MS / 2 else stride


class Worker(threading.Thread):
    """Own the engine. `read` and `submit` may be called by other threads.

    Args:
      engine: The server's engine; its `batch_size` rows decode together.
      examples: Requests whose sizes are compiled before the first answer.
      queue: Maximum tickets that wait for a row of each lane.
      plain: Engine of the plain lane, or None without one.
      observe: Called in this thread with each ticket that has ended.
      progress: Called in this thread after each program of the warm-up, and once it is ready.
      patience: Seconds after which the warm-up leaves programs that are not always needed to the
        time when nobody asks, or to the first request that needs them.
      prefixes: Maximum bytes that the lanes keep of prompts, for others that begin alike.
    """

    def __init__(
        self,
        engine: Engine,
        examples: Sequence[Request],
        queue: int = 64,
        plain: Engine | None = None,
        observe: Callable[[Ticket], None] = lambda ticket: None,
        progress: Callable[[], None] = lambda: None,
        patience: float = math.inf,
        prefixes: int = 0,
    ) -> None:
        super().__init__(name="jaxspec-worker", daemon=True)
        self.engine, self.queue = engine, queue
        self.observe, self.progress, self.patience = observe, progress, patience
        engines: dict[Lane, Engine] = {"drafted": engine}
        if plain is not None:
            engines["plain"] = plain
        self.lanes: dict[Lane, Batch] = {
            name: engine.live(examples, prefixes // len(engines))
            for name, engine in engines.items()
        }
        self.strides = dict.fromkeys(self.lanes, 1)
        """Tokens that the longest answer of each lane gains in a run."""
        self.joining = {name: dict[int, Ticket]() for name in self.lanes}
        """Tickets by number whose prompt is being read, in each lane."""
        self.waiting: deque[Ticket] = deque()
        self.tickets: dict[int, Ticket] = {}
        """Tickets whose requests have rows, by number."""
        self.failure: BaseException | None = None
        self.ready = threading.Event()
        self.warmed = 0
        """Number of compiled programs, of `len(self.programs)`."""
        self.programs = sorted(
            (step for lane in self.lanes.values() for step in warmup_steps(lane)),
            key=lambda step: (step.rank, -step.length),
        )
        """Steps of the warm-up, first those without which no answer begins."""
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self.ending = False
        """Whether it takes no more tickets."""
        self._seconds = 1.0
        """Mean time that an answer has a row."""
        self._ended, self._longest = -math.inf, 0.0
        """When the last request ended, and the seconds of the longest step of the warm-up."""

    @property
    def batch(self) -> Batch:
        return self.lanes["drafted"]

    def read(self, request: Request, most: int | None, lane: Lane = "drafted") -> EncodedRequest:
        """Return a request that fits in a lane's batch; InputError for one that does not.

        most: Maximum new tokens, where the batch and the model have room for them; None takes all.
        """
        batch = self.lanes[lane]
        encoded = scaled(batch, replace(request, max_new_tokens=1))
        context = text_config(self.engine.assembly.lead.config).context
        room = max(min(context - len(encoded.rows[0]), batch.capacity.new), 1)
        encoded = replace(encoded, max_new_tokens=min(most or room, room))
        batch.fit(encoded)
        encoded = decoded(encoded)
        image_names(encoded)  # pictures keep their hashes, which take too long between two runs
        return encoded

    @property
    def room(self) -> int:
        """Return the most tickets that have a row or wait for one, of all lanes."""
        return sum(lane.rows + self.queue for lane in self.lanes.values())

    @property
    def full(self) -> Full:
        """Return the error of a full queue, with the time in which those that wait are answered."""
        turns = 1 + len(self.waiting) / self.batch.rows
        return Full(math.ceil(turns * self._seconds))

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queue the tickets of one HTTP request; raise Full or Unready."""
        with self._changed:
            if self.ending or self.failure or not self.ready.is_set():
                raise Unready
            lane = tickets[0].lane
            before = sum(ticket.lane == lane for ticket in self.waiting)
            if before + len(tickets) > self.queue + len(self.lanes[lane].free):
                raise self.full
            self.waiting.extend(tickets)
            self._tell_places()
            self._changed.notify()

    def abandon(self, tickets: Iterable[Ticket]) -> None:
        """Free the rows of these tickets before the next block."""
        with self._changed:
            for ticket in tickets:
                ticket.abandoned = True
            self._changed.notify()

    def end(self) -> None:
        """Take no more tickets, finish those that are here, and end the thread."""
        with self._changed:
            self.ending = True
            self._changed.notify()

    def run(self) -> None:
        """Warm up, then decode until `end`."""
        try:
            start = time.monotonic()
            while self.warmed < len(self.programs):
                late = time.monotonic() - start > self.patience
                if self.ending or (late and self.programs[self.warmed].rank):
                    break
                self._compile()
                self.progress()
            if self.ending:
                return
            self.ready.set()
            self.progress()
            while self._advance():
                pass
        except BaseException as error:  # reported by `failure`; no answer may wait for ever
            self.failure = error
        finally:
            with self._changed:
                self.ending = True
            for ticket in (*self.tickets.values(), *self.waiting):
                ticket.publish(None, Unready())

    def _compile(self) -> None:
        start = time.monotonic()
        self.programs[self.warmed].run()
        self.warmed += 1
        if crowded() or spare_memory() < SPARE:  # these are needed sooner than others
            del self.programs[self.warmed :]
        self._longest = max(self._longest, time.monotonic() - start)

    @property
    def rest(self) -> float | None:
        """Return the seconds until the next program that the warm-up left; None without any.

        It begins once nobody has asked for as long as the longest took. So a client that asks
        again at once never waits for it.
        """
        if self.warmed == len(self.programs):
            return None
        return max(0.0, self._ended + self._longest - time.monotonic())

    def _advance(self) -> bool:
        """Let requests leave and join, and decode one run; return False at the end.

        While nobody asks, it compiles what the warm-up left.
        """
        with self._changed:
            while not (self.waiting or self.tickets or self.ending) and self.rest != 0:
                self._changed.wait(self.rest)
            idle = not (self.waiting or self.tickets)
            if idle and self.ending:
                return False
        if idle:
            self._compile()
            return True
        with self._changed:
            late = [ticket for ticket in self.waiting if ticket.over]
            self.waiting = deque(ticket for ticket in self.waiting if ticket not in late)
        leaving = {number: ticket for number, ticket in self.tickets.items() if ticket.over}
        for ticket in (*late, *leaving.values()):
            self._end(ticket, Late())
        for name, lane in self.lanes.items():
            if numbers := {i for i, ticket in leaving.items() if ticket.lane == name}:
                lane.leave(numbers)
                for number in numbers:
                    self.joining[name].pop(number, None)
            self._join(name)
            if lane.busy:
                before, stride = lane.longest, self.strides[name]
                lane.decode(stride)
                self.strides[name] = next_stride(stride, lane.longest - before, lane.run_ms)
                self._publish(lane)
        for number in leaving:
            del self.tickets[number]
        return True

    def _join(self, name: Lane) -> None:
        """Read one waiting prompt, or a piece of it, for a lane's free rows; publish its first
        tokens once it is read.

        Only one, since the rows that decode wait for it. A ticket is always in `waiting` or in
        `tickets`, whose tickets a failure reaches.
        """
        lane = self.lanes[name]
        while joining := self.joining[name] or self._take(name, len(lane.free)):
            unread = {number: ticket.request for number, ticket in joining.items()}
            self.joining[name] = {}
            try:
                lane.join(unread)
            except InputError as error:
                for number in joining:
                    self._end(self.tickets.pop(number), error)
                continue
            if unread:
                self.joining[name] = joining
                return
            lane.read()
            return self._publish(lane)

    def _take(self, name: Lane, most: int) -> dict[int, Ticket]:
        """Number the first ticket that somebody waits for in a lane, and those of the same prompt
        right after it; return at most `most`.
        """
        joining: list[Ticket] = []
        with self._changed:
            for ticket in (ticket for ticket in self.waiting if ticket.lane == name):
                if len(joining) == most:
                    break
                if joining and ticket.request.rows is not joining[0].request.rows:
                    break
                if not ticket.over:
                    ticket.began, ticket.waiting = time.monotonic(), 0
                    ticket.publish(None)
                    joining.append(ticket)
            self.waiting = deque(ticket for ticket in self.waiting if ticket not in joining)
            self._tell_places()
            numbered = {next(self._numbers): ticket for ticket in joining}
            self.tickets |= numbered
            return numbered

    def _tell_places(self) -> None:
        """Let those that wait know their new places in the queues."""
        counts = dict.fromkeys(self.lanes, 0)
        for ticket in self.waiting:
            counts[ticket.lane] += 1
            if ticket.waiting != counts[ticket.lane]:
                ticket.waiting = counts[ticket.lane]
                ticket.publish(None)

    def _publish(self, lane: Batch) -> None:
        """Publish what each ticket of a lane has gained, and end those whose answers are whole."""
        for number, result in lane.results().items():
            ticket = self.tickets[number]
            if result.finish_reason is not None:
                del self.tickets[number]  # first, so that it does not count as running
                ticket.publish(result)
                self._end(ticket)
            elif ticket.result is None or len(ticket.result.tokens) < len(result.tokens):
                ticket.publish(result)

    def _end(self, ticket: Ticket, error: Exception | None = None) -> None:
        if error is None:
            seconds = time.monotonic() - ticket.began
            self._seconds += (seconds - self._seconds) / 8
        elif not ticket.abandoned:
            ticket.publish(None, error)
        self._ended = time.monotonic()
        self.observe(ticket)
