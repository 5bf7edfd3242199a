"""One program a bucket: nothing recompiles, nothing leaves the device inside, the state is updated in place."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspec.decoding.speculative import Autoregressive, Speculator
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


@pytest.mark.parametrize("program", [Autoregressive(TARGET), CHAIN, TREE, DYNAMIC])
def test_a_greedy_program_leaves_no_choice_to_the_device(program: Autoregressive | Speculator):
    batch, options = prompts([5, 3], [1, 0], ("M", "T")), sampling(2, new=NEW)
    assert options.greedy
    state = run_prefill(program, BOTH, batch, options, NEW)
    for greedy in (True, False):
        made = run_decode.lower(program, BOTH, state, options.replace(greedy=greedy)).compile().as_text()
        # Of sampled rows it is whether any is filtered.
        assert made is not None
        assert (" conditional(" in made) == (not greedy)


def test_the_loop_touches_nothing_on_the_host():
    batch, options = prompts([5, 3], [1, 0], ("M", "T")), sampling(2, temperature=0.7, new=NEW)
    state = run_prefill(TREE, BOTH, batch, options, NEW)
    run_decode(TREE, BOTH, jax.tree.map(jnp.copy, state), options)  # compiles
    with jax.transfer_guard("disallow"):
        done = run_decode(TREE, BOTH, state, options)
        with pytest.raises(RuntimeError, match="Disallowed host-to-device transfer"):
            jnp.add(done.count, np.ones(2, np.int32))  # the guard is awake
    assert np.asarray(done.done).all()


def test_the_state_is_updated_in_place():
    batch, options = prompts([5, 3], [1, 0], ("M", "T")), sampling(2, new=NEW)
    for program, params in ((CHAIN, BOTH), (TREE, BOTH), (Autoregressive(TARGET), {"target": PARAMS})):
        state = run_prefill(program, params, batch, options, NEW)
        caches = (state.target.k, state.target.v, state.drafter and (state.drafter.cache.k, state.drafter.cache.v))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
        memory = run_decode.lower(program, params, state, options).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= size


@pytest.mark.parametrize("program", [CHAIN, TREE, DYNAMIC], ids=["chain", "tree", "dynamic"])
def test_a_block_copies_no_cache(program: Speculator):
    """A single row is decoded: its cache has a shape that nothing else has."""
    batch, options = prompts([5], [1], ("M", "T")), sampling(1, new=NEW)
    state = run_prefill(program, BOTH, batch, options, NEW)
    compiled = run_decode.lower(program, BOTH, state, options).compile().as_text()
    assert compiled is not None
    for leaf in (state.target.k[0], state.drafter.cache.k[0]):
        shape = ",".join(map(str, leaf.shape))
        assert f"f32[{shape}]" in compiled
        assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled)
