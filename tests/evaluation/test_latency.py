"""Counts from shapes, forced and planted acceptance, and the sweep over a tiny pair."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import init_cache
from jaxspec.config import LlavaConfig
from jaxspec.evaluation.forced import accepted_pattern
from jaxspec.evaluation.latency import (
    LatencyConfig,
    Pair,
    measure_forced,
    measure_images,
    measure_mixtures,
    measure_passes,
    random_params,
)
from jaxspec.evaluation.latency_report import latency_tables
from jaxspec.evaluation.limits import Limits, pass_work
from jaxspec.evaluation.planted import RESERVED, plant
from jaxspec.models import LanguageModel, build
from jaxspec.presets import load_preset, preset_names
from tests.tiny import lvlm

FLOAT = jnp.dtype("float32")
LIMITS = Limits(10.0, 10.0, 0.1)


def config() -> LlavaConfig:
    found = lvlm(16, 1, seed=0)[0].config
    assert isinstance(found, LlavaConfig)
    return found


def test_work_is_what_xla_counts() -> None:
    """Products of matrices are nearly all that a pass of some width does."""
    text = replace(config().text_config, vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=2)
    model, params = LanguageModel(text), random_params(text, FLOAT)
    batch, tokens, slots = 2, 3, 64
    cache = init_cache(text, batch, slots, FLOAT)
    fed = jnp.ones((batch, tokens), jnp.int32)
    counted = jax.jit(model.extend).lower(params, fed, cache).compile().cost_analysis()
    work = pass_work(text, 4, batch, tokens, slots)
    assert counted is not None
    assert work.flops == pytest.approx(counted["flops"], rel=0.05)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["model"]["embed_tokens"]["embedding"].nbytes
    assert work.bytes == weights + sum(leaf.nbytes for leaf in (*cache.k, *cache.v))


@pytest.mark.parametrize(("tau", "gamma"), [(1.0, 5), (2.29, 5), (3.0, 5), (6.0, 5), (1.5, 1)])
def test_a_pattern_has_its_block_efficiency(tau: float, gamma: int) -> None:
    pattern = accepted_pattern(tau, gamma)
    assert np.mean(pattern) + 1 == pytest.approx(tau)
    assert set(pattern) <= {min(pattern), min(pattern) + 1}
    assert max(pattern) <= gamma


def test_a_pattern_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to gamma"):
        accepted_pattern(7.0, 5)


def test_a_planted_pair_follows_its_cycle() -> None:
    """Target and draft say the same after the tokens that the draft knows, and the cycle never ends."""
    said = []
    for width, right in ((128, 1.0), (64, 0.7)):
        model, params = lvlm(width, 1, seed=0, scale=0.02, vocabulary=RESERVED + 200)
        decoder = {"params": plant(model.config, params, right)["language_model"]}  # type: ignore[arg-type]
        tokens = jnp.arange(RESERVED + 199)[:, None]  # each alone
        said.append(np.asarray(jnp.argmax(jnp.asarray(build(model.text).apply(decoder, tokens)), axis=-1))[:, 0])
    assert sorted(said[0][RESERVED:].tolist()) == list(range(RESERVED, RESERVED + 199))
    assert set(said[0]) <= set(said[0][RESERVED:])  # other tokens lead into the cycle
    assert 0.6 < np.mean(said[0] == said[1]) < 0.8


@pytest.mark.parametrize("name", preset_names("latency"))
def test_presets_are_pairs_of_one_vocabulary(name: str) -> None:
    preset: LatencyConfig = load_preset("latency", name)
    assert preset.target.text_config.vocab_size == preset.draft.text_config.vocab_size  # type: ignore[union-attr]


def test_the_sweep_over_a_tiny_pair() -> None:
    # All passes have the shapes of the loop's, and target and draft are alike: few programs are compiled.
    tiny = LatencyConfig(
        config(), config(), "float32", shapes=((1, 15),), gammas=(2,), views=(1,), images=(1,), prompt=4, gamma=2,
        forced=(2.0,), context=6, new=9, repeats=1,
    )  # fmt: skip
    pair = Pair(tiny)
    (forced,) = measure_forced(pair)
    assert forced["mean_acceptance_length"] == 2.0  # (9 - 1) tokens of 4 blocks
    mixtures = measure_mixtures(Pair(replace(tiny, views=(1, 2))), ["em:window=4"])
    assert [row["state_bytes"] for row in mixtures] == [4, 8, 4 * (2 + 2 + 1 + 4 * 2)]  # weights; and seen and a ring
    rows = [*measure_passes(pair, LIMITS), *measure_images(pair), forced, *mixtures]
    titles = [title for title, *_ in latency_tables("tiny", rows, LIMITS)]
    assert titles == [
        "Passes of tiny",
        "Images before the first token, tiny",
        "Loops at forced acceptance, tiny",
        "Blocks by views and weighting, tiny",
    ]
    assert all(value > 0 for row in rows for name, value in row.items() if name in ("target_ms", "target_prefill_ms"))


def test_what_a_slot_costs_is_told() -> None:
    shared = {"kind": "passes", "batch": 1, "draft_ms": {}, "effective_gbps": 1.0}
    shared |= dict.fromkeys(("copy_share", "read_share", "matmul_share"), 0.5)
    rows = [
        shared | {"slots": slots, "target_ms": 10 + 0.002 * slots, "verify_ms": {"5": 12 + 0.004 * slots}}
        for slots in (100, 700, 2000)
    ]
    ((_, _, _, notes),) = latency_tables("made up", rows, LIMITS)
    assert notes[-1] == (
        "A slot of 100 to 2000 costs a batch of 1 2 us in a pass over 1 (at most 0 % off), "
        "4 us in a pass over 6 (at most 0 % off)."
    )
    assert len(latency_tables("made up", rows[:2], LIMITS)[0][3]) == len(notes) - 1
