"""Sampled sequences follow the target's joint law, and the test would notice a wrong residual.

The law of the first three new tokens is computed without cache, loop or filters of the library:
full forward passes over all prefixes, and the filters of `tests/tiny/oracles.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
from tests import tiny
from tests.tiny.oracles import goodness_of_fit, numpy_distribution

VOCABULARY, LENGTH, ROWS = 6, 3, 2000
ROUNDS = 2, 10
"""Numbers of batches whose sequences are judged."""
# past what can be drawn: in a full pass, a drawn placeholder would show an image
IMAGE = VOCABULARY
TARGET, PARAMS = tiny.lvlm(16, 2, seed=3, scale=0.4, vocabulary=VOCABULARY, image=IMAGE)
INT8 = int8_params(PARAMS)
DRAFT = tiny.noisy(PARAMS, 0.7)
VIEWS = ("M", "T", "P")
HEADS = {
    "KV head": tiny.kv_head(TARGET, PARAMS),
    "eagle": tiny.kv_head(TARGET, PARAMS, feature="fused", target_layers=(0, 1, 2)),
    "MSD": tiny.kv_head(TARGET, PARAMS, feature="eagle1", images="unfused"),
    "one pass": tiny.kv_head(TARGET, PARAMS, parallel=True, markov=4, key_layers=(0, 1)),
    "DSpark": tiny.kv_head(
        TARGET, PARAMS, feature="block", target_layers=(1,), layers=1, markov=4, anchored=True
    ),
    "MTP": tiny.kv_head(TARGET, PARAMS, feature="mtp"),
}


@functools.cache
def logits_after(prefix: tuple[int, ...], int8: bool = False) -> np.ndarray:
    """Return the target's logits [V] after the prompt and these tokens, by one full pass."""
    prompt = tiny.prompts([4], [1], VIEWS, image=IMAGE)
    start = np.asarray(prompt.target.tokens)[0, : int(prompt.target.length[0])]
    row = np.concatenate([start, np.asarray(prefix, np.int64)]).astype(np.int32)
    return np.asarray(
        forward(INT8 if int8 else PARAMS, jnp.asarray(row[None]), prompt.images["pixels"])[0, -1]
    )


@jax.jit
def forward(params: Params, tokens: Array, pixels: Array) -> Array:
    return tiny.full_pass(TARGET, params, tokens, pixels)


def joint(temperature: float, top_k: int, top_p: float, int8: bool = False) -> np.ndarray:
    """Return P(x1, x2, x3 | prompt) [V, V, V]."""
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
    """Return counts [V, V, V] of the first tokens of ROWS sequences a batch; gamma 0 is the plain
    loop.

    With `few_words` draft and head score different tokens each. If `changing`, each token may have
    another plan.
    """
    head, head_params = HEADS[kind] if "head" in views else (None, {})
    draft, own = TARGET, DRAFT
    if few_words:
        draft, own = tiny.narrow(TARGET, DRAFT, (5, 0, 3, 1))
        head = head and replace(
            head, text_config=replace(head.text_config, draft_vocabulary=(4, 0, 2))
        )
        if kind == "one pass":
            head_params = {**head_params, "markov_out": head_params["markov_out"][:, :3]}
    prompt = tiny.weighted(tiny.prompts([4], [1], views, image=IMAGE, head=head), *weights)
    batch = jax.tree.map(lambda x: jnp.repeat(x, ROWS, axis=0), prompt)
    target = INT8 if int8 else PARAMS
    if gamma:
        program = tiny.speculator(TARGET, draft, views, gamma, weighting, tree, head=head)
        params = tiny.params_of(program, target, own, head_params)

        plans = plans_of(program, None)

    counts, blocks = np.zeros([VOCABULARY] * LENGTH), np.zeros(gamma + 1)
    for seed in range(ROUNDS[-1]):
        chosen = tiny.sampling(ROWS, new=LENGTH, seed=seed, eos=(-1,), **options)
        if changing:
            state, _ = run_prefill(program, params, batch, chosen, LENGTH)
            for count in range(2, LENGTH + 1):
                plan = plans[(seed + count) % len(plans)]
                pause: Any = np.asarray([ROWS, count], np.int32)
                state = run_decode(plan, params, state, chosen, Pause(*pause))
        elif gamma:
            state = tiny.run_speculative(program, params, batch, chosen, LENGTH)
        else:
            state = tiny.run_plain(TARGET, target, batch, chosen, LENGTH)
        np.add.at(counts, tuple(np.asarray(state.tokens).T), 1)
        blocks += np.asarray(state.stats.histogram).sum(0)
        if seed + 1 in ROUNDS:
            assert blocks[0] > 500, "rejections are what this test is about"
            assert gamma == 0 or blocks[1:].sum() > 500, "and so are acceptances"
            yield counts


