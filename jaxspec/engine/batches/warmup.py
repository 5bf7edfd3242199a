"""List what a batch compiles, and measures, before its first answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.memory import Sizes


class Step(NamedTuple):
    """Do one step of a warm-up: compile a program, or measure a block."""

    run: Callable[[], object]
    length: int = 0
    """Tokens of the prompts that it prefills; 0 for a loop."""
    optional: bool = False
    """Whether answers may begin without it: what needs it first then waits for its compilation."""


def warmup_steps(batch: Batch) -> Sequence[Step]:
    """Return the steps, in order, of each program that the batch's examples need.

    A live batch may begin to answer without those that are optional.
    """
    live, widths = batch.live, batch.widths
    plans, ends = batch.batcher.plans, (widths[0], widths[-1])
    loops = plans or [batch.together.held]

    def prefill(sizes: Sizes) -> Step:
        optional = live and sizes.length < batch.capacity.length
        return Step(partial(batch.prepare, sizes), sizes.length, optional)

    whole = batch.sizes if batch.reader is None else batch.reader.whole_sizes
    of_room = [prefill(sizes) for sizes in whole if batch.waits]
    for width in widths:
        for kind, held in product(batch.kinds, loops):
            # Without these a first answer of any kind would wait: plain, or with all drafts.
            first = any(held is loop for loop in (loops[0], loops[-1])) and width in ends
            loop = partial(batch.prepare_loop, width, kind, held)
            of_room.append(Step(loop, optional=live and not first))
        for i in range(len(plans)):
            of_room.append(Step(partial(batch.measure, width, i), optional=live))
    if batch.reader is not None:
        for sizes in batch.reader.piece_sizes:
            read = partial(batch.prepare, sizes, whole=False)
            of_room.append(Step(read, optional=not batch.batcher.fixed))
    if len(widths) > 1:
        of_room.append(Step(partial(batch.resize, 0), optional=True))
    steps = [] if batch.started else [prefill(batch.capacity)]
    steps += of_room
    for _ in batch.larger:
        steps += [Step(batch.enlarge), *of_room]
    return steps
