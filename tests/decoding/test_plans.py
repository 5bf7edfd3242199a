"""A batch may change its plan at a pause: answers stay the target's, and idle sources catch up."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.decoding.plans import Plan, plans_of
from jaxspec.decoding.sources.source import Committed
from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import DecodeState, Pause
from jaxspec.decoding.steps import run_decode, run_prefill
from jaxspec.sampling import Sampling
from jaxspec.typing import Params
from tests import tiny
from tests.decoding.test_greedy import (
    DRAFT_PARAMS,
    NEW,
    NOBODY,
    TARGET,
    TARGET_PARAMS,
    B,
    batch_of,
    head_of,
    in_engine,
    plain,
)

MIXTURES = [
    ("M", "T", "lookup"),
    ("M", "eagle", "lookup"),
    *tiny.rarer(
        (("KV head", "lookup"),),
        (("eagle1", "lookup"),),
        (("DFlash", "lookup"),),
        (("MTP", "lookup"),),
        (("one pass",),),
    ),
]


@cache
def program(views: tuple[str, ...], **options: Any) -> tuple[Speculator, Params, tuple[Plan, ...]]:
    head, head_params = head_of(views)
    spec = tiny.speculator(TARGET, TARGET, in_engine(views), 5, head=head, **options)
    params = tiny.params_of(spec, TARGET_PARAMS, DRAFT_PARAMS, head_params)
    return spec, params, plans_of(spec, options.get("width"))


def begun(views: tuple[str, ...], options: Sampling, **more: Any) -> DecodeState:
    spec, params, _ = program(views, **more)
    return run_prefill(spec, params, batch_of(*views), options, NEW)[0]


def run(
    plan: Plan, params: Params, state: DecodeState, options: Sampling, count: int
) -> DecodeState:
    pause: Any = np.asarray([B, count], np.int32)
    return run_decode(plan, params, state, options, Pause(*pause))


@pytest.mark.parametrize("views", MIXTURES, ids=",".join)
def test_a_plan_that_changes_at_random_writes_the_targets_tokens(views: tuple[str, ...]) -> None:
    """Plans that change at random, at pauses of one to five tokens, write the target's tokens in
    rows that end at different places.
    """
    _, params, plans = program(views)
    options = tiny.sampling(B, new=[NEW, NEW - 4, 9, NEW], eos=NOBODY)
    rng, used = np.random.default_rng(0), set[str]()
    state = begun(views, options)
    while not state.done.all():
        plan = plans[rng.integers(len(plans))]
        used.add(plan.name)
        longest = int(state.count[~state.done].max())
        state = run(plan, params, state, options, longest + int(rng.integers(1, 6)))
    assert tiny.outputs(state) == plain(options)
    assert len(used) == len(plans) or len(used) > 3


@pytest.mark.parametrize("views", MIXTURES, ids=",".join)
def test_idle_sources_catch_up(views: tuple[str, ...]) -> None:
    """Behind plain decoding a plan drafts what it would have drafted all along."""
    _, params, (alone, *plans) = program(views)
    options = tiny.sampling(B, new=[NEW, 0, 0, 0], eos=NOBODY)
    for plan in plans:
        always = run(plan, params, begun(views, options), options, 12)
        idle = run(alone, params, begun(views, options), options, int(always.count[0]))
        assert int(idle.count[0]) == int(always.count[0]) >= 12
        for first, second in zip(
            *(drafted(plan, params, state, options) for state in (always, idle))
        ):
            np.testing.assert_allclose(first, second, atol=1e-5)


@partial(jax.jit, static_argnums=0)
def drafted(plan: Plan, params: Params, state: DecodeState, options: Sampling) -> Any:
    """Return the tokens of the next block of row 0, and each source's distributions."""
    assert isinstance(plan.part, Speculator)
    drafter = plan.part.drafter
    committed = Committed(params, state.tokens, state.count, state.target, drafter.reads)
    states = plan.caught_up(committed, state.drafter)
    draft, _ = drafter.draft(committed, states, plan.weights(state, options), options)
    return draft.tokens[0], draft.view_probs[:, 0]
