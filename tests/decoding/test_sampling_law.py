"""Sampled sequences follow the target's joint law, and the test would notice a wrong residual.

The law of the first three new tokens is computed without cache, loop or filters of the library:
full forward passes over all prefixes, and the filters of `tests/tiny/oracles.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding import speculative
from jaxspec.decoding.drafting.trees import ChainDrafter
from jaxspec.decoding.plans import plans_of
from jaxspec.decoding.state import Pause
from jaxspec.decoding.steps import run_decode, run_prefill
from jaxspec.models.int8 import int8_params
from jaxspec.sampling import draw
from jaxspec.typing import Array, Params
from jaxspec.verification import Draft, Verdict, rejection
from tests.tiny import (
    full_pass,
    kv_head,
    lvlm,
    narrow,
    noisy,
    params_of,
    prompts,
    run_plain,
    run_speculative,
    sampling,
    speculator,
    weighted,
)
from tests.tiny.oracles import goodness_of_fit, numpy_distribution

VOCABULARY, LENGTH, ROWS = 6, 3, 2000
ROUNDS = 2, 10
"""Numbers of batches whose sequences are judged."""
# past what can be drawn: in a full pass, a drawn placeholder would show an image
IMAGE = VOCABULARY
TARGET, PARAMS = lvlm(16, 2, seed=3, scale=0.4, vocabulary=VOCABULARY, image=IMAGE)
INT8 = int8_params(PARAMS)
DRAFT = noisy(PARAMS, 0.7)
VIEWS = ("M", "T", "P")
HEADS = {
    "KV head": kv_head(TARGET, PARAMS),
    "eagle": kv_head(TARGET, PARAMS, feature="fused", target_layers=(0, 1, 2)),
    "MSD": kv_head(TARGET, PARAMS, feature="eagle1", images="unfused"),
    "one pass": kv_head(TARGET, PARAMS, parallel=True, markov=4, key_layers=(0, 1)),
    "DSpark": kv_head(
        TARGET, PARAMS, feature="block", target_layers=(1,), layers=1, markov=4, anchored=True
    ),
    "MTP": kv_head(TARGET, PARAMS, feature="mtp"),
}


@functools.cache
def logits_after(prefix: tuple[int, ...], int8: bool = False) -> np.ndarray:
    """The target's logits [V] after the prompt and these tokens, by one full pass."""
    prompt = prompts([4], [1], VIEWS, image=IMAGE)
    start = np.asarray(prompt.target.tokens)[0, : int(prompt.target.length[0])]
    row = np.concatenate([start, np.asarray(prefix, np.int64)]).astype(np.int32)
    return np.asarray(
        forward(INT8 if int8 else PARAMS, jnp.asarray(row[None]), prompt.images["pixels"])[0, -1]
    )


@jax.jit
def forward(params: Params, tokens: Array, pixels: Array) -> Array:
    return full_pass(TARGET, params, tokens, pixels)


def joint(temperature: float, top_k: int, top_p: float, int8: bool = False) -> np.ndarray:
    """P(x1, x2, x3 | prompt) [V, V, V]."""
    law = np.ones(())
    for depth in range(LENGTH):
        prefixes = np.ndindex(*[VOCABULARY] * depth)
        steps = [
            numpy_distribution(logits_after(prefix, int8), temperature, top_k, top_p)
            for prefix in prefixes
        ]
        law = law[..., None] * np.reshape(steps, (*[VOCABULARY] * depth, VOCABULARY))
    return law


def p_value(law: np.ndarray, gamma: int, **options: Any) -> float:
    """Return the p-value of sequences that a program draws: of 4,000 where they leave no doubt."""
    value = 0.0
    for counts in drawn(gamma, **options):
        value = goodness_of_fit(counts, law)
        if not 1e-3 < value < 0.05:
            break
    return value


