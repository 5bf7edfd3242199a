"""Processors keep speculation exact: greedy answers and sampled laws are those of plain decoding,
whose scores depend on the tokens before them, in batches whose rows have settings of their own.

`tests/parity/test_processors.py` compares the scores themselves with transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decoding.collaboration.alternating import Alternating
from jaxspec.decoding.collaboration.combination import parse_combination
from jaxspec.decoding.collaboration.one_proposer import OneProposer
from jaxspec.decoding.settings import Processing, Settings
from tests import tiny
from tests.decoding import tables, test_greedy, test_sampling_law
from tests.tiny.grammars import Odd
from tests.tiny.oracles import goodness_of_fit, numpy_filtered, numpy_processed, numpy_softmax

ODD: Any = Odd()
MIXED = [
    Settings(repetition_penalty=1.5, presence_penalty=0.3),
    Settings(no_repeat_ngram_size=2, bad_words=((3, 5), (7,)), logit_bias={9: 0.4}),
    Settings(),
    Settings(
        suppress_tokens=(4, 6),
        begin_suppress_tokens=(8,),
        frequency_penalty=0.5,
        response_format=ODD,
    ),
]
"""Settings of the four rows of a batch."""
LAWS = [
    Settings(repetition_penalty=1.6, presence_penalty=0.4, frequency_penalty=0.3),
    Settings(no_repeat_ngram_size=2, bad_words=((1, 0), (4,)), logit_bias={2: 1.0}),
    Settings(),
    Settings(repetition_penalty=0.8, begin_suppress_tokens=(3,), min_p=0.2),
    Settings(presence_penalty=0.4, response_format=ODD),
]
"""Settings of every fifth row; their vocabulary has six tokens."""
ROUNDS = 5


# Greedy answers


def greedy(settings: Sequence[Settings] = MIXED) -> Any:
    return tiny.sampling(test_greedy.B, new=test_greedy.NEW, eos=(60, 61), settings=settings)


@pytest.mark.parametrize(
    ("views", "tree"),
    [
        (("M", "T"), None),
        (("M", "lookup"), "dynamic:2:6"),
        *tiny.rarer((("M", "T"), "2:9"), (("KV head",), None), (("eagle",), None)),
        *tiny.rarer((("one pass",), "2:5")),
    ],
)
def test_speculation_writes_the_processed_tokens(views: tuple[str, ...], tree: str | None) -> None:
    expected = test_greedy.plain(greedy())
    free = test_greedy.plain(greedy(()))
    assert [row == other for row, other in zip(expected, free)] == [False, False, True, False]
    pairs = [*zip(expected[1], expected[1][1:])]
    assert len({*pairs}) == len(pairs)
    assert [(i + token) % 2 for i, token in enumerate(expected[3])] == [0] * len(expected[3])
    state = test_greedy.speculative(views, 3, greedy(), tree=tree)
    assert tiny.outputs(state) == expected
    test_greedy.check_stats(state)
    assert np.asarray(state.stats.accepted_at).sum() > 0


# Laws


def drawn(gamma: int, views: tuple[str, ...], **options: Any) -> np.ndarray:
    """Return counts [settings, V, V, V] of the first tokens of rows with each of the settings."""
    law, new = test_sampling_law, test_sampling_law.LENGTH
    policy = {name: options.pop(name) for name in ("tree", "weighting") if name in options}
    head, head_params = law.HEADS[options.pop("kind")] if "head" in views else (None, {})
    batch = tiny.prompts([4], [1], views, image=law.IMAGE, head=head)
    batch = jax.tree.map(lambda x: jnp.repeat(x, law.ROWS, axis=0), batch)
    counts = np.zeros([len(LAWS), *[law.VOCABULARY] * new])
    for seed in range(ROUNDS):
        chosen = tiny.sampling(
            law.ROWS, 1.0, new=new, seed=seed, eos=(-1,), settings=LAWS, **options
        )
        if gamma:
            program = tiny.speculator(law.TARGET, law.TARGET, views, gamma, head=head, **policy)
            params = tiny.params_of(program, law.PARAMS, law.DRAFT, head_params)
            state = tiny.run_speculative(program, params, batch, chosen, new)
        else:
            state = tiny.run_plain(law.TARGET, law.PARAMS, batch, chosen, new)
        for row in range(len(LAWS)):
            np.add.at(counts[row], tuple(np.asarray(state.tokens)[row :: len(LAWS)].T), 1)
    return counts


def joint(settings: Settings, top_p: float = 1.0) -> np.ndarray:
    """Return P(x1, x2, x3 | prompt) [V, V, V] of the processed target."""
    law, size = test_sampling_law, test_sampling_law.VOCABULARY
    batch = tiny.prompts([4], [1], law.VIEWS, image=law.IMAGE)
    prompt = np.asarray(batch.target.tokens)[0, : int(batch.target.length[0])].tolist()
    probs = np.ones(())
    for depth in range(law.LENGTH):
        steps = []
        for prefix in np.ndindex(*[size] * depth):
            scores = numpy_processed(law.logits_after(prefix), settings, prompt, prefix)
            steps.append(likely(numpy_filtered(numpy_softmax(scores, 1.0), 0, top_p), settings))
        probs = probs[..., None] * np.reshape(steps, (*[size] * depth, size))
    return probs


def likely(probs: np.ndarray, settings: Settings) -> np.ndarray:
    """Return the distribution without tokens under min-p."""
    probs = np.where(probs >= settings.min_p * probs.max(), probs, 0)
    return probs / probs.sum()


@pytest.mark.parametrize(
    ("gamma", "options"),
    [
        pytest.param(0, {"views": ("M",)}, id="autoregressive", marks=pytest.mark.full),
        pytest.param(2, {"views": ("M", "T", "P"), "top_p": 0.9}, id="chain, filtered"),
        pytest.param(2, {"views": ("M", "T"), "tree": "3:8"}, id="tree", marks=pytest.mark.full),
        pytest.param(2, {"views": ("M", "lookup"), "tree": "dynamic:2:5"}, id="dynamic tree"),
        pytest.param(
            2,
            {"views": ("M", "head", "lookup"), "kind": "KV head", "weighting": "mt-paper"},
            id="mix",
        ),
    ],
)
def test_sequences_follow_the_processed_law(gamma: int, options: dict[str, Any]) -> None:
    counts = drawn(gamma, **options)
    for row, settings in enumerate(LAWS):
        # Of twenty p-values one may be lower than 1e-3.
        assert goodness_of_fit(counts[row], joint(settings, options.get("top_p", 1.0))) > 1e-4


# Collaboration


SIZE, NEW, SAMPLED, GREEDY = 3, 5, 20_000, 40
TOGETHER = [
    Settings(repetition_penalty=1.4, frequency_penalty=0.3),
    Settings(no_repeat_ngram_size=3, logit_bias={1: 0.5}),
    Settings(response_format=ODD),
    Settings(),
]


@partial(jax.jit, static_argnums=(0, 4), compiler_options=tiny.QUICK)
def together(program: Any, params: Any, batch: Any, chosen: Any, new: int) -> Any:
    return program.decode(params, program.prefill(params, batch, chosen, new)[0], chosen)


def combined(
    context: Sequence[int], new: Sequence[int], settings: Settings, t: float
) -> np.ndarray:
    """Return the processed distribution of the next token [V]; at temperature 0 one-hot."""
    logits = tables.tables(2, SIZE)[:, tables.state_of((*context, *new), SIZE)].astype(float)
    warmth = t or 1.0
    soft = 0.7 * numpy_softmax(logits[0], warmth) + 0.3 * numpy_softmax(logits[1], warmth)
    scores = numpy_processed(warmth * np.log(soft), settings, context, new)
    return numpy_softmax(scores, t) if t else np.eye(SIZE)[np.argmax(scores)]


@pytest.mark.parametrize(
    "program",
    [
        Alternating(tables.members(2, SIZE), (2, 1)),
        OneProposer(tables.members(2, SIZE), 2, bonus=True),
    ],
    ids=["alternating", "speculative"],
)
def test_collaborating_models_follow_their_processed_combination(program: Any) -> None:
    """Models that write together follow their processed combination; proposals only follow it more
    often.
    """
    t, rows = 0.8, SAMPLED + GREEDY * len(TOGETHER)
    every = np.asarray(list(np.ndindex(*[SIZE] * tables.ORDER)))
    starts = np.concatenate([np.ones(SAMPLED, int), np.arange(rows - SAMPLED) // 3 % len(every)])
    form = Processing.of(TOGETHER, ())
    assert form is not None
    settings = [TOGETHER[row % len(TOGETHER)] for row in range(rows)]
    chosen = tables.options(np.repeat([t, 0.0], [SAMPLED, rows - SAMPLED]), NEW, 0)
    chosen = chosen.replace(
        processors=jax.tree.map(jnp.asarray, form.processors(settings, (), rows))
    )
    combination = parse_combination("weighted:0.7,0.3", 2)
    params = {"models": tuple(tables.tables(2, SIZE)), "combination": combination}
    state = together(program, params, tables.prompts(2, every[starts]), chosen, NEW)
    tokens = np.asarray(state.tokens)[:, :NEW]
    for number, own in enumerate(TOGETHER):
        law = np.ones(())
        for depth in range(NEW):
            steps = [combined(every[1], prefix, own, t) for prefix in np.ndindex(*[SIZE] * depth)]
            law = law[..., None] * np.reshape(steps, (*[SIZE] * depth, SIZE))
        counts = np.zeros([SIZE] * NEW)
        np.add.at(counts, tuple(tokens[:SAMPLED][number :: len(TOGETHER)].T), 1)
        assert goodness_of_fit(counts, law) > 1e-3
    for row in range(SAMPLED, rows):
        answer: list[int] = []
        for _ in range(NEW):
            best = combined(every[starts[row]], answer, settings[row], 0.0)
            answer.append(int(np.argmax(best)))
        assert tokens[row].tolist() == answer
    tested, accepted = (np.asarray(x).sum(0) for x in (state.stats.tested, state.stats.accepted))
    assert (accepted[tested > 0] > 0).all()
