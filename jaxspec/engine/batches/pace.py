"""Follow one batch for a policy: what each request's answer shows of the plans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import jax
import numpy as np

from jaxspec.engine.compile_cache import Held
from jaxspec.engine.evidence import Beliefs, Counts, Progress, Shadow
from jaxspec.engine.policy import Choice, Gain, Policy
from jaxspec.engine.requests import Use


class Pace:
    """Follow one batch: ask a policy for its plans, and tell it what they did."""

    def __init__(self, policy: Policy, plans: Sequence[Held]) -> None:
        self.policy, self.plans = policy, plans
        self.beliefs = defaultdict[int, Beliefs](dict)
        """What is known of each request, by number."""
        self.uses = defaultdict[int, dict[str, Use]](dict)
        """What each plan did for each request."""
        self.answers = dict[int, Progress]()
        """Answers after the newest run, by number of the request."""
        self.texts = dict[int, np.ndarray]()
        """Prompts with their answers."""
        self.shadows = dict[tuple[int, int], Shadow]()
        """Blocks that plans would have drafted, by request and plan."""
        self.readers = {
            plan.drafting[0]
            for plan in policy.plans
            if len(plan.drafting) == 1 and plan.foreseen(np.zeros(0, np.int32), 0) is None
        }
        """Sources that read what other plans wrote; what lookup drafts follows from the text."""
        self.unread = defaultdict[int, Counter[int]](Counter)
        """Tokens of each answer that a source has not read, by source."""
        self.last_of = {plan.drafting: i for i, plan in enumerate(policy.plans)}
        """Plan with the longest blocks, by the sources that draft: the last one in order."""
        self.choice, self.until = Choice(0, 0, False), 0
        """The newest choice, and the tokens of the longest answer at which it ends."""
        self.rows: Sequence[int] = ()
        """Requests for which it was made."""

    def next(
        self, rows: Sequence[int], longest: int, sizes: str, program: Hashable
    ) -> tuple[Held, int]:
        """Return the plan of the next run, and the most tokens that it may add.

        A choice holds until requests come or go.

        Args:
          rows: Numbers of the requests that decode.
          longest: Tokens of the longest answer.
          sizes, program: See `Choice`.
        """
        if longest >= self.until or (rows, program) != (self.rows, self.choice.program):
            beliefs = [self.beliefs[i] for i in rows]
            unread = {
                source: max((self.unread[i][source] for i in rows), default=0)
                for source in self.readers
            }
            self.choice = self.policy.choose(beliefs, sizes, program, unread)
            self.rows, self.until = rows, longest + self.choice.tokens
        return self.plans[self.choice.plan], self.until - longest

    def learn(self, ms: float, compiled_ms: float, answers: Mapping[int, Progress]) -> None:
        """Learn from a run.

        Args:
          ms, compiled_ms: Milliseconds of the run, and of its compilation before it.
          answers: Answers after it, by number.
        """
        gains, name = [], self.policy.plans[self.choice.plan].name
        for i, (stats, prompt, answer, ended) in answers.items():
            count = len(answer) - 1  # the prefill wrote the first token
            if before := self.answers.get(i):
                stats = jax.tree.map(lambda new, old: new - old, stats, before.stats)
                count = len(answer) - len(before.answer)
            new = answer if before is None else answer[len(before.answer) :]
            self.texts[i] = np.append(self.texts.get(i, prompt), np.asarray(new, np.int32))
            foreseen, unread = self._foreseen(i, count), self._read(i, count)
            gains.append(Gain(self.beliefs[i], stats, ended, foreseen, unread))
            use = self.uses[i].get(name, Use())
            use = Use(use.blocks + stats.steps, use.tokens + stats.emitted, use.ms + ms)
            self.uses[i] = self.uses[i] | {name: use}
        self.answers |= answers
        self.policy.observe(self.choice, ms, compiled_ms, gains)

    def _foreseen(self, i: int, count: int) -> Mapping[tuple[int, ...], Counts]:
        """Return the blocks that other plans would have drafted, by their sources."""
        foreseen, chosen = {}, self.policy.plans[self.choice.plan].drafting
        for sources, number in self.last_of.items():
            plan = self.policy.plans[number]
            if sources == chosen:
                self.shadows.pop((i, number), None)
            elif (hits := plan.foreseen(self.texts[i], count)) is not None:
                shadow = self.shadows.setdefault((i, number), Shadow(plan.gamma))
                foreseen[sources] = shadow.add(hits, self.policy.places)
        return foreseen

    def _read(self, i: int, count: int) -> Mapping[int, int]:
        """Note what the run's sources have read; return how much each had not read before it."""
        plan, unread = self.policy.plans[self.choice.plan], self.unread[i]
        before = {source: unread[source] for source in plan.drafting}
        for source in self.readers:
            unread[source] = 0 if source in plan.drafting else unread[source] + count
        return before

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget requests that have ended."""
        for i in numbers:
            for known in (self.beliefs, self.uses, self.answers, self.texts, self.unread):
                known.pop(i, None)
            for number in self.last_of.values():
                self.shadows.pop((i, number), None)
