"""A half-trained draft in the engine: what the finished one would give, without compiling anew."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxspec import Engine, EngineConfig, LoadedModel, Request
from jaxspec.training.held_out import HeldOut
from tests import tiny


def test_it_is_what_the_engine_gives(tmp_path):
    target, draft = (LoadedModel.load(path) for path in tiny.save_pair(tmp_path))
    config = EngineConfig(gamma=3)
    engine = Engine(target, draft, config)
    page = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    requests = tuple(Request(engine.encoder.prompt(text, [page]), 12) for text in ("Hi", "What is this?"))
    held_out = HeldOut(target, LoadedModel(draft.config, {}, draft.tokenizer, draft.image_processor), requests, config)
    params = jax.device_get(draft.params)

    stats = [result.stats for result in engine.generate(requests)]
    emitted, steps = (sum(getattr(row, name) for row in stats) for name in ("emitted", "steps"))
    found = held_out(params)
    assert found["mean_acceptance_length"] == pytest.approx(emitted / steps)
    accepted, drafted = (sum(getattr(row, name).sum() for row in stats) for name in ("accepted_at", "drafted_at"))
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / drafted)

    worse = params | {"language_model": tiny.noisy(params["language_model"], 3.0)}
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    worse = held_out(worse)
    assert not [event for event in compiled if "backend_compile" in event]
    assert worse["mean_acceptance_length"] < found["mean_acceptance_length"]