def drawn(
    gamma: int,
    weighting: str = "static",
    weights: tuple[float, ...] = (0.5, 0.25, 0.25),
    tree: str | None = None,
    views: tuple[str, ...] = VIEWS,
    few_words: bool = False,
    int8: bool = False,
    kind: str = "KV head",
    changing: bool = False,
    **options: Any,
) -> Iterator[np.ndarray]:
    """Counts [V, V, V] of the first tokens of ROWS sequences a batch; gamma 0 is the plain loop.

    With `few_words` draft and head score different tokens each. If `changing`, each token may have
    another plan.
    """
    head, head_params = HEADS[kind] if "head" in views else (None, {})
    draft, own = TARGET, DRAFT
    if few_words:
        draft, own = narrow(TARGET, DRAFT, (5, 0, 3, 1))
        head = head and replace(
            head, text_config=replace(head.text_config, draft_vocabulary=(4, 0, 2))
        )
        if kind == "one pass":
            head_params = {**head_params, "markov_out": head_params["markov_out"][:, :3]}
    prompt = weighted(prompts([4], [1], views, image=IMAGE, head=head), *weights)
    batch = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), prompt)
    target = INT8 if int8 else PARAMS
    if gamma:
        program = speculator(TARGET, draft, views, gamma, weighting, tree, head=head)
        params = params_of(program, target, own, head_params)

        plans = plans_of(program, None)

    counts, blocks = np.zeros([VOCABULARY] * LENGTH), np.zeros(gamma + 1)
    for seed in range(ROUNDS[-1]):
        chosen = sampling(ROWS, new=LENGTH, seed=seed, eos=(-1,), **options)
        if changing:
            state = run_prefill(program, params, batch, chosen, LENGTH)
            for count in range(2, LENGTH + 1):
                plan = plans[(seed + count) % len(plans)]
                pause: Any = np.asarray([ROWS, count], np.int32)
                state = run_decode(plan, params, state, chosen, Pause(*pause))
        elif gamma:
            state = run_speculative(program, params, batch, chosen, LENGTH)
        else:
            state = run_plain(TARGET, target, batch, chosen, LENGTH)
        np.add.at(counts, tuple(np.asarray(state.tokens).T), 1)
        blocks += np.asarray(state.stats.histogram).sum(0)
        if seed + 1 in ROUNDS:
            assert blocks[0] > 500, "rejections are what this test is about"
            assert gamma == 0 or blocks[1:].sum() > 500, "and so are acceptances"
            yield counts


CASES = [
    pytest.param(0, {"temperature": 1.0}, id="autoregressive"),
    # room for a whole block: the token after it is the bonus
    pytest.param(1, {"temperature": 1.0}, id="bonus"),
    pytest.param(3, {"temperature": 1.0}, id="plain"),
    pytest.param(2, {"temperature": 0.7, "top_p": 0.8, "int8": True}, id="int8"),
    pytest.param(2, {"temperature": 0.7, "top_p": 0.8, "top_k": 4}, id="filtered"),
    pytest.param(
        1, {"temperature": 1.0, "weighting": "mt-release"}, id="grid", marks=pytest.mark.full
    ),
    pytest.param(
        1,
        {"temperature": 0.7, "top_p": 0.8, "top_k": 4, "weighting": "inverse_error_power"},
        id="learned, filtered",
    ),
    pytest.param(
        1,
        {
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 4,
            "tree": "3",
            "weighting": "inverse_error_power",
            "few_words": True,
        },
        id="tree, few words",
    ),
    pytest.param(2, {"temperature": 1.0, "top_p": 0.9, "tree": "dynamic:2:5"}, id="dynamic tree"),
    pytest.param(3, {"temperature": 1.0, "views": ("head",), "weights": (1.0,)}, id="KV head"),
    pytest.param(
        1,
        {
            "temperature": 0.7,
            "views": ("M", "T", "head"),
            "weighting": "inverse_error_power",
            "few_words": True,
        },
        id="mixed KV head, few words",
        marks=pytest.mark.full,
    ),
    pytest.param(
        2,
        {"temperature": 1.0, "views": ("head",), "weights": (1.0,), "kind": "eagle", "tree": "2:4"},
        id="EAGLE-3, tree",
    ),
    pytest.param(
        2, {"temperature": 1.0, "views": ("head",), "weights": (1.0,), "kind": "MSD"}, id="MSD"
    ),
    pytest.param(
        3,
        {"temperature": 1.0, "views": ("head",), "weights": (1.0,), "kind": "one pass"},
        id="one pass",
    ),
    pytest.param(
        2,
        {
            "temperature": 0.7,
            "views": ("M", "head", "lookup"),
            "weighting": "mt-paper",
            "kind": "one pass",
        }
        | {"few_words": True},
        id="mixed one pass, few words",
        marks=pytest.mark.full,
    ),
    pytest.param(
        2, {"temperature": 1.0, "views": ("head",), "weights": (1.0,), "kind": "MTP"}, id="MTP"
    ),
    pytest.param(
        2,
        {
            "temperature": 0.7,
            "top_p": 0.8,
            "views": ("head",),
            "weights": (1.0,),
            "kind": "DSpark",
            "tree": "2:4",
        },
        id="DSpark, tree",
    ),
    pytest.param(3, {"temperature": 1.0, "views": ("lookup",), "weights": (1.0,)}, id="lookup"),
    pytest.param(
        1,
        {"temperature": 0.7, "top_p": 0.8, "tree": "3", "views": ("lookup",), "weights": (1.0,)},
        id="lookup, tree",
        marks=pytest.mark.full,
    ),
    pytest.param(
        2,
        {"temperature": 1.0, "views": ("M", "head", "lookup"), "weighting": "mt-paper"},
        id="mixed lookup",
    ),
    pytest.param(
        2,
        {"temperature": 1.0, "views": ("head", "lookup"), "weights": (0.5, 0.5)}
        | {"kind": "eagle", "changing": True},
        id="changing plans",
    ),
]


