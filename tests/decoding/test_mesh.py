"""Decoding on a mesh splits the target over devices, holds the draft on each, and writes the tokens
of one device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from eval.lib.times.hlo import ProgramText
from eval.lib.times.passes import time_passes
from jaxspec import CollaborationConfig, Engine, EngineConfig, LoadedModel, Request
from jaxspec.cli import main
from jaxspec.decoding.steps import run_decode
from jaxspec.engine.batches import batcher
from jaxspec.engine.batches.batch import Batch
from jaxspec.engine.compile_cache import executable
from jaxspec.sharding import make_mesh
from tests import tiny

NEW = 12


def decode(target: LoadedModel, draft: LoadedModel) -> tuple[Engine, list[tuple[int, ...]]]:
    engine = Engine(target, draft, EngineConfig(views=("M", "T"), gamma=3))
    page = tiny.page(0, 20, 30)
    prompts = [engine.encoder.prompt(text, [page]) for text in ("Hi", "What is this?")]
    forms = None, {"type": "regex", "regex": "[a-z]{99}"}
    asked = [Request(*pair, response_format=form) for *pair, form in zip(prompts, [NEW] * 2, forms)]
    return engine, [result.tokens for result in engine.generate(asked)]


def test_a_mesh_changes_no_token(pair, monkeypatch):
    draft = LoadedModel.load(pair[1])
    alone, expected = decode(LoadedModel.load(pair[0]), draft)
    assert alone.batcher.mesh is None
    mesh = make_mesh(model=2, data=2)
    target = LoadedModel.load(pair[0], mesh=mesh)
    monkeypatch.setattr(batcher, "FIRST", 8)  # caches grow once
    engine, tokens = decode(target, draft)
    assert tokens == expected
    assert engine.batcher.mesh == mesh
    asked = [Request(engine.encoder.prompt(text, []), NEW) for text in "ab"]
    state = engine.prefill(asked)
    assert state.target.k[0].addressable_shards[0].data.shape[:2] == (1, 1)  # of two rows and heads
    assert vars(time_passes(engine, asked, repeats=1)).keys() == {
        "draft_ms",
        "target_ms",
        "verify_ms",
    }


DATA_PARALLEL = {
    "refill": EngineConfig(
        views=("M", "lookup"), gamma=3, batch_size=2, weighting="mt-paper", trace=True
    ),
    "together": CollaborationConfig(gammas=(2, 1), batch_size=2),
}


@pytest.mark.full
@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_a_loop_is_entered_again_on_a_data_parallel_mesh(pair, monkeypatch, name):
    """A loop is entered again on a data-parallel mesh, with rows that are refilled, caches that
    grow and answers that are streamed: the state has the shardings that loops compile for. Rows
    have penalties and log probabilities.
    """
    config, draft = DATA_PARALLEL[name], LoadedModel.load(pair[1])
    together = isinstance(config, CollaborationConfig)

    def engine(mesh: Mesh | None, config: Any) -> Engine:
        target = LoadedModel.load(pair[0], mesh=mesh)
        if together:
            return Engine([target, LoadedModel.load(pair[1], mesh=mesh)], config=config)
        return Engine(target, draft, config)

    settings = {"repetition_penalty": 1.2, "logprobs": 2}
    asked = [
        Request(text, new, 1.0, seed=seed, **settings)
        for text, new, seed in (
            ("Hi", 12, 0),
            ("What is this?", 5, 0),
            ("What is this?", 5, 1),
            ("Tell me", 14, 0),
        )
    ]
    expected = [
        result.tokens for result in engine(None, replace(config, batch_size=4)).generate(asked)
    ]
    split = engine(make_mesh(data=2), config)
    with monkeypatch.context() as patch:
        patch.setattr(batcher, "FIRST", 8)  # caches grow once
        assert [result.tokens for result in split.generate(asked)] == expected
    if together:
        assert [result.tokens for result in split.samples(asked[1], 2)] == expected[1:3]
    else:
        *_, streamed = split.stream(asked[0])
        assert streamed.tokens == expected[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"feature": "fused", "target_layers": (0, 1, 2)},
        {"feature": "last_hidden", "parallel": True, "markov": 2, "key_layers": (1, 0)},
        {"feature": "block", "target_layers": (0, 1), "layers": 2, "markov": 2},
    ],
)
def test_a_kv_head_is_split_as_its_target_is(pair, options):
    alone, split = LoadedModel.load(pair[0]), LoadedModel.load(pair[0], mesh=make_mesh(model=2))
    head = tiny.head_of(alone, **options)
    page = tiny.page(0, 20, 30)
    engines = [Engine(target, head, EngineConfig(gamma=3)) for target in (alone, split)]
    asked = Request(engines[0].encoder.prompt("What is this?", [page]), NEW)
    expected, result = (engine.generate(asked) for engine in engines)
    assert (result.tokens, result.stats.steps) == (expected.tokens, expected.stats.steps)
    (source,) = engines[1].assembly.program.sources
    own = engines[1].assembly.params[source.name]["layers_0"]["mlp"]["gate_proj"]["weight"]
    keys = engines[1].prefill([asked]).drafter[0].k[0]
    assert own.addressable_shards[0].data.shape == (24, 32)
    assert keys.addressable_shards[0].data.shape[1] == keys.shape[1] // 2


@pytest.mark.full
def test_a_block_sends_what_the_targets_layers_do_and_the_logits(pair):
    """A block sends what the target's layers do, and the logits; the draft, and what is made of
    distributions, send nothing.
    """
    engine = Engine(
        LoadedModel.load(pair[0], mesh=make_mesh(model=2)),
        LoadedModel.load(pair[1]),
        EngineConfig(gamma=3),
    )
    requests = engine.batcher.read([Request(engine.encoder.prompt("Hi", []), NEW)])
    batch = Batch(engine.batcher, requests)
    batch.join(dict(enumerate(requests)))
    block = ProgramText(
        executable(run_decode, batch.together.held, batch.state, batch.options).as_text()
    ).block()
    assert block.collectives == {
        "extend": 2 * engine.assembly.lead.model.text.num_hidden_layers + 1
    }


def test_what_each_device_holds(pair):
    """Over four devices each device holds its part of the target, and the two kv heads, so also the
    cache, stay whole.
    """
    model, heads = 4, 2
    target, draft = (
        LoadedModel.load(pair[0], mesh=make_mesh(model=model)),
        LoadedModel.load(pair[1]),
    )
    engine, alone = Engine(target, draft), Engine(LoadedModel.load(pair[0]), draft)
    gate = target.params["language_model"]["model"]["layers_0"]["mlp"]["gate_proj"]["weight"]
    assert gate.addressable_shards[0].data.shape == (48 // model, 32)
    request = Request(engine.encoder.prompt("Hi", []), NEW)
    state = engine.prefill([request])
    assert {shard.data.shape[1] for shard in state.target.k[0].addressable_shards} == {heads}
    assert all(
        leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves((state.drafter, state.tokens))
    )

    report, whole = engine.memory_report([request]), alone.memory_report([request])
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(target.params))
    assert report.target_weights == held < whole.target_weights
    assert report.draft_weights == whole.draft_weights
    keys = sum(
        leaf.addressable_shards[0].data.nbytes for leaf in (*state.target.k, *state.target.v)
    )
    lengths = state.target.length.nbytes + state.target.shift.nbytes
    assert report.target_cache == keys + lengths


@pytest.mark.full
def test_command_line(pair, said, capsys, refusal):
    arguments = f"generate --target {pair[0]} --prompt Hi --max-new-tokens {NEW}".split()
    alone = said(*arguments)
    main([*arguments, "--model-parallel", "2"])
    out, err = capsys.readouterr()
    assert out == alone
    assert "on 2 devices in" in err
    assert "9 model devices, of 8" in refusal(*arguments, "--model-parallel", "9")
