"""A batch that requests join and leave while others decode answers each as if alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.engine import compile_cache
from jaxspec.engine.batches import batcher, fitting
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.batches.warmup import warmup_steps
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.engine.memory import Sizes
from jaxspec.errors import InputError
from tests import tiny
from tests.tiny.oracles import goodness_of_fit

NEW = 16
CONFIG = EngineConfig(
    views=("M", "T", "lookup"),
    gamma=3,
    batch_size=1,
    prompt_buckets=(64, 256),
    image_buckets=(0, 1),
    new_buckets=(NEW,),
    trace=True,
)


def requests_of(count: int) -> list[Request]:
    """Return short requests and long ones with an image, greedy and drawn, some with a stop.

    The first and the last three have few tokens.
    """
    rng, requests = np.random.default_rng(0), []
    for i in range(count):
        few = not 3 <= i < count - 3
        long = not few and bool(rng.integers(2))
        words, images = "What is it? " * (5 if long else 1), [tiny.page(i)] * long
        stop = ["a"] * (i % 7 == 3)
        new = 3 if few else int(rng.integers(1, NEW + 1))
        requests.append(Request(words, new, float(i % 3 == 1), seed=i, stop=stop, images=images))
    return requests


@pytest.mark.parametrize(
    ("rows", "headed"), [(2, False), *tiny.rarer((3, True))], ids=["model", "head"]
)
def test_requests_come_and_go_and_answers_are_as_if_alone(
    rows: int,
    headed: bool,
    target: LoadedModel,
    draft: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that come and go are answered as if alone: those that left have no result, their
    rows are free at once, and no program is compiled after the batch is warm. Rows have few slots
    while prompts and answers are short.
    """
    requests = requests_of(24)
    drafts, views = (tiny.head_of(target), ("lookup",)) if headed else (draft, CONFIG.views)
    config = replace(CONFIG, views=views)
    one_size = replace(config, prompt_buckets=CONFIG.prompt_buckets[-1:])
    alone = [*map(Engine(target, drafts, one_size).generate, requests)]
    monkeypatch.setattr(compile_cache, "EXECUTABLES", {})
    monkeypatch.setattr(fitting, "FEW", 256)
    monkeypatch.setattr(batcher, "FIRST", 8)
    engine = Engine(target, drafts, replace(config, batch_size=rows))
    batch = engine.live([request for request in requests if request.temperature])
    assert batch.rows == rows  # no bucket above
    for step in warmup_steps(batch):
        step.run()
    programs, used = len(compile_cache.EXECUTABLES), list[Sizes]()
    waiting, results = dict(enumerate(engine.batcher.read(requests))), dict[int, Result]()
    gone = {5, 11, 12}
    while waiting or batch.busy:
        batch.join(waiting)
        batch.decode(stride=1)
        used.append(batch.form)
        so_far = batch.results()
        results |= {i: result for i, result in so_far.items() if result.finish_reason}
        if leaving := gone & (so_far.keys() - results.keys()):
            free = len(batch.free)
            batch.leave(leaving)
            assert len(batch.free) == free + len(leaving)
    assert len(compile_cache.EXECUTABLES) == programs
    assert {*used} == {*batch.forms}
    assert any(old > new for old, new in pairwise(used))  # also smaller again
    assert results.keys() >= set(range(len(requests))) - gone
    for i, result in results.items():
        assert (result.tokens, result.text) == (alone[i].tokens, alone[i].text)
        check_trace(result, alone[i])
        for field, value in vars(alone[i].stats).items():
            np.testing.assert_array_equal(value, getattr(result.stats, field), err_msg=field)
    assert not batch.written.answers
    longest = max(results, key=lambda i: len(results[i].tokens))
    batch.join({0: engine.batcher.read([requests[longest]])[0]})
    batch.decode(stride=1)  # an empty batch decodes at once what joins it
    assert len(batch.results()[0].tokens) > 1


