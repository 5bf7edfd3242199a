"""Inside the decode loop a rule is shown the target's and the views' own softmax, where and only
where verified.

The loop is run block by block; the same distributions are computed without a cache by full forward
passes, and the reference learns from them.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decoding.speculative import Speculator
from jaxspec.decoding.state import DecodeState
from jaxspec.models.inputs import PromptRows
from jaxspec.sampling import Sampling
from jaxspec.typing import Params
from tests import tiny
from tests.decoding import weighting_reference as reference
from tests.tiny.oracles import numpy_softmax

LENGTHS, IMAGES, B, NEW, GAMMA = [5, 3, 7], [1, 1, 2], 3, 12, 3
TEMPERATURE = [0.0, 1.0, 0.7]
# past what can be drawn: in a full pass, a drawn placeholder would show an image
IMAGE = tiny.VOCABULARY
TARGET, TARGET_PARAMS = tiny.lvlm(32, 2, seed=0, image=IMAGE)
DRAFT_PARAMS = tiny.noisy(TARGET_PARAMS, 0.1)
BATCH = tiny.weighted(tiny.prompts(LENGTHS, IMAGES, ("M", "T"), image=IMAGE), 0.3, 0.7)
PIXELS = BATCH.images["pixels"]
OPTIONS = tiny.sampling(
    B, TEMPERATURE, new=[NEW, NEW, 5], eos=(-1, -1), top_k=[0, 4, 0], top_p=[1.0, 1.0, 0.8]
)


@partial(jax.jit, static_argnums=0, compiler_options=tiny.QUICK)
def step(spec: Speculator, params: Params, state: DecodeState, options: Sampling) -> DecodeState:
    return spec.step(params, state, options)


@partial(jax.jit, compiler_options=tiny.QUICK)
def forward(params: Params, tokens: jax.Array, pixels: jax.Array) -> jax.Array:
    return tiny.full_pass(TARGET, params, tokens, pixels)


def following(prompt: PromptRows, b: int, answer: np.ndarray, params: Params) -> np.ndarray:
    """Return the softmax [NEW, V] of what follows the prompt of row b and each beginning of the
    answer.
    """
    length = int(prompt.length[b])
    row = np.zeros(prompt.tokens.shape[-1] + NEW, np.int32)
    row[:length], row[length : length + NEW] = prompt.tokens[b, :length], answer
    logits = np.asarray(forward(params, jnp.asarray(row[None]), PIXELS[b : b + 1]))[0]
    return np.stack(
        [numpy_softmax(place, TEMPERATURE[b] or 1.0) for place in logits[length - 1 :][:NEW]]
    )


def test_the_loop_shows_what_was_verified() -> None:
    spec = tiny.speculator(TARGET, TARGET, ("M", "T"), GAMMA, "inverse_error_power:window=4")
    params = {"target": TARGET_PARAMS, "draft": DRAFT_PARAMS}
    state, _ = jax.jit(spec.prefill, static_argnums=3, compiler_options=tiny.QUICK)(
        params, BATCH, OPTIONS, NEW
    )
    counts, weights = [np.asarray(state.count)], []
    accepted = [np.zeros(B, int)]
    while not np.asarray(state.done).all():
        state = step(spec, params, state, OPTIONS)
        counts.append(np.asarray(state.count))
        accepted.append(np.asarray(state.stats.accepted_at).sum(1))
        weights.append(np.asarray(state.weighting.weights))

    answers = np.asarray(state.tokens)
    for b in range(B):
        p = following(BATCH.target, b, answers[b], TARGET_PARAMS)
        q = np.stack(
            [following(view, b, answers[b], DRAFT_PARAMS) for view in tiny.view_rows(BATCH)], axis=1
        )
        row = reference.Reference(reference.inverse_error_power(), np.asarray([0.3, 0.7]), 4)
        for before, after, n, ours in zip(
            counts, counts[1:], np.diff(accepted, axis=0)[:, b], weights
        ):
            fresh = int(after[b] - before[b])
            if int(after[b]) == OPTIONS.max_new_tokens[b]:
                break  # the last block may have been cut, and its weights are used no more
            assert fresh == n + 1
            here = slice(int(before[b]), int(before[b]) + min(fresh, GAMMA))
            row.observe(p[here], q[here])
            np.testing.assert_allclose(ours[b], row.weights, rtol=1e-3, atol=1e-4)
        assert len(row.p) >= 3
