"""Qwen2.5-VL and Qwen3-VL write what transformers' own `generate` does, with drafts too: odd sizes,
two turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is the oracle of parity: install the `parity` extra")

from jaxspec.checkpoints.generation import SAMPLED, read_generation_settings
from jaxspec.engine.engine import Engine, EngineConfig, LoadedModel, Request, Result
from jaxspec.engine.memory import abstract_inputs
from jaxspec.loading.pairs import same_tower
from tests.hub.table import QWEN_SAMPLING
from tests.tiny import hf, noisy, qwen_vl

pytestmark = pytest.mark.full

NEW, LENGTH, UNITS = 40, 448, 32
QUESTION = "What is it?"
SIZES = [(20, 50), (9, 8), (43, 19), (64, 17), (25, 31), (16, 16), (70, 30), (11, 90)]
COUNTS = (1, 0, 2, 5)
"""Images of the first turns, which are one batch."""
NEXT = (1, 2, 0, 1)
"""Images of the second turns."""
FOLLOWING = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
CHAT = f"<|im_start|>system\nYou are a helpful assistant.{FOLLOWING}"
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"


def engine(target: LoadedModel, draft: LoadedModel | None = None, *views: str) -> Engine:
    config = EngineConfig(
        views=views, gamma=3, prompt_buckets=(LENGTH,), image_buckets=(UNITS,), new_buckets=(NEW,)
    )
    return Engine(target, draft, config)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def target(tmp_path_factory, request) -> tuple[Any, LoadedModel]:
    made = hf.talkative(qwen_vl.MODELS[request.param]())
    return made, LoadedModel.load(qwen_vl.write(tmp_path_factory.mktemp("target"), made))


def images(counts: tuple[int, ...], seed: int) -> list[list[Any]]:
    taken: Iterator[Any] = iter(qwen_vl.pictures(*SIZES, seed=seed))
    return [[next(taken) for _ in range(count)] for count in counts]


@pytest.fixture(scope="module")
def turns(target) -> list[tuple[list[Request], list[list[int]]]]:
    """Return both turns' requests, and what transformers answers: its prompts are written out by
    hand.
    """
    made, loaded = target
    encode, encoder = loaded.tokenizer.encode, engine(loaded).encoder
    first, then = images(COUNTS, seed=0), images(NEXT, seed=1)
    asked = [encode(CHAT.format(SEEN * len(seen) + QUESTION)) for seen in first]
    told = [qwen_vl.generate(made, row, seen, NEW) for row, seen in zip(asked, first)]
    assert min(len(set(answer)) for answer in told) > 4, "a constant answer proves little"
    prompts = [encoder.prompt(QUESTION, seen) for seen in first]

    spoken = [[token for token in answer if token != qwen_vl.IMAGE] for answer in told]
    question = "And <image>?"
    later = [question if len(seen) == 1 else QUESTION for seen in then]
    texts = [
        q.replace("<image>", SEEN) if "<image>" in q else SEEN * len(seen) + q
        for q, seen in zip(later, then)
    ]
    again = [
        row + answer + encode(FOLLOWING.format(text))
        for row, answer, text in zip(asked, spoken, texts)
    ]
    finally_ = [qwen_vl.generate(made, row, a + b, NEW) for row, a, b in zip(again, first, then)]
    follow = [
        encoder.follow_up(p, answer, q, b) for p, answer, q, b in zip(prompts, told, later, then)
    ]
    for prompt, row in [*zip(prompts, asked), *zip(follow, again)]:
        assert prompt.tokens.tolist() == row
    return [
        ([Request(p, NEW) for p in prompts], told),
        ([Request(p, NEW) for p in follow], finally_),
    ]


def check(decoder: Engine, turns: Any) -> list[Result]:
    out = []
    for requests, expected in turns:
        results = decoder.generate(requests)
        assert [list(result.tokens) for result in results] == expected
        assert {result.batch for result in results} == {len(COUNTS)}
        out += results
    return out


def test_a_draft_with_the_same_tower(target, turns):
    """A draft that looks through the target's tower writes transformers' answers, under all views
    in one batch.
    """
    loaded = target[1]
    params = noisy(loaded.params, 0.03)
    tower = {name: part for name, part in loaded.params["visual"].items() if "merger" not in name}
    draft = replace(loaded, params={**params, "visual": {**params["visual"], **tower}})
    decoder = engine(loaded, draft, "M", "T", "P")
    assert same_tower(loaded, draft)
    assert all("merger" in name for name in decoder.assembly.params["draft"]["visual"])
    accepts_some(check(decoder, turns))
    requests = turns[0][0]
    requests = decoder.batcher.read(requests)
    sizes = decoder.batcher.largest(requests)
    planned, _ = abstract_inputs(decoder.assembly.program, len(requests), sizes)
    given = decoder.batcher.inputs(requests, sizes, len(requests))
    assert jax.tree.map(np.shape, given) == jax.tree.map(np.shape, planned)


BUSY: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [9, 10],
    "begin_suppress_tokens": [12],
    "bad_words_ids": [[20, 21], [33]],
}


@pytest.mark.parametrize("target", ["qwen2_5_vl"], indirect=True)
def test_settings_of_the_models_file(target, turns, tmp_path):
    """Settings of the model's file, Qwen's own and all that a file may have, give transformers'
    answers. Prompts count, with their image placeholders.
    """
    made, loaded = target
    params = noisy(loaded.params, 0.03)
    draft = replace(loaded, params={**params, "visual": loaded.params["visual"]})
    requests, plain = turns[0]
    for settings in (QWEN_SAMPLING[loaded.config.model_type], BUSY):
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
        own = replace(loaded, settings=read_generation_settings(tmp_path))
        greedy = {k: v for k, v in settings.items() if k not in ("do_sample", *SAMPLED)}
        expected = [
            qwen_vl.generate(made, request.prompt.tokens.tolist(), seen, NEW, **greedy)
            for request, seen in zip(requests, images(COUNTS, seed=0))
        ]
        assert (expected == plain) == (settings.get("repetition_penalty") == 1.0)
        accepts_some(check(engine(own, draft, "M", "T"), [(requests, expected)]))
    check(engine(own), [(requests, expected)])
    config = replace(engine(own).config, generation_config="ignore")
    check(Engine(own, config=config), [(requests, plain)])


@pytest.mark.parametrize("target", ["qwen2_5_vl"], indirect=True)
def test_a_draft_with_its_own_tower(target, turns, tmp_path):
    """A smaller draft with its own tower, as transformers saves it, writes transformers'
    answers.
    """
    full = {"qwen2_5_vl": "fullatt_block_indexes", "qwen3_vl": "deepstack_visual_indexes"}
    family = target[1].config.model_type
    made = qwen_vl.MODELS[family](
        text={"num_hidden_layers": 1}, vision={"depth": 1, full[family]: []}
    )
    draft = LoadedModel.load(qwen_vl.write(tmp_path / "draft", made))
    assert not same_tower(target[1], draft)
    check(engine(target[1], draft, "P"), turns)


@pytest.mark.parametrize("target", ["qwen2_5_vl"], indirect=True)
def test_a_text_draft(target, turns, tmp_path):
    """A text draft of the same words, with fewer rows of padding, drafts at its own positions."""
    loaded = target[1]
    made = qwen_vl.text_model(loaded.config.text_config.model_type)
    made.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    draft = LoadedModel.load(tmp_path)
    rows = loaded.params["model"]["embed_tokens"]["embedding"][: qwen_vl.PADDED - 2]
    layers = {**noisy(loaded.params["model"], 0.03), "embed_tokens": {"embedding": rows}}
    head = {"weight": loaded.params["lm_head"]["weight"][: qwen_vl.PADDED - 2]}
    draft = replace(draft, params={"model": layers, "lm_head": head})
    accepts_some(check(engine(loaded, draft, "T"), turns))


def accepts_some(results: list[Result]) -> None:
    accepted = np.sum([result.stats.histogram for result in results], axis=0)
    assert accepted[0] > 0
    assert accepted[1:].sum() > 0
