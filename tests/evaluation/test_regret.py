"""A replay of a rule on recorded answers makes the blocks that decoding with it makes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from configs.eval.mini import config as mini
from eval.block_efficiency import regret_tables
from eval.lib.drafts.comparison import prompts_of
from eval.lib.drafts.config import Variant
from eval.lib.drafts.regret import best_fixed, record, replay_row
from jaxspec.engine.engine import Engine, LoadedModel, Request

CONFIG = replace(
    mini,
    limit=3,
    max_new_tokens=24,
    gamma=3,
    batch_size=4,
    prompt_buckets=(128,),
    image_buckets=(1,),
)


@pytest.mark.parametrize(
    ("text", "weights"), [("mt-release", None), ("static", (0.05, 0.95))], ids=["learned", "given"]
)
def test_a_replay_makes_the_blocks_of_decoding(
    text: str, weights: tuple[float, float] | None, models: tuple[LoadedModel, LoadedModel]
) -> None:
    target, draft = models
    plain = Engine(target, None, CONFIG.plain())
    row = Variant("MT", ("M", "T"), weights, text)
    engine = Engine(target, draft, CONFIG.engine(row))
    prompts = prompts_of(CONFIG, plain, {"dataset": "describe", "turn": 1})
    requests = [Request(prompt, CONFIG.max_new_tokens) for prompt in prompts]
    results = engine.generate(requests)
    recording = record(engine, requests, [result.tokens for result in results])
    sums = replay_row(row, CONFIG.gamma, recording)
    assert np.asarray(sums["blocks"])[: len(requests)].tolist() == [
        result.stats.steps for result in results
    ]
    assert np.asarray(sums["tokens"])[: len(requests)].tolist() == [
        result.stats.emitted for result in results
    ]

    uniform, best = (
        replay_row(replace(row, weights=None, weighting="static"), CONFIG.gamma, recording),
        best_fixed(recording),
    )
    for loss, least in best.items():
        assert (np.asarray(least) <= np.asarray(uniform[loss]) + 1e-3).all()
    assert float(jnp.sum(best["kl"])) < float(jnp.sum(uniform["kl"]))


def test_the_note_counts_the_samples_that_a_set_has() -> None:
    losses = ("kl", "rejections", "misses", "regret_kl", "regret_rejections", "regret_misses")
    row = {"views": ["M", "T"], "row": "MT", "turn": 1, "samples": 2, "tokens": 4}
    row |= {"num_spec_steps": 2, **dict.fromkeys(losses, 0.5)}
    (table,) = regret_tables(CONFIG, [row])  # whose limit is 3
    assert table.notes[0].startswith("2 samples of each of ")


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    return LoadedModel.load(CONFIG.target), LoadedModel.load(CONFIG.draft[0])
