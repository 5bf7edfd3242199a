"""The loop: it learns, leaves frozen parameters alone, and resumes to the same bits."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.training.losses import next_token_loss
from jaxspec.training.trainer import TrainConfig, fit

STAGE = TrainConfig(steps=6, batch=8, learning_rate=0.1, warmup=1, save_every=2, log_every=1, frozen=("frozen",))


def params():
    return {"line": {"kernel": jnp.zeros((3, 1))}, "frozen": {"kernel": jnp.ones((2, 2))}}


def batches(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.asarray([[1.0], [-2.0], [0.5]], np.float32)}


def loss_fn(params, batch):
    loss = jnp.mean((batch["x"] @ params["line"]["kernel"] - batch["y"]) ** 2) * params["frozen"]["kernel"].mean()
    return loss, {"loss": loss}


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_interrupted_run_ends_like_an_uninterrupted_one(tmp_path):
    straight = fit(STAGE, params(), loss_fn, batches, tmp_path / "straight")
    steps = []

    def dies_at_four(step):
        steps.append(step)
        if step == 4:
            raise KeyboardInterrupt
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, params(), loss_fn, dies_at_four, tmp_path / "cut")
    seen = []
    resumed = fit(STAGE, params(), loss_fn, lambda step: seen.append(step) or batches(step), tmp_path / "cut")
    assert min(seen) in (2, 4)  # from a checkpoint, not from the start
    for a, b in zip(leaves(straight), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_finished_run_trains_no_further(tmp_path):
    first = fit(STAGE, params(), loss_fn, batches, tmp_path)
    again = fit(STAGE, params(), loss_fn, lambda step: pytest.fail("asked for data"), tmp_path)
    for a, b in zip(leaves(first), leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_learns_freezes_and_logs(tmp_path):
    trained = fit(replace(STAGE, steps=60), params(), loss_fn, batches, tmp_path)
    np.testing.assert_array_equal(trained["frozen"]["kernel"], np.ones((2, 2)))
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == list(range(1, 61))
    assert log[-1]["loss"] < 0.1 * log[0]["loss"]


def test_next_token_loss_counts_the_masked_tokens_only():
    rng = np.random.default_rng(0)
    logits, tokens = rng.normal(size=(2, 5, 7)), rng.integers(0, 7, (2, 5))
    mask = np.zeros((2, 5), bool)
    mask[0, 2] = mask[1, 4] = True
    loss, metrics = next_token_loss(jnp.asarray(logits), jnp.asarray(tokens), jnp.asarray(mask))
    picks = [(0, 1, tokens[0, 2]), (1, 3, tokens[1, 4])]
    expected = [np.log(np.exp(logits[b, t]).sum()) - logits[b, t, label] for b, t, label in picks]
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)
    hits = [logits[b, t].argmax() == label for b, t, label in picks]
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(hits))