def test_answers_to_one_prompt_share_its_prefill(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers to one prompt share its prefill, also one that joins later; each equals the sample of
    its seed, with all that it records.
    """
    engine = Engine(target, config=EngineConfig(batch_size=2))
    request = Request("What is it?", NEW, 1.0, seed=3, logprobs=2, presence_penalty=0.5)
    batch, (read,) = engine.live([request]), engine.batcher.read([request])
    waiting = {i: replace(read, seed=read.seed + i) for i in range(batch.rows + 1)}
    batch.join({0: waiting.pop(0)})
    monkeypatch.setattr(engine.batcher, "inputs", None)  # a prefill would read them
    results = tiny.run_live(batch, waiting)
    monkeypatch.undo()
    for i, sample in enumerate(engine.samples(request, len(results))):
        assert results[i].tokens == sample.tokens
        np.testing.assert_allclose(results[i].logprobs, sample.logprobs, atol=1e-4)
    assert len({result.tokens[0] for result in results.values()}) > 1


@pytest.mark.full
def test_samples_follow_the_targets_law_while_weights_learn(
    target: LoadedModel, draft: LoadedModel
) -> None:
    """Samples of four tokens, each of the two likeliest, follow the target's law in rows of all
    ages while weights learn. Weights that learn may round to others than of a request alone, which
    then draws another such sample.
    """
    settings = replace(CONFIG, weighting="mt-paper", batch_size=32, trace=False)
    engine = Engine(target, draft, settings)
    prompt, new, count = engine.encoder.prompt("What is it?"), 4, 600
    requests = [Request(prompt, new, 1.0, top_k=2, seed=i) for i in range(count)]
    law = dict[tuple[int, ...], float]({(): 1.0})
    for _ in range(new):
        asked = [replace(prompt, tokens=np.append(prompt.tokens, x).astype(np.int32)) for x in law]
        answers = Engine(target).generate([Request(each, 1, logprobs=5) for each in asked])
        longer = {}
        for (tokens, p), answer in zip(law.items(), answers, strict=True):
            assert answer.top_logprobs is not None
            best = dict([*answer.top_logprobs[0].items()][:2])
            total = sum(map(np.exp, best.values()))
            longer |= {(*tokens, x): p * float(np.exp(log)) / total for x, log in best.items()}
        law = longer
    assert not {x for tokens in law for x in tokens} & {*engine.batcher.eos}
    batch = Batch(engine.batcher, engine.batcher.read(requests))
    results = tiny.run_live(batch, dict(enumerate(engine.batcher.read(requests)))).values()
    counts = Counter(tiny.tokens(results))
    drafted, accepted = (
        sum(int(np.sum(getattr(result.stats, name))) for result in results)
        for name in ("drafted_at", "accepted_at")
    )
    assert 100 < accepted < drafted - 100
    assert counts.keys() <= law.keys()
    observed, expected = (np.array([each[x] for x in law]) for each in (counts, law))
    assert goodness_of_fit(observed, expected) > 1e-3


def check_trace(result: Result, alone: Result) -> None:
    """Check that two traces are equal up to rounding: other batches sum in other orders."""
    assert result.trace is not None
    assert alone.trace is not None
    assert result.trace.pop("pieces") == alone.trace.pop("pieces")
    assert jax.tree.structure(result.trace) == jax.tree.structure(alone.trace)
    np.testing.assert_allclose(*map(jax.tree.leaves, (result.trace, alone.trace)), atol=1e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "What is it? " * 9}, "prompt tokens: 1"),
        ({"images": [tiny.page()] * 2}, "images: 2 of at most 1"),
        ({"max_new_tokens": NEW + 1}, "max_new_tokens: 17 of at most 16"),
        ({"images": [tiny.page()], "logprobs": 0}, "log probabilities a token: 1 of at most 0; sh"),
        ({"images": [tiny.page()], "logit_bias": {5: 1.0, 6: 2.0}}, "logit_bias: 2 of at most 0"),
        ({"images": [tiny.page()], "min_p": 0.1, "temperature": 1.0}, "settings of scores: 1 of"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    target: LoadedModel, options: dict[str, Any], words: str
) -> None:
    engine = Engine(target, config=EngineConfig(batch_size=1))
    fitting = Request("What is it?", NEW, images=[tiny.page()])
    batch = engine.live([fitting])
    request = replace(Request("What is it?", NEW), **options)
    with pytest.raises(InputError, match=words):
        batch.fit(*engine.batcher.read([request]))
    with pytest.raises(InputError, match=words):
        batch.join({0: engine.batcher.read([request])[0]})
    assert not batch.busy


def test_a_drawn_answer_joins_a_batch_whose_examples_are_greedy(target: LoadedModel) -> None:
    engine = Engine(target, config=EngineConfig(batch_size=2))
    greedy = Request("What is it?", NEW)
    drawn = replace(greedy, temperature=1.0, seed=3)
    asked = [greedy, drawn]
    results = tiny.run_live(engine.live([greedy]), dict(enumerate(engine.batcher.read(asked))))
    assert tiny.tokens(results[i] for i in (0, 1)) == tiny.tokens(engine.generate(asked))


def test_the_rest_are_read_step_by_step_once_the_longest_has_left(target: LoadedModel) -> None:
    engine = Engine(target, config=EngineConfig(batch_size=2))
    request = Request("What is it?", NEW, min_new_tokens=NEW)
    batch, (read,) = engine.live([request]), engine.batcher.read([request])
    batch.join({0: read})
    for _ in range(8):
        batch.decode(stride=1)
    batch.join({1: read})
    batch.read()
    batch.leave({0})
    batch.decode(stride=1)
    (result,) = batch.results().values()
    assert len(result.tokens) == 2  # one of prefill and one of a block
