"""The trace of an answer agrees with the block's own counts, and with views asked again from
outside the loop.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.records import accepting_shares, trace_record
from jaxspec.sampling import mix
from tests.tiny import (
    full_pass,
    lvlm,
    noisy,
    prompts,
    rarer,
    sampling,
    speculator,
    view_rows,
    weighted,
)

NEW = 24
VOCABULARY = IMAGE = 30  # in a full pass, a drawn placeholder would show an image
TARGET, PARAMS = lvlm(16, 2, seed=3, scale=0.4, vocabulary=VOCABULARY, image=IMAGE)
DRAFT = noisy(PARAMS, 0.2)


@pytest.mark.parametrize("tree", [None, *rarer("2")])
def test_every_token_is_accounted_for(tree):
    program = replace(speculator(TARGET, TARGET, ("M", "T"), 3, "mt-paper", tree), traces=True)
    batch = weighted(prompts([4, 6, 5], [1, 1, 1], ("M", "T"), image=IMAGE), 0.75, 0.25)
    params, options = {"target": PARAMS, "draft": DRAFT}, sampling(3, new=NEW, eos=(-1,))
    state = jax.jit(
        lambda: program.decode(params, program.prefill(params, batch, options, NEW)[0], options)
    )()
    forward = jax.jit(lambda tokens, pixels: full_pass(TARGET, DRAFT, tokens, pixels))
    agreed, narrow = 0, 0
    for b in range(3):
        count = int(state.count[b])
        record = trace_record(jax.device_get(state.trace), b, slice(count))
        assert record["place"][0] == -1
        assert record["weights"][0] == [0.75, 0.25]
        # A block is drafted places 0, 1, ... and then the target's token.
        assert all(p in (-1, q + 1) for q, p in zip(record["place"], record["place"][1:]))
        accepted = np.asarray(state.stats.accepted_at)[b]
        assert [record["place"].count(j) for j in range(3)] == accepted.tolist()
        assert record["place"][:-1].count(-1) == int(state.stats.steps[b])
        # Whole, a block's last token is the target's alone.
        for i, place in enumerate(record["place"]):
            whole = i > 0 and place == -1 and record["place"][i - 1] == 2
            if tree is None:
                assert (record["agree"][i] is None) == (i == 0 or whole)
        # The views again, by one pass each over the whole answer.
        probs = []
        for view in view_rows(batch):
            length = int(view.length[b])
            row = jnp.concatenate([view.tokens[b, :length], state.tokens[b, :count]])[None]
            logits = forward(row, batch.images["pixels"][b : b + 1])[0]
            probs.append(np.asarray(jax.nn.softmax(logits))[length - 1 :])
        for i, (agree, shares) in enumerate(zip(record["agree"], record["shares"])):
            if agree is None:
                assert shares is None
                continue
            token = int(state.tokens[b, i])
            assert agree[0] == (int(probs[0][i].argmax()) == token)
            agreed += agree[0]
            for share in np.linspace(0, 1, 41):
                accepted = (share * probs[0][i] + (1 - share) * probs[1][i]).argmax() == token
                low, high = shares or (1.0, 0.0)
                if min(abs(share - low), abs(share - high)) > 1e-3:
                    assert accepted == (low < share < high)
            narrow += shares is not None and shares != [0.0, 1.0]
    assert agreed > 5
    assert narrow > 0


@pytest.mark.parametrize("weights", [(1.0,), (0.2, 0.5, 0.3), (1.0, 0.0, 0.0)])
def test_accepting_shares_are_those_of_a_grid(weights):
    rng = np.random.default_rng(0)
    probs = jnp.asarray(rng.dirichlet(np.full(6, 0.7), (len(weights), 2, 20)), jnp.float32)
    each = jnp.tile(jnp.asarray(weights), (2, 1))
    tokens = jnp.asarray(rng.integers(6, size=(2, 20)))
    low, high = np.moveaxis(np.asarray(accepting_shares(probs, each, tokens)), -1, 0)
    others = np.asarray(weights[1:]) if sum(weights[1:]) else np.ones(len(weights) - 1)
    hits = 0
    for share in np.linspace(0.012, 0.99, 40):
        mixed = [share, *(1 - share) * others / (others.sum() or 1)]
        best = mix(probs.reshape(len(weights), 40, 6), jnp.tile(jnp.asarray(mixed), (40, 1)))
        accepted = np.asarray(best.argmax(-1).reshape(2, 20) == tokens)
        clear = (abs(share - low) > 1e-4) & (abs(share - high) > 1e-4)
        assert (accepted == ((low < share) & (share < high)))[clear].all()
        hits += accepted.sum()
    assert hits > 40
