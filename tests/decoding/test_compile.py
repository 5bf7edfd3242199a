"""Compiled loops leave nothing to the host inside, and update their state in place."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_decode, run_prefill
from tests.tiny import lvlm, noisy, prompts, sampling, speculator

TARGET, PARAMS = lvlm(16, 2, seed=0)
PLAIN = Autoregressive(TARGET)
CHAIN, DYNAMIC = (
    speculator(TARGET, TARGET, ("M", "T"), 3, tree=tree) for tree in (None, "dynamic:2:4")
)
BOTH = {"target": PARAMS, "draft": noisy(PARAMS, 0.1)}
NEW = 8


def compiled(program: Autoregressive | Speculator, greedy: bool = True) -> tuple[DecodeState, Any]:
    """Return the state that a prompt leaves, and the loop for it. Caches of one row have a shape
    that nothing else has.
    """
    batch, options = prompts([5], [1], ("M", "T")), sampling(1, new=NEW)
    state, _ = run_prefill(program, BOTH, batch, options, NEW)
    return state, run_decode.lower(program, BOTH, state, options.replace(greedy=greedy)).compile()


@pytest.mark.parametrize("program", [PLAIN, CHAIN, DYNAMIC], ids=["plain", "chain", "dynamic"])
def test_a_greedy_program_has_no_branch_and_updates_its_state_in_place(
    program: Autoregressive | Speculator,
):
    """A greedy loop has no branch and updates its state in place: it copies no cache, and
    transposes no heads to multiply them.
    """
    state, made = compiled(program)
    assert " conditional(" not in made.as_text()
    caches = [state.target, *([state.drafter[0].cache] if state.drafter else [])]
    size = sum(leaf.nbytes for one in caches for leaf in (*one.k, *one.v))
    assert made.memory_analysis().alias_size_in_bytes >= size
    copied = re.findall(r"= f32\[([\d,]+)\]\S* (?:copy|transpose)\(", made.as_text())
    for one in caches:
        rows, heads, slots, width = one.k[0].shape
        assert f"f32[{rows},{heads},{slots},{width}]" in made.as_text()
        orders = (
            (rows, heads, slots, width),
            (rows, slots, heads, width),
            (rows, heads, width, slots),
        )
        assert not {",".join(map(str, order)) for order in orders} & set(copied)


@pytest.mark.full
def test_a_sampled_program_has_a_branch_where_rows_are_filtered():
    assert " conditional(" in compiled(CHAIN, greedy=False)[1].as_text()


def test_the_loop_touches_nothing_on_the_host():
    batch, options = prompts([5, 3], [1, 0], ("M", "T")), sampling(2, temperature=0.7, new=NEW)
    state, _ = run_prefill(CHAIN, BOTH, batch, options, NEW)
    run_decode(CHAIN, BOTH, jax.tree.map(jnp.copy, state), options)  # compiles
    with jax.transfer_guard("disallow"):
        done = run_decode(CHAIN, BOTH, state, options)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
            jnp.add(done.count, np.ones(2, np.int32))  # the guard is awake
    assert np.asarray(done.done).all()