@pytest.mark.parametrize(("gamma", "options"), CASES)
def test_sequences_follow_the_targets_law(gamma: int, options: dict[str, Any]) -> None:
    filters = options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0)
    law = joint(*filters, options.get("int8", False))
    assert p_value(law, gamma, **options) > 1e-3


def residual_of_one_view(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """The mistake that the test must see: the residual ignores all views except the first."""
    verdict, length = rejection(p, draft, keys, greedy), draft.tokens.shape[1]
    at = verdict.count[:, None, None]
    p_next = jnp.take_along_axis(p, at, axis=1)[:, 0]
    q_next = jnp.take_along_axis(draft.view_probs[0], jnp.minimum(at, length - 1), axis=1)[:, 0]
    next_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)[1]
    left = jnp.where((verdict.count == length)[:, None], p_next, jnp.maximum(p_next - q_next, 0))
    return verdict.replace(next_token=draw(next_keys, left, greedy))


def all_of_one_view(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Verify against one view throughout: tokens of the mixture are accepted against it too."""
    return rejection(p, draft.replace(probs=draft.view_probs[0]), keys, greedy)


@pytest.mark.parametrize("mutant", [residual_of_one_view, all_of_one_view])
def test_a_wrong_residual_is_noticed(
    mutant: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculative, "verify", mutant)
    run_speculative.clear_cache()  # of programs that verify as they should
    value = p_value(joint(1.0, 0, 1.0), 3, temperature=1.0)
    run_speculative.clear_cache()
    assert value < 1e-6


def test_lookup_that_hides_what_it_drew_from_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens drawn from what was found, and accepted as if the rest had gone to all tokens
    alike.
    """

    def even(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
        assert draft.probs is not None
        return rejection(p, draft.replace(probs=(draft.probs + 1 / VOCABULARY) / 2), keys, greedy)

    monkeypatch.setattr(speculative, "verify", even)
    run_speculative.clear_cache()
    value = p_value(joint(1.0, 0, 1.0), 3, temperature=1.0, views=("lookup",), weights=(1.0,))
    run_speculative.clear_cache()
    assert value < 1e-6


def test_a_correction_that_verification_does_not_know_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens drawn with the correction for the token before, and accepted as if drawn without."""
    propose = ChainDrafter._propose

    def forgetful(
        self: ChainDrafter, committed: Any, mixing: Any, scores: Array, scratch: Any
    ) -> Any:
        draft, read = propose(self, committed, mixing, scores, scratch)
        _, probs = self._mixed(mixing, scratch[0].scores[None])
        return draft.replace(probs=probs[0]), read

    monkeypatch.setattr(ChainDrafter, "_propose", forgetful)
    run_speculative.clear_cache()
    value = p_value(
        joint(1.0, 0, 1.0), 3, temperature=1.0, views=("head",), weights=(1.0,), kind="one pass"
    )
    run_speculative.clear_cache()
    assert value < 1e-6
