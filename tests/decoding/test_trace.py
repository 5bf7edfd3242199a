"""The trace of an answer: against what the block's own counts say, and views asked again from
outside the loop.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.trace import trace_record
from jaxspec.models.families import build
from tests.tiny import lvlm, noisy, prompts, sampling, speculator, view_rows, weighted

NEW = 24
VOCABULARY = IMAGE = 30  # in a full pass, a drawn placeholder would show an image
TARGET, PARAMS = lvlm(16, 2, seed=3, scale=0.4, vocabulary=VOCABULARY, image=IMAGE)
DRAFT = noisy(PARAMS, 0.2)


@pytest.mark.parametrize("tree", [None, "2"])
def test_every_token_is_accounted_for(tree):
    program = replace(speculator(TARGET, TARGET, ("M", "T"), 3, "mt-paper", tree), traces=True)
    batch = weighted(prompts([4, 6, 5], [1, 1, 1], ("M", "T"), image=IMAGE), 0.75, 0.25)
    params, options = {"target": PARAMS, "draft": DRAFT}, sampling(3, new=NEW, eos=(-1,))
    state = jax.jit(
        lambda: program.decode(params, program.prefill(params, batch, options, NEW), options)
    )()
    forward = jax.jit(
        lambda tokens, pixels: build(TARGET.config).apply({"params": DRAFT}, tokens, pixels)
    )
    agreed = 0
    for b in range(3):
        count = int(state.count[b])
        record = trace_record(jax.device_get(state.trace), b, count, [""] * count)
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
        # View M again, by one pass over the whole answer.
        (view, _) = view_rows(batch)
        length = int(view.length[b])
        row = jnp.concatenate([view.tokens[b, :length], state.tokens[b, :count]])[None]
        logits = np.asarray(forward(row, batch.images["pixels"][b : b + 1]))[0]
        for i, agree in enumerate(record["agree"]):
            if agree is not None:
                assert agree[0] == (int(logits[length + i - 1].argmax()) == int(state.tokens[b, i]))
                agreed += agree[0]
    assert agreed > 5