ALONE = {"temperature": 1.0, "views": ("head",), "weights": (1.0,)}
LOOKUP = ALONE | {"views": ("lookup",)}
CUT = {"temperature": 0.7, "top_p": 0.8}
LEARNED = {"weighting": "inverse_error_power"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "autoregressive": (0, {"temperature": 1.0}),
    # room for a whole block: the token after it is the bonus
    "bonus": (1, {"temperature": 1.0}),
    "plain": (3, {"temperature": 1.0}),
    "int8": (2, CUT | {"int8": True}),
    "filtered": (2, CUT | {"top_k": 4}),
    "grid": (1, {"temperature": 1.0, "weighting": "mt-release"}),
    "learned, filtered": (1, CUT | LEARNED | {"top_k": 4}),
    "tree, few words": (1, CUT | LEARNED | {"top_k": 4, "tree": "3", "few_words": True}),
    "dynamic tree": (2, {"temperature": 1.0, "top_p": 0.9, "tree": "dynamic:2:5"}),
    "KV head": (3, ALONE),
    "mixed KV head, few words": (
        1,
        LEARNED | {"temperature": 0.7, "views": ("M", "T", "head"), "few_words": True},
    ),
    "EAGLE-3, tree": (2, ALONE | {"kind": "eagle", "tree": "2:4"}),
    "MSD": (2, ALONE | {"kind": "MSD"}),
    "one pass": (3, ALONE | {"kind": "one pass"}),
    "mixed one pass, few words": (
        2,
        {"temperature": 0.7, "views": ("M", "head", "lookup"), "weighting": "mt-paper"}
        | {"kind": "one pass", "few_words": True},
    ),
    "MTP": (2, ALONE | {"kind": "MTP"}),
    "DSpark, tree": (2, ALONE | CUT | {"kind": "DSpark", "tree": "2:4"}),
    "lookup": (3, LOOKUP),
    "lookup, tree": (1, LOOKUP | CUT | {"tree": "3"}),
    "mixed lookup": (
        2,
        {"temperature": 1.0, "views": ("M", "head", "lookup"), "weighting": "mt-paper"},
    ),
    "changing plans": (
        2,
        {"temperature": 1.0, "views": ("head", "lookup"), "weights": (0.5, 0.5)}
        | {"kind": "eagle", "changing": True},
    ),
}
RARER = ("grid", "mixed KV head, few words", "mixed one pass, few words", "lookup, tree")


@pytest.mark.parametrize("name", [*(n for n in CASES if n not in RARER), *tiny.rarer(*RARER)])
def test_sequences_follow_the_targets_law(name: str) -> None:
    gamma, options = CASES[name]
    filters = options["temperature"], options.get("top_k", 0), options.get("top_p", 1.0)
    law = joint(*filters, options.get("int8", False))
    assert p_value(law, gamma, **options) > 1e-3


def residual_of_one_view(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Ignore all views except the first in the residual, which is the mistake that the test must
    see.
    """
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


def as_if_even(p: Array, draft: Draft, keys: Array, greedy: Array) -> Verdict:
    """Accept tokens that lookup drew from what it found as if the rest had gone to all tokens."""
    assert draft.probs is not None
    return rejection(p, draft.replace(probs=(draft.probs + 1 / VOCABULARY) / 2), keys, greedy)


propose = ChainDrafter._propose


def forgetful(self: ChainDrafter, committed: Any, mixing: Any, scores: Array, scratch: Any) -> Any:
    """Accept tokens drawn with a correction for the token before as if drawn without."""
    draft, read = propose(self, committed, mixing, scores, scratch)
    _, probs = self._mixed(mixing, scratch[0].scores[None])
    return draft.replace(probs=probs[0]), read


@pytest.mark.parametrize(
    ("place", "name", "mistake", "options"),
    [
        (speculative, "verify", residual_of_one_view, {}),
        (speculative, "verify", all_of_one_view, {}),
        (speculative, "verify", as_if_even, LOOKUP),
        (ChainDrafter, "_propose", forgetful, ALONE | {"kind": "one pass"}),
    ],
)
def test_a_mistake_is_noticed(
    place: Any, name: str, mistake: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, mistake)
    tiny.run_speculative.clear_cache()  # of programs that verify as they should
    value = p_value(joint(1.0, 0, 1.0), 3, **{"temperature": 1.0} | options)
    tiny.run_speculative.clear_cache()
    assert value < 1e-6
