"""Processed scores are those of transformers' own processors, in the order of its `generate`, at
each place of a chain and each node of a tree.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import GenerationConfig

from jaxspec.decoding.processors import History, processed, prompt_tokens
from jaxspec.decoding.settings import Processing, Settings
from jaxspec.models.inputs import PromptRows
from tests.tiny import hf
from tests.tiny.hf import torch

EOS = (2, 5)
FEW = 7
"""Tokens that prompts and answers are drawn from, so that many come again."""
CASES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.05},
    {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 40},
    {"min_new_tokens": 4},
    {"suppress_tokens": (3, 9), "begin_suppress_tokens": (1, 4)},
    {"bad_words": ((6,), (1, 3), (4, 2, 1), (0, 1, 2, 3, 4, 5, 6), (5,))},
    {"logit_bias": {1: 3.0, 40: -7.5, 2: 0.25}},
    {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
        "suppress_tokens": (3,),
        "begin_suppress_tokens": (4,),
        "bad_words": ((6, 1),),
        "logit_bias": {1: 3.0, 3: 2.0},
    },
]
LENGTHS = [1, 3, 8, 5, 12, 4, 6, 7, 9, 2, 11]
COUNTS = [0, 0, 2, 4, 5, 1, 3, 0, 6, 4, 2]
TREE = np.asarray(
    [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [0, 1, 0, 1, 0]], bool
)
"""Node 0 is the root, 1 and 2 are its children, 3 is a child of 1, and 4 of 2; 5 is not read."""


def theirs(model: Any, settings: dict[str, Any], prompt: int) -> Any:
    """Return transformers' processors for a prompt of this length."""
    renamed = dict(settings)
    words, bias = renamed.pop("bad_words", None), renamed.pop("logit_bias", None)
    config = GenerationConfig(
        **{k: [*v] if isinstance(v, tuple) else v for k, v in renamed.items()},
        bad_words_ids=words and [[*word] for word in words],
        sequence_bias=bias and {(token,): amount for token, amount in bias.items()},
        eos_token_id=[*EOS],
        pad_token_id=0,
    )
    model._prepare_special_tokens(config, True, device="cpu")
    return model._get_logits_processor(config, input_ids_seq_length=prompt, device="cpu")


@pytest.mark.parametrize("before", [np.tri(5, 5, -1, dtype=bool), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("cases", [CASES, CASES[:2], CASES[6:8]], ids=["all", "counts", "biases"])
def test_scores_are_those_of_transformers(cases: list[dict[str, Any]], before: np.ndarray) -> None:
    model = hf.llama()
    rng, batch, width = np.random.default_rng(0), len(cases), max(LENGTHS) + 3
    settings = [Settings(**case) for case in cases]
    form = Processing.of(settings, EOS)
    assert form is not None
    processors = form.processors(settings, EOS, batch)
    length, count = np.asarray(LENGTHS[:batch]), np.asarray(COUNTS[:batch])
    prompts, new, drafted = (rng.integers(0, FEW, (batch, size)) for size in (width, 8, 5))
    scores = rng.normal(0, 3, (batch, 5, hf.VOCABULARY)).astype(np.float32)
    rows = PromptRows(jnp.asarray(prompts), jnp.asarray(length))

    @jax.jit
    def run(processors: Any, scores: Any, rows: Any, new: Any, count: Any, drafted: Any) -> Any:
        prompt = prompt_tokens(rows, hf.VOCABULARY, processors)
        history = History.of(prompt, new, count)
        assert history is not None
        behind = history.behind(drafted, jnp.asarray(before)[None])
        first = processed(scores[:, :1], history, processors)
        return processed(scores, behind, processors), first

    output, first = map(np.asarray, run(processors, scores, rows, new, count, drafted))
    np.testing.assert_array_equal(output[:, :1], first)
    for row, case in enumerate(cases):
        expected_of = theirs(model, case, int(length[row]))
        for place in range(5):
            tokens = [*prompts[row, : length[row]], *new[row, : count[row]]]
            tokens = torch.tensor([[*tokens, *drafted[row, before[place]]]])
            expected = expected_of(tokens, torch.tensor(scores[row, place])[None].clone())[0]
            np.testing.assert_allclose(output[row, place], expected.numpy(), rtol=1e-6)


def test_penalties_of_an_answer_are_vllms() -> None:
    """Penalties of an answer count its tokens, and not the prompt's, as vLLM's do."""
    settings = [Settings(presence_penalty=0.5, frequency_penalty=-0.25), Settings()]
    form = Processing.of(settings, EOS)
    assert form == (0, 0, False)
    processors = form.processors(settings, EOS, 2)
    scores = jnp.zeros((2, 2, 6))
    prompt = prompt_tokens(PromptRows(jnp.full((2, 3), 4), jnp.full(2, 3)), 6, processors)
    history = History.of(prompt, jnp.asarray([[1, 2, 1, 3]] * 2), jnp.asarray([3, 3]))
    assert history is not None
    behind = history.behind(jnp.asarray([[1], [1]]), jnp.asarray([[[False], [True]]]))
    output = np.asarray(processed(scores, behind, processors))
    np.testing.assert_allclose(output[0, 0], [0, -0.5 + 0.5, -0.5 + 0.25, 0, 0, 0])
    np.testing.assert_allclose(output[0, 1], [0, -0.5 + 0.75, -0.5 + 0.25, 0, 0, 0])
    np.testing.assert_array_equal(output[1], scores[1])


def test_nothing_to_do_is_no_processor() -> None:
    neutral = Settings(repetition_penalty=1.0, suppress_tokens=[], logit_bias={}, min_p=0.0)
    assert Processing.of([neutral, Settings()], EOS) is None
