"""Choose the plan of a batch between two runs of its loop, by what was measured.

The rate of a plan is the tokens of its blocks over their milliseconds. Every run of the loop
measures both. Milliseconds belong to the device and the sizes of the batch, so they outlive a
request, and a file keeps them for later processes. Tokens follow from the chance that a drafted
token is accepted, place by place. The chance belongs to the request: it is what its own blocks
showed, with earlier requests as a prior. It is of the sources that drafted, so that a short block
speaks for a longer one too. What lookup would have drafted is known without a run.

A draft that was idle first reads what other plans wrote. So its first few blocks do not show what
a block costs. They show how long reading takes, which later choices spread over 32 blocks: a draft
that reads 100 tokens in 3,200 ms, before blocks of 600 ms, is taken to need 700 ms.

The plan of the highest rate decodes. A plan that may be better is tried for a few tokens, as long
as all trials have lost at most 2 % of the time. Compiling a program and running it first, which
took up to ten times as long as later, says nothing about a plan, and may take another 5 % of the
time. A run that the machine stalls must not decide for good: the middle of the newest three counts,
plain decoding is measured twice before all else, and what one run says is doubted more and more.

Rates are guesses, and plain decoding needs none. So a draft must promise 5 % more than it. What
drafting loses to it after all is a debt, which gains pay back, and 2 % of the time. The larger the
debt, the more a draft must promise: at 24 blocks 1.05 x (1 + 24 / 48) = 1.6 times plain decoding's
rate. So a draft whose promises are wrong by that much loses 24 blocks, what it reads, and 2 % of
the time.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from jaxspec.decoding.plans import Plan
from jaxspec.engine.compile_cache import Held
from jaxspec.engine.evidence import Beliefs, Counts, Evidence
from jaxspec.engine.requests import Use
from jaxspec.errors import InputError
from jaxspec.files import write_text

BUDGET = 0.02
"""Largest share of the time that trials may lose to the best plan, and drafts to plain decoding."""
DEBT = 48.0
"""Blocks that drafts have lost to plain decoding when they must promise twice as much."""
ONCE = 0.05
"""Largest share of the time for compilations and first runs of plans that are only tried."""
MARGIN = 1.05
"""Rate of a draft over plain decoding's from which on it decodes, if drafts have lost nothing."""
STRETCH_MS = 150.0
"""Milliseconds of a run that is no trial, at least: a pause costs the host one or two."""
SHORTEST = 16
"""Tokens of the shortest run that is no trial."""
TRIAL, TRIAL_MS = 2, 20.0
"""Minimum tokens and milliseconds of a trial: a run takes one in addition to its blocks."""
NEWEST = 3
"""Runs of which the middle one counts. The fastest would flatter the plans with short blocks."""
UNREAD = 4
"""Tokens for each block of a run that its sources may have to read first, if it is to say what a
block costs."""
SPREAD = 32
"""Blocks of a draft over which a choice spreads what it must read first."""
STALE = 100
"""Blocks of other plans after which a plan's milliseconds are doubted: they may be half of it. If
only one run has measured them, they may be a third after twice as many blocks, and so on."""
SLOWEST = 10.0
"""A run counts as at most this many times what its blocks usually take; the rest is a stall."""
HOPE = 0.3
"""Share of its misses that a source may not have on another text, for all that is known."""

Method = TypeVar("Method", bound=Callable[..., Any])


class Choice(NamedTuple):
    """Choose the next run."""

    plan: int
    tokens: int
    """Tokens that the longest answer should gain."""
    trial: bool
    sizes: str = ""
    """Name of the batch's sizes."""
    program: Hashable = None
    """Key of these and of all else that a loop is compiled for, but its plan."""


class Gain(NamedTuple):
    """Hold what a row gained by a run."""

    beliefs: Beliefs
    """What is known of its request."""
    stats: Any
    """`DecodeStats` of the run, as numpy."""
    ended: bool = False
    """Whether its answer ended within the run."""
    foreseen: Mapping[tuple[int, ...], Counts] = MappingProxyType({})
    """Blocks that other sources would have drafted."""
    unread: Mapping[int, int] = MappingProxyType({})
    """Tokens of other plans that each source of the run had to read first, by source."""


def _in_turn(method: Method) -> Method:
    """Return a policy's method that one thread at a time may call."""

    @wraps(method)
    def call(policy: Policy, *args: Any, **options: Any) -> Any:
        with policy.lock:
            return method(policy, *args, **options)

    return cast(Any, call)


