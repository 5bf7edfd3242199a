"""Simulated tokens per block equal those of blocks walked one by one, and of the engine on the mini
models.
"""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.training.losses import count_blocks

COUNT = jax.jit(count_blocks, static_argnames="gamma")


def walk(agree: list[bool], gamma: int) -> tuple[int, int]:
    """Walk the blocks of one answer, drafted and verified as the engine does; `agree` is of all
    tokens except prefill's.
    """
    at = blocks = 0
    while at < len(agree):
        run = 0
        while run < gamma and at + run < len(agree) and agree[at + run]:
            run += 1
        at, blocks = at + run + 1, blocks + 1
    return len(agree), blocks


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.lists(st.booleans(), max_size=7), max_size=2), min_size=3, max_size=3),
    st.sampled_from([1, 3, 5]),
)
def test_blocks_are_those_of_the_walk(conversations: list[list[list[bool]]], gamma: int) -> None:
    agree, mask = np.ones((3, 24), bool), np.zeros((3, 24), bool)
    tokens = blocks = 0
    for row, answers in enumerate(conversations):
        at = 2
        for answer in answers:
            mask[row, at : at + len(answer) + 1] = True  # prefill's token first
            agree[row, at] = row % 2
            agree[row, at + 1 : at + 1 + len(answer)] = answer
            at += len(answer) + 3
            tokens, blocks = (a + b for a, b in zip((tokens, blocks), walk(answer, gamma)))
    assert tuple(map(int, COUNT(agree, mask, gamma=gamma))) == (tokens, blocks)
