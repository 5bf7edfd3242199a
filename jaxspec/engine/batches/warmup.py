"""List what a batch compiles, and measures, before its first answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from jaxspec.decoding.state import Pause
from jaxspec.decoding.steps import run_decode
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.batches.fitting import Kind, has_room, holds
from jaxspec.engine.compile_cache import Held, executable
from jaxspec.engine.memory import Sizes


class Step(NamedTuple):
    """Do one step of a warm-up: compile a program, or measure a block."""

    run: Callable[[], object]
    rank: int = 0
    """0: no answer begins without it; 1: until then short answers take longer; 2: what first needs
    it waits; 3: and few need it."""
    length: int = 0
    """Tokens of the prompts that it prefills; 0 for a loop."""


def warmup_steps(batch: Batch) -> Sequence[Step]:
    """Return the steps, in order, of each program that the batch's examples need.

    A live batch may begin to answer after those of rank 0.
    """
    live, widths, forms = batch.live, batch.widths, batch.every_form
    reader, plans = batch.reader, batch.batcher.plans
    loops, ends, steps = plans or [batch.together.held], (widths[0], widths[-1]), list[Step]()
    if not batch.started:
        steps.append(Step(partial(prefill, batch, batch.capacity, forms[0])))
    moves = [((width, a), (width, b)) for width in widths for a, b in pairwise(forms)]
    moves += [((width, form), (wider, form)) for width, wider in pairwise(widths) for form in forms]
    for small, large in moves:
        for move in [(small, large), (large, small)] if live else [(small, large)]:
            steps.append(Step(partial(compile_move, batch, *move), 2 if live else 0))
    for form in forms:
        soon = 0 if not live or form == forms[-1] else 1
        for sizes in batch.sizes if reader is None else reader.whole_sizes:
            if batch.waits and has_room(form, sizes):
                rank = 2 if live and sizes.length < batch.capacity.length else 0
                steps.append(Step(partial(prefill, batch, sizes, form), rank, sizes.length))
        for width in widths:
            for kind, held in product(batch.kinds, loops):
                # Without these a first answer of any kind would wait: plain, or with all drafts.
                first = any(held is loop for loop in (loops[0], loops[-1])) and width in ends
                loop = partial(compile_loop, batch, width, form, kind, held)
                later = 3 if kind.changed else 2
                steps.append(Step(loop, soon if first or not live else later))
            # By turns, so that a burst of other work on the machine slows no plan alone.
            for i in [*range(len(plans))] * 2:
                steps.append(Step(partial(measure, batch, width, form, i), 2 if live else 0))
        if form in batch.smaller:
            steps.append(Step(partial(batch.use, form), soon))
    if reader is not None:
        for sizes, form in product(reader.piece_sizes, forms):
            if has_room(form, reader.form(sizes)):
                read = partial(prefill, batch, sizes, form, whole=False)
                steps.append(Step(read, 0 if batch.batcher.fixed else 2))
    return steps


def prefill(batch: Batch, sizes: Sizes, form: Sizes, whole: bool = True) -> None:
    """Prefill an example of some sizes into no row, in a live batch whole or in pieces.

    form: Sizes of the batch's rows.
    """
    if batch.started:
        batch.hold(batch.width, form)
    example = next(each for each in batch.examples if holds(sizes, each.sizes))
    if batch.reader is None:
        batch.prefill([example], [])
    else:
        batch.insert(batch.reader.prepare(example, sizes, whole), [example], [])


def compile_loop(batch: Batch, width: int, form: Sizes, kind: Kind, held: Held) -> None:
    """Compile a loop over `width` rows of these sizes, and the program that inserts a row."""
    batch.hold(width, form)
    if len(batch.widths) > 1:
        batch.put(batch.states.empty(1, form), [])
    pause: Any = np.zeros(2, np.int32)
    executable(run_decode, held, *batch.read_by(kind), Pause(*pause))


def compile_move(batch: Batch, old: tuple[int, Sizes], new: tuple[int, Sizes]) -> None:
    """Compile the program that moves rows between states of other numbers of rows and sizes."""
    batch.hold(*old)
    batch.move(*new)


def measure(batch: Batch, width: int, form: Sizes, plan: int) -> None:
    """Run two blocks of a plan; tell the policy their milliseconds, except those of a first run."""
    assert batch.pace is not None
    policy, kind = batch.pace.policy, batch.kinds[0]
    batch.hold(width, form)
    keys = {(plan, batch.loop_key(kind)) for kind in batch.kinds}
    for _ in range(2):
        batch.end(np.zeros(width, bool))
        count = int(np.max(batch.state.count)) + 1
        ms = batch.run(kind, batch.batcher.plans[plan], width, count)
        if keys <= policy.compiled:
            policy.measured(plan, batch.sizes_name(kind), ms)
        policy.compiled |= keys
    if batch.live:
        batch.end(np.ones(width, bool))
