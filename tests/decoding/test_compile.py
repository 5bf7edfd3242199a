"""One program a bucket: nothing recompiles, nothing leaves the device inside, the state is updated in place."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec.decoding.speculative import Autoregressive, Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.decoding.steps import run_decode, run_prefill

from tests.tiny import lvlm, noisy, prompts, sampling, speculator, weighted

TARGET, PARAMS = lvlm(16, 2, seed=0)
CHAIN, TREE, DYNAMIC = (speculator(TARGET, TARGET, ("M", "T"), 3, tree=tree) for tree in (None, "2:5", "dynamic:2:4"))
BOTH = {"target": PARAMS, "drafter": noisy(PARAMS, 0.1)}
NEW = 8


@pytest.mark.parametrize("program", [CHAIN, TREE, DYNAMIC], ids=["chain", "tree", "dynamic"])
def test_requests_of_a_bucket_share_one_program_where_one_samples(program: Speculator):
    prefill, decode = run_prefill._cache_size(), run_decode._cache_size()
    for i, options in enumerate(
        [
            {"temperature": [0.0, 1.0]},
            {"temperature": 1.0, "top_p": 0.9, "top_k": 5},
            {"temperature": [0.0, 0.5], "new": [2, NEW], "eos": (7, 9)},
        ]
    ):
        batch = weighted(prompts([5, 5 - i], [1, 1], ("M", "T"), seed=i), 0.2 * i, 1 - 0.2 * i)
        chosen = sampling(2, seed=i, **({"new": NEW} | options))
        run_decode(program, BOTH, run_prefill(program, BOTH, batch, chosen, NEW), chosen)
    assert run_prefill._cache_size() == prefill + 1
    assert run_decode._cache_size() == decode + 1


@cache
def compiled(program: Autoregressive | Speculator, greedy: bool = True) -> tuple[DecodeState, Any]:
    """The state that a prompt leaves, and the loop for it. Caches of one row have a shape that nothing else has."""
    batch, options = prompts([5], [1], ("M", "T")), sampling(1, new=NEW)
    state = run_prefill(program, BOTH, batch, options, NEW)
    return state, run_decode.lower(program, BOTH, state, options.replace(greedy=greedy)).compile()


every_program = pytest.mark.parametrize(
    "program", [Autoregressive(TARGET), CHAIN, TREE, DYNAMIC], ids=["plain", "chain", "tree", "dynamic"]
)


@every_program
def test_a_greedy_program_leaves_no_choice_to_the_device(program: Autoregressive | Speculator):
    """A greedy program has no branch, and a sampled one has one: whether any row is filtered."""
    for greedy in (True, False):
        assert (" conditional(" in compiled(program, greedy)[1].as_text()) == (not greedy)


@every_program
def test_the_state_is_updated_in_place_and_no_cache_is_copied(program: Autoregressive | Speculator):
    state, made = compiled(program)
    caches = [state.target, *([state.drafter.cache] if state.drafter else [])]
    size = sum(leaf.nbytes for one in caches for leaf in (*one.k, *one.v))
    assert made.memory_analysis().alias_size_in_bytes >= size
    for one in caches:
        shape = ",".join(map(str, one.k[0].shape))
        assert f"f32[{shape}]" in made.as_text()
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", made.as_text())


def test_the_loop_touches_nothing_on_the_host():
    batch, options = prompts([5, 3], [1, 0], ("M", "T")), sampling(2, temperature=0.7, new=NEW)
    state = run_prefill(TREE, BOTH, batch, options, NEW)
    run_decode(TREE, BOTH, jax.tree.map(jnp.copy, state), options)  # compiles
    with jax.transfer_guard("disallow"):
        done = run_decode(TREE, BOTH, state, options)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
            jnp.add(done.count, np.ones(2, np.int32))  # the guard is awake
    assert np.asarray(done.done).all()