@dataclass
class Policy:
    """Choose among the plans of one program, of which the first is plain decoding.

    Args:
      plans: The plans.
      file: File that keeps costs for later processes; None keeps none.
    """

    plans: Sequence[Plan]
    file: Path | None = None
    costs: dict[str, deque[float]] = field(default_factory=dict)
    """Milliseconds of a block in the newest runs, by plan and sizes."""
    earlier: dict[str, float] = field(default_factory=dict)
    """Milliseconds that the file holds, as earlier processes measured them."""
    blocks: int = 0
    """Blocks of all runs."""
    measured_at: dict[int, int] = field(default_factory=dict)
    """`blocks` when each plan was measured last."""
    sizes: dict[str, None] = field(default_factory=dict)
    """Sizes that this process has measured."""
    priors: Beliefs = field(default_factory=dict)
    """Evidence of all requests so far."""
    compiled: set[tuple[int, Hashable]] = field(default_factory=set)
    """Plans that are compiled, with the `program` of each."""
    first_ms: float = 0.0
    """Milliseconds that the newest first run took beyond its blocks, with its compilation."""
    once: float = 0.0
    """Sum of `first_ms` of all trials."""
    spent: float = 0.0
    """Milliseconds of all runs."""
    lost: float = 0.0
    """Milliseconds by which trials took longer than the best plan would have."""
    debt: float = 0.0
    """Blocks of plain decoding in the time that drafts lost to it and have not paid back."""
    reading: dict[int, float] = field(default_factory=dict)
    """Share of a plain block in which a source that was idle reads a token, by source."""
    lock: Any = field(default_factory=threading.RLock, repr=False, compare=False)
    """Lock for the threads that decode with one engine."""

    def __post_init__(self) -> None:
        self.places = max(plan.gamma for plan in self.plans)
        self.none = Evidence.none(self.places)
        if self.file is not None:
            # A file that is not readable, or holds something else, is as good as none.
            with suppress(OSError, ValueError, TypeError, AttributeError):
                costs = {key: float(ms) for key, ms in json.loads(self.file.read_text()).items()}
                if all(0 < ms < math.inf for ms in costs.values()):
                    self.earlier = costs

    @_in_turn
    def choose(
        self,
        requests: Iterable[Beliefs],
        sizes: str,
        program: Hashable,
        unread: Mapping[int, int] = MappingProxyType({}),
    ) -> Choice:
        """Choose the next run.

        Args:
          requests: What is known of each request that decodes.
          sizes, program: See `Choice`.
          unread: Tokens that a source must read first, by source.
        """
        rows, numbers = list(requests) or [{}], range(len(self.plans))
        known = {i: ms for i in numbers if (ms := self.cost(i, sizes)) is not None}
        trial = max(TRIAL, min(SHORTEST, round(TRIAL_MS / known.get(0, TRIAL_MS))))
        # What a program's first run takes says nothing, and a single run may have been stalled.
        if 0 not in known or self.measured_once(0, sizes):
            return Choice(0, trial if (0, program) in self.compiled else 1, False, sizes, program)
        costs = [known.get(i) or self.least_cost(i, known) for i in numbers]
        margin = MARGIN * (1 + self.debt / DEBT)
        reading_ms = [
            known[0] * sum(self.reading.get(i, 0.0) * unread.get(i, 0) for i in plan.drafting)
            for plan in self.plans
        ]
        rates = [
            self.tokens(i, rows) / (costs[i] + reading_ms[i] / SPREAD) / (margin if i else 1)
            for i in numbers
        ]
        best, hopes = max(known, key=lambda i: rates[i]), {}
        compiled = {i for i in numbers if (i, program) in self.compiled}
        # One draft compiles at once: it is there to be used.
        more = compiled <= {0} or self.once + self.first_ms <= ONCE * self.spent
        for i, ms in enumerate(costs):
            blocks = max(1.0, trial * len(rows) / self.tokens(i, rows))
            loss = blocks * ms * max(0.0, 1 - rates[i] / rates[best]) + reading_ms[i]
            if not (more or i in compiled):
                continue
            doubt = self.doubt(i, sizes)
            hope = doubt * self.tokens(i, rows, HOPE) / ms
            if i != best and hope > rates[best] and self.lost + loss <= BUDGET * self.spent:
                hopes[i] = hope
        if hopes:
            return Choice(max(hopes, key=lambda i: hopes[i]), trial, True, sizes, program)
        stretch = max(SHORTEST, round(STRETCH_MS * rates[best] / len(rows)))
        if sources := self.plans[best].drafting:
            # What this request shows may be another thing than what earlier ones did.
            shown = min(row.get(sources, self.none).verified[0] for row in rows)
            stretch = max(trial, min(stretch, round(shown)))
        return Choice(best, stretch, False, sizes, program)

    @_in_turn
    def observe(self, choice: Choice, ms: float, compiled_ms: float, gains: Sequence[Gain]) -> None:
        """Learn from a run of a choice, which took `ms` milliseconds without its compilation."""
        plan, sizes, program = self.plans[choice.plan], choice.sizes, choice.program
        blocks = max((int(gain.stats.steps) for gain in gains), default=0)
        known, plain = self.cost(choice.plan, sizes), self.cost(0, sizes)
        first = (choice.plan, program) not in self.compiled
        read = [max(gain.unread.get(source, 0) for gain in gains) for source in plan.drafting]
        longest = 0.0  # ms of reading at most: reading a token takes no longer than writing it
        if plain and max(read, default=0) > UNREAD * blocks:
            longest = sum(read) * plain
        if (usual := known or plain) and blocks and not first:
            ms = min(ms, SLOWEST * blocks * usual + longest)
        self.spent += ms
        if first:
            blocks_ms = blocks * (known or ms / max(blocks, 1))
            self.first_ms = compiled_ms + max(0.0, ms - blocks_ms)
            self.once += self.first_ms if choice.trial else 0.0
        if not blocks:  # the next run is the first one
            return
        self.compiled.add((choice.plan, program))
        self.blocks += blocks
        read_ms = 0.0
        if first:  # what is lost beside blocks is counted in `once`
            ms = blocks * (usual or ms / blocks)
        elif known is None or ms / blocks < known or not longest:
            self.measured(choice.plan, sizes, ms / blocks)
        else:
            read_ms = min(ms - blocks * known, longest)
            for source, count in zip(plan.drafting, read):
                if count:
                    share = read_ms / longest
                    self.reading[source] = (self.reading.get(source, share) + share) / 2
        plain = self.cost(0, sizes) or ms / blocks
        for beliefs, stats, _, foreseen, _ in gains:
            own = Counts(stats.drafted_at, stats.accepted_at)
            for sources, counts in {**foreseen, plan.drafting: own}.items():
                if sources and counts.drafted[0]:
                    for evidence in (beliefs, self.priors):
                        evidence.setdefault(sources, Evidence.none(self.places)).add(counts)
        # Plain decoding would have taken as many blocks as the answers that go on gained tokens.
        tokens = [int(gain.stats.emitted) for gain in gains]
        going = [count for count, gain in zip(tokens, gains) if not gain.ended]
        gained = sum(going) / len(going) if going else max(tokens)
        lost = (ms - read_ms) / plain - gained if plan.drafting else 0.0
        self.debt = max(0.0, self.debt + lost - BUDGET * ms / plain)
        if choice.trial:
            rows, numbers = [gain.beliefs for gain in gains], range(len(self.plans))
            costs = {i: self.cost(i, sizes) for i in numbers}
            rate = max(self.tokens(i, rows) / cost for i, cost in costs.items() if cost)
            self.lost += max(0.0, ms - gained * len(gains) / rate)

    @_in_turn
    def measured(self, i: int, sizes: str, ms: float) -> None:
        """Note the milliseconds of a block."""
        self.measured_at[i] = self.blocks
        self.sizes.pop(sizes, None)
        self.sizes[sizes] = None  # the newest are last
        newest = self.costs.setdefault(f"{self.plans[i].name}|{sizes}", deque(maxlen=NEWEST))
        fills = len(newest) < NEWEST
        newest.append(ms)
        if self.file is not None and fills:
            middle = {key: _middle(values) for key, values in self.costs.items()}
            costs = {key: round(ms, 4) for key, ms in (self.earlier | middle).items()}
            with suppress(InputError):
                write_text(self.file, json.dumps(costs, indent=1))

    def least_cost(self, i: int, known: Mapping[int, float]) -> float:
        """Return the least milliseconds that a block of a plan may cost, if it was never measured.

        It costs no less than plain decoding's. Its sources take no less time than in a measured
        plan with some of them, in proportion to its length: if plain decoding takes 20 ms, and a
        block with 5 tokens of a head 45 ms, then a block with 2 tokens takes 30 ms.
        """
        plan, plain = self.plans[i], known[0]
        measured = [(self.plans[j], ms - plain) for j, ms in known.items() if j]
        shares = [
            ms * min(1.0, plan.gamma / other.gamma)
            for other, ms in measured
            if set(other.drafting) <= set(plan.drafting)
        ]
        return plain + max([0.0, *shares])

    def doubt(self, i: int, sizes: str) -> int:
        """Return by which factor a plan may have become faster since it was measured."""
        ages = max(self.blocks - self.measured_at.get(i, 0) - 1, 0) // STALE
        return 1 + (ages if self.measured_once(i, sizes) else min(ages, 1))

    def measured_once(self, i: int, sizes: str) -> bool:
        """Return whether only one run has measured a plan's block."""
        key = f"{self.plans[i].name}|{sizes}"
        return len(self.costs.get(key, ())) == 1 and key not in self.earlier

    def cost(self, i: int, sizes: str) -> float | None:
        """Return the milliseconds of a plan's block.

        Where this process has not measured it, they are an earlier process's, or those of other
        sizes, in proportion to plain decoding's.
        """
        name, plain = f"{self.plans[i].name}|", f"{self.plans[0].name}|"
        every = self.earlier | {key: _middle(values) for key, values in self.costs.items()}
        if name + sizes in every:
            return every[name + sizes]
        others = (key for key in (*self.costs, *every) if key.startswith(name))
        if (other := next(others, None)) is None:
            return None
        here, there = (every.get(plain + size) for size in (sizes, other.removeprefix(name)))
        return every[other] * (here / there if here and there else 1)

    def tokens(self, i: int, rows: Sequence[Beliefs], hope: float = 0.0) -> float:
        """Return the tokens that a block of a plan adds to all rows.

        hope: Share of the misses on earlier requests that may be none on these.
        """
        plan = self.plans[i]
        if not plan.drafting:
            return float(len(rows))
        prior = self.priors.get(plan.drafting, self.none).chances()
        prior = prior + hope * (1 - prior)
        chances = (beliefs.get(plan.drafting, self.none).chances(prior) for beliefs in rows)
        return sum(1 + float(np.cumprod(each[: plan.gamma]).sum()) for each in chances)

    @_in_turn
    def gained(self, uses: Mapping[str, Use]) -> str:
        """Return what the plans of an answer gained over plain decoding, as measured."""
        plain = self.cost(0, next(reversed(self.sizes), ""))
        used = sum(use.ms for use in uses.values())
        if not plain or not used:
            return "plain decoding was not measured"
        tokens = sum(use.tokens for use in uses.values())
        parts = (f"{name} {use.tokens}" for name, use in uses.items() if use.tokens)
        return f"{tokens * plain / used:.2f} x plain decoding (tokens: {', '.join(parts)})"

    @_in_turn
    def report(self) -> str:
        """Return a line for each size of a batch: what blocks cost, and from where on they pay."""
        lines = []
        for sizes in self.sizes:
            base, parts = self.cost(0, sizes), []
            for i, plan in enumerate(self.plans):
                if values := self.costs.get(f"{plan.name}|{sizes}"):
                    ms = _middle(values)
                    pays = f" (pays from {ms / base:.2f} tokens per pass)" if i and base else ""
                    parts.append(f"{plan.name} {ms:.3g} ms{pays}")
            rows, _, slots = sizes.partition("x")
            slots, _, kind = slots.partition(" ")
            which = f"{rows} rows and {slots} slots{f', {kind}' if kind else ''}"
            lines.append(f"a block of {which}: {', '.join(parts)}")
        return "\n".join(lines)


def cost_file(plans: Sequence[Plan], held: Held) -> Path | None:
    """Return the file of the costs of plans on this device; None without a folder of programs."""
    folder = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if not folder or "://" in folder:
        return None
    device = jax.devices()[0]
    weights = Counter[str]()
    for leaf in jax.tree.leaves(held.params):
        weights[str(leaf.dtype)] += leaf.nbytes
    parts = device.platform, device.device_kind, os.cpu_count(), held.mesh, weights, plans
    name = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Path(folder) / f"costs-{name}.json"


def _middle(values: Iterable[float]) -> float:
    """Return the middle one of some values, of an even number the lower of the two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
