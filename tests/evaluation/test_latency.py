"""Counts follow from shapes, acceptance can be forced, and the sweep runs over a tiny pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

from eval.lib.standins.synthetic import random_params
from eval.lib.times.figures import draw_inference_times, inference_times
from eval.lib.times.forced import accepted_pattern, measure_forced
from eval.lib.times.passes import interleaved, pass_work
from eval.lib.times.random_pair import (
    LatencyConfig,
    Pair,
    count_flops,
    measure_images,
    measure_mixtures,
    measure_passes,
)
from eval.lib.times.tables import latency_tables
from jaxspec.cache import init_cache
from jaxspec.command import load_preset
from jaxspec.config import LlavaConfig
from jaxspec.models.language_model import LanguageModel
from tests.tiny import lvlm

FLOAT = jnp.dtype("float32")


def config() -> LlavaConfig:
    found = lvlm(16, 1, seed=0)[0].config
    assert isinstance(found, LlavaConfig)
    return found


def test_work_is_what_xla_counts() -> None:
    """The work that is counted for a pass, nearly all of it products of matrices, is what XLA
    counts.
    """
    text = replace(
        config().text_config,
        vocab_size=512,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
    )
    model, params = LanguageModel(text), random_params(text, FLOAT)
    batch, tokens, slots = 2, 4, 64  # eight rows, which are multiplied as they are
    cache = init_cache(text, batch, slots, FLOAT)
    fed = jnp.ones((batch, tokens), jnp.int32)
    counted = jax.jit(model.extend).lower(params, fed, cache).compile().cost_analysis()
    work = pass_work(text, 4, batch, tokens, slots)
    assert counted is not None
    assert work.flops == pytest.approx(counted["flops"], rel=0.05)
    weights = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        - params["model"]["embed_tokens"]["embedding"].nbytes
    )
    assert work.bytes == weights + sum(leaf.nbytes for leaf in (*cache.k, *cache.v))


@pytest.mark.parametrize(("tau", "gamma"), [(1.0, 5), (2.29, 5), (3.0, 5), (6.0, 5), (1.5, 1)])
def test_a_pattern_has_its_block_efficiency(tau: float, gamma: int) -> None:
    pattern = accepted_pattern(tau, gamma)
    assert np.mean(pattern) + 1 == pytest.approx(tau)
    assert set(pattern) <= {min(pattern), min(pattern) + 1}
    assert max(pattern) <= gamma


def test_operations_are_those_that_the_paper_prints() -> None:
    """Operations are those that TABED's Table 14 prints: 66.08 GFLOPs of the 7B, which are five
    tokens'; 0.09 of the 68M, and 0.17 with two views.
    """
    preset: LatencyConfig = load_preset("latency", "llava7b_68m")
    rows = count_flops(preset)
    found = {
        (row["model"], row["views"], row["tokens"]): round(row["weights_gflops"], 2) for row in rows
    }
    assert found["target", 1, 5] == 66.08
    assert (found["draft", 1, 1], found["draft", 2, 1]) == (0.09, 0.17)
    ((title, _, cells, notes),) = latency_tables("pair", rows, preset.papers)
    assert title == "Operations of pair"
    assert cells[1][:4] == ["target", "1", "5", "66.08"]
    assert notes[-1].startswith("paper: TABED, Table 14: 66.08")


@pytest.mark.full
def test_the_sweep_over_a_tiny_pair() -> None:
    # All passes have the shapes of the loop's, and target and draft are alike: few programs are
    # compiled.
    tiny = LatencyConfig(
        config(),
        config(),
        "float32",
        shapes=((1, 15),),
        gammas=(2,),
        views=(1,),
        images=(1,),
        prompt=4,
        gamma=2,
        forced=(2.0,),
        context=6,
        new=9,
        repeats=1,
        probe_megabytes=1,
        probe_side=32,
    )
    pair = Pair(tiny)
    (forced,) = measure_forced(pair)
    assert forced["tokens_per_pass"] == 2.0  # (9 - 1) tokens of 4 blocks
    mixtures = measure_mixtures(Pair(replace(tiny, views=(1, 2))), ["inverse_error_power:window=4"])
    # weights; and seen and a ring
    assert [row["state_bytes"] for row in mixtures] == [4, 8, 4 * (2 + 2 + 1 + 4 * 2)]
    (images,) = measure_images(pair)
    assert images["answer"] == 9
    rows = [*measure_passes(pair, *tiny.shapes[0]), images, forced, *mixtures]
    titles = [title for title, *_ in latency_tables("tiny", rows)]
    assert titles == [
        "Passes of tiny",
        "Answers by images of the prompt, tiny",
        "Loops at forced acceptance, tiny",
        "Blocks by views and weighting, tiny",
    ]
    assert all(
        value > 0
        for row in rows
        for name, value in row.items()
        if name in ("target_ms", "target_prefill_ms", "target_decoding_ms")
    )


def test_stages_are_stacked_by_images(tmp_path: Path) -> None:
    """Stages are stacked by images as in TABED's Figure 9: bars of tower, prefill and decoding,
    which end at their sum.
    """
    pytest.importorskip("matplotlib")
    times = {"target_tower_ms": 10.0, "target_prefill_ms": 40.0, "target_decoding_ms": 950.0}
    rows = [{"kind": "images", "images": n, "answer": 128} | times for n in (1, 2, 5)]
    text = {"kind": "images", "images": 0, "answer": 128} | times | {"target_tower_ms": None}
    (axis,) = inference_times(rows).axes
    tops = [bar.get_y() + bar.get_height() for bar in axis.patches]
    assert tops == pytest.approx([0.01] * 3 + [0.05] * 3 + [1.0] * 3)
    draw_inference_times([text, *rows], tmp_path, "pair")
    assert {file.name for file in tmp_path.iterdir()} == {
        "inference_times.png",
        "inference_times.svg",
    }


def test_engines_take_turns_in_either_order() -> None:
    """Engines take turns in either order, and answers and rates are of their engines."""
    order = []

    def engine(name: str, ms: float) -> SimpleNamespace:
        def generate(requests: list[str]) -> list[SimpleNamespace]:
            order.append(name)
            stats = SimpleNamespace(emitted=4)
            answer = {"text": name, "tokens": (1,) * 5, "stats": stats, "batch": 1}
            return [SimpleNamespace(**answer, decode_ms=ms, prefill_ms=ms)] * len(requests)

        return SimpleNamespace(generate=generate)

    engines, requests = [engine("a", 10), engine("b", 20), engine("c", 40)], ["?"] * 2
    answers, rates = interleaved(engines, requests, 3, tqdm(disable=True))  # type: ignore[arg-type]
    assert "".join(order) == "abccbaabc"
    assert [[answer.text for answer in each] for each in answers] == [
        ["a"] * 2,
        ["b"] * 2,
        ["c"] * 2,
    ]
    np.testing.assert_allclose(rates.loop, [[400] * 3, [200] * 3, [100] * 3])
    np.testing.assert_allclose(rates.call, [[250] * 3, [125] * 3, [62.5] * 3])
