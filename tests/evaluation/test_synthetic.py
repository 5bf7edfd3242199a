"""In synthetic models a draft is right as often as was asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from configs.latency import mini
from eval.lib.standins import synthetic
from eval.lib.standins.synthetic import RESERVED, follow_cycle, synthetic_model
from jaxspec.engine.engine import Engine, EngineConfig, Request
from jaxspec.models.families import build
from tests.tiny import lvlm

NEW = 13


def test_a_pair_follows_its_cycle() -> None:
    """Target and draft say the same after the tokens that the draft knows, and the cycle never
    ends.
    """
    said = []
    for width, right in ((128, 1.0), (64, 0.7)):
        # Weights of 0.11 disturb a stream of width 128 as much as those of 0.02 one of 4,096.
        model, params = lvlm(width, 1, seed=0, scale=0.11, vocabulary=RESERVED + 200)
        decoder = {"params": follow_cycle(model.config, params, right)["language_model"]}
        tokens = jnp.arange(RESERVED + 199)[:, None]  # each alone
        said.append(np.asarray(jax.jit(build(model.text).apply)(decoder, tokens)).argmax(-1)[:, 0])
    assert sorted(said[0][RESERVED:].tolist()) == list(range(RESERVED, RESERVED + 199))
    assert set(said[0]) <= set(said[0][RESERVED:])  # other tokens lead into the cycle
    assert 0.6 < np.mean(said[0] == said[1]) < 0.8


def test_a_pair_agrees_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "load_preset", lambda kind, name: mini.config)
    names = "synthetic:target", "synthetic:draft:1"
    target, draft = (synthetic_model(name, jnp.dtype("float32")) for name in names)
    engine = Engine(target, draft, EngineConfig(gamma=3, prompt_buckets=(64,), new_buckets=(16,)))
    prompt = engine.encoder.prompt("What is this?", [Image.new("RGB", (48, 48))])
    (result,) = engine.generate([Request(prompt, NEW)])
    assert len(set(result.tokens)) == NEW  # a cycle, from whatever the prompt ends in
    assert result.stats.emitted / result.stats.steps == 4
