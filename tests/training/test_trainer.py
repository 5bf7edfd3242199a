"""The loop learns, keeps frozen parameters and rates by path, reports, and resumes to the same
bits.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoints.orbax import _json_checksum
from jaxspec.errors import Diverged, InputError
from jaxspec.models.lora import Lora
from jaxspec.training.config import MeshConfig, TrainConfig
from jaxspec.training.head_batches import Anchoring
from jaxspec.training.loop.metrics import MetricsLog
from jaxspec.training.loop.step import make_optimizer, make_schedule
from jaxspec.training.loop.trainer import fit
from jaxspec.training.losses import mean_of_rows
from jaxspec.training.objectives import Distillation
from jaxspec.training.recipes import StagedRecipe
from tests.tiny import training
from tests.tiny.disk import full_disk
from tests.tiny.training import metrics as log

STAGE = TrainConfig(
    steps=6,
    batch=8,
    learning_rate=0.1,
    warmup=1,
    save_every=2,
    log_every=1,
    frozen=("frozen",),
    mesh=MeshConfig(1),
)


def params():
    return {"line": {"kernel": jnp.zeros((3, 1))}, "frozen": {"kernel": jnp.ones((2, 2))}}


def batches(step):
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    return {"x": x, "y": x @ np.asarray([[1.0], [-2.0], [0.5]], np.float32)}


@mean_of_rows
def loss_fn(params, batch):
    loss = (
        jnp.mean((batch["x"] @ params["line"]["kernel"] - batch["y"]) ** 2)
        * params["frozen"]["kernel"].mean()
    )
    return loss, {"loss": loss}


def dies_at(last):
    def batch(step):
        if step == last:
            raise KeyboardInterrupt
        return batches(step)

    return batch


def test_learns_freezes_and_logs(tmp_path):
    trained = fit(replace(STAGE, steps=60), params(), loss_fn, batches, tmp_path)
    np.testing.assert_array_equal(trained["frozen"]["kernel"], np.ones((2, 2)))
    losses = training.losses(tmp_path)
    assert len(losses) == 60
    assert losses[-1] < 0.1 * losses[0]


def test_a_run_goes_on_with_the_batches_of_its_next_steps(tmp_path):
    """A run that has read ahead of its last checkpoint goes on with the batches of its next steps.
    Checkpoints of older releases also hold a position.
    """
    straight = fit(STAGE, params(), loss_fn, batches, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, params(), loss_fn, dies_at(5), tmp_path / "cut")
    files = [*(tmp_path / "cut" / "checkpoints").glob("*/data/metadata")]
    assert files
    for file in files:
        saved = json.loads(file.read_text())
        del saved["sum"]
        saved["processes"] = [{"next_index": int(file.parts[-3])}]
        file.write_text(json.dumps(saved | {"sum": _json_checksum(saved)}))
    seen = []
    ended = fit(
        STAGE, params(), loss_fn, lambda step: seen.append(step) or batches(step), tmp_path / "cut"
    )
    assert seen == list(range(seen[0], 6))
    assert seen[0] in (2, 4)
    np.testing.assert_array_equal(ended["line"]["kernel"], straight["line"]["kernel"])


OPTIONS = {
    "lion": {"optimizer": "lion", "schedule": "linear", "rates": (("line", 0.5),)},
    "muon": {"optimizer": "muon", "schedule": "wsd", "ema": 0.9, "accumulate": 2},
    "adamw": {"schedule": "constant", "ema": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_optimisers_schedules_and_averages_go_on_to_the_same_bits(name, tmp_path):
    stage = replace(STAGE, **OPTIONS[name])
    straight = fit(stage, params(), loss_fn, batches, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fit(stage, params(), loss_fn, dies_at(4), tmp_path / "cut")
    ended = fit(stage, params(), loss_fn, batches, tmp_path / "cut")
    np.testing.assert_array_equal(ended["line"]["kernel"], straight["line"]["kernel"])
    with pytest.raises(InputError, match=f"holds a run with .* '?{re.escape(name)}|ema|schedule"):
        fit(STAGE, params(), loss_fn, batches, tmp_path / "cut")


def test_schedules():
    """Schedules warm up, stay or decay to the final rate; `wsd` stays at the peak until its last
    fifth.
    """
    stage = TrainConfig(steps=20, batch=1, learning_rate=1.0, warmup=4, final_rate=0.5)
    rates = {
        name: [float(make_schedule(replace(stage, schedule=name))(step)) for step in (2, 4, 12, 20)]
        for name in ("cosine", "linear", "constant", "wsd")
    }
    assert rates == {
        "cosine": pytest.approx([0.5, 1, 0.75, 0.5]),
        "linear": pytest.approx([0.5, 1, 0.75, 0.5]),
        "constant": pytest.approx([0.5, 1, 1, 1]),
        "wsd": pytest.approx([0.5, 1, 1, 0.5]),
    }
    assert float(make_schedule(replace(stage, schedule="wsd"))(18)) == pytest.approx(0.75)


def test_muon_takes_matrices_that_have_no_row_for_each_token():
    paths = {"head/mlp/weight": 2, "head/norm/scale": 1, "embed_tokens/embedding": 2}
    trainable = {path: jnp.zeros((4,) * dims) for path, dims in paths.items()}
    state = make_optimizer(replace(STAGE, optimizer="muon"), trainable).init(trainable)
    (first, *_) = [
        part for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "ns_coeffs"))
        if hasattr(part, "ns_coeffs")
    ]  # fmt: skip
    assert [path for path, leaf in first.mu.items() if hasattr(leaf, "shape")] == [
        "head/mlp/weight"
    ]


def test_an_average_follows_the_parameters(tmp_path):
    """An average follows the parameters, avg = d avg + (1 - d) params after each step, and is what
    is evaluated and returned.
    """
    seen, stage = [], replace(STAGE, evaluate_every=1)

    def evaluate(params):
        seen.append(params["line"]["kernel"])
        return {}

    fit(stage, params(), loss_fn, batches, tmp_path / "plain", evaluate=evaluate)
    average = np.zeros((3, 1), np.float32)
    for step in seen:
        average = 0.75 * average + 0.25 * step
    ended = fit(replace(stage, ema=0.75), params(), loss_fn, batches, tmp_path / "averaged")
    np.testing.assert_allclose(ended["line"]["kernel"], average, rtol=1e-5)


def test_steps_are_traced_and_time_is_accounted_for(tmp_path):
    stage = replace(STAGE, profile="3:4")
    fit(stage, params(), loss_fn, batches, tmp_path)
    assert len([*tmp_path.glob("profile/plugins/profile/*/*.xplane.pb")]) == 1
    last = log(tmp_path)[-1]
    assert 0 < last["goodput"] < 1
    assert last["compile_s"] > 0
    assert last["save_s"] > 0
    assert last["evaluate_s"] == 0


def test_rates_by_path(tmp_path):
    """Rates follow the first pattern that a path matches: AdamW's first step is the rate itself,
    whatever the gradient.
    """
    start = {part: {"kernel": np.zeros((3, 1), np.float32)} for part in ("fast", "slow", "still")}

    @mean_of_rows
    def loss(params, batch):
        kernel = params["fast"]["kernel"] + params["slow"]["kernel"] + params["still"]["kernel"]
        value = jnp.mean((batch["x"] @ kernel - batch["y"]) ** 2)
        return value, {"loss": value}

    stage = replace(
        STAGE, steps=1, rates=(("slow", 0.2), ("s", 7.0)), frozen=("still",), weight_decay=0.0
    )
    stage = replace(stage, warmup=0)
    moved = {
        part: np.abs(leaf["kernel"])
        for part, leaf in fit(stage, start, loss, batches, tmp_path).items()
    }
    np.testing.assert_allclose(moved["fast"], 0.1, rtol=1e-4)
    np.testing.assert_allclose(moved["slow"], 0.02, rtol=1e-4)
    assert not moved["still"].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frozen": ("tower",)}, "frozen: 'tower' matches no parameter; known: frozen, line"),
        ({"rates": (("head", 2.0),)}, "rates: 'head' matches no parameter; known: line"),
        ({"tensorboard": True}, "tensorboard: tensorboardX is not installed"),
        ({"clip": 0.0}, "clip: 0 leaves no gradient; give a number above 0"),
        ({"frozen": ("[a",)}, r"frozen: '\[a' is no regular expression \(.*\); mend it"),
        ({"profile": "7:9"}, "profile: '7:9' begins after step 6, the last; give earlier"),
        ({"rates": (("*", 1.0),)}, r"rates: '\*' is no regular expression"),
    ],
)
def test_what_does_not_fit_is_refused(change, message, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # as if it were not installed
    with pytest.raises(InputError, match=message):
        fit(replace(STAGE, **change), params(), loss_fn, batches, tmp_path)


def test_a_run_goes_on_in_parts(tmp_path):
    """A run goes on in parts, as on fewer devices, with the same losses and parameters."""
    straight = fit(STAGE, params(), loss_fn, batches, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, params(), loss_fn, dies_at(4), tmp_path / "cut")
    ended = fit(replace(STAGE, accumulate=4), params(), loss_fn, batches, tmp_path / "cut")
    np.testing.assert_allclose(ended["line"]["kernel"], straight["line"]["kernel"], rtol=1e-5)
    for a, b in zip(log(tmp_path / "straight"), log(tmp_path / "cut"), strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]))


@pytest.mark.full
def test_bfloat16_computes_and_float32_remembers(tmp_path):
    """bfloat16 computes and float32 remembers: updates of a thousandth of the weight would be lost
    in bfloat16.
    """
    seen = set()

    @mean_of_rows
    def loss(params, batch):
        seen.update(leaf.dtype.name for leaf in jax.tree.leaves(params))
        value = (
            jnp.mean(batch["x"] @ params["line"]["kernel"].astype(jnp.float32))
            * params["frozen"]["kernel"][0, 0]
        )
        return value, {"loss": value}

    start = {"line": {"kernel": np.ones((3, 1), np.float32)}, "frozen": params()["frozen"]}
    stage = replace(STAGE, dtype="bfloat16", learning_rate=1e-3, weight_decay=0.0)
    ended = fit(stage, start, loss, lambda step: {"x": np.ones((8, 3), np.float32)}, tmp_path)
    assert seen == {"bfloat16"}
    moved = ended["line"]["kernel"] - 1
    assert ended["line"]["kernel"].dtype == np.float32
    assert (moved < -1e-3).all()
    assert (moved > -6e-3).all()


def test_no_process_waits_for_the_first_where_its_log_cannot_begin(tmp_path, monkeypatch):
    """Where the log of the first process cannot begin, the error is raised in all processes."""
    errors = []

    def in_the_first(work):
        with pytest.raises(InputError) as error:
            work()
        errors.append(str(error.value))

    monkeypatch.setattr("jaxspec.training.loop.metrics.on_first", in_the_first)
    monkeypatch.setitem(sys.modules, "wandb", None)
    MetricsLog(tmp_path, replace(STAGE, wandb="project"), 0)
    assert "wandb: wandb is not installed" in errors[0]


def test_a_run_of_weights_and_biases_goes_on_under_its_own_id(tmp_path, monkeypatch):
    """A run of Weights & Biases goes on under its own id, wherever its folder is moved; another run
    at the same path has another id. A run of an older release goes on under its path.
    """
    ids = []
    board = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    wandb = SimpleNamespace(init=lambda **options: ids.append(options["id"]) or board)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run, moved = tmp_path / "run", tmp_path / "moved"
    stage = replace(STAGE, wandb="project")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(stage, params(), loss_fn, dies_at(5), run)
        run.rename(run if moved.exists() else moved)
    for directory in (moved, run):
        fit(stage, params(), loss_fn, batches, directory)
    (run / "checkpoints" / "wandb_id").unlink()
    fit(stage, params(), loss_fn, batches, run)
    first, second, *later, old = ids
    assert first != second
    assert later == [first, second]
    assert old == run.as_posix().strip("/").replace("/", "-")[-64:]


def test_a_mesh_that_leaves_devices_out_is_named(tmp_path, capsys):
    stage = replace(STAGE, steps=1, mesh=MeshConfig())
    fit(stage, params(), loss_fn, batches, tmp_path / "all")
    assert "devices" not in capsys.readouterr().err
    fit(replace(stage, accumulate=2), params(), loss_fn, batches, tmp_path / "half")
    assert "half: 4 of 8 devices train, because copies must divide both" in capsys.readouterr().err


@pytest.mark.full
def test_reports(tmp_path):
    """Every line of a report has speeds except the first, whose step was compiled; TensorBoard has
    the same.
    """
    asked = []

    def evaluate(params):
        asked.append(params["line"]["kernel"].copy())
        return {"held_out": float(len(asked))}

    stage = replace(STAGE, evaluate_every=4, tensorboard=True)
    ended = fit(stage, params(), loss_fn, batches, tmp_path, evaluate=evaluate)
    # after 4 and the last
    assert [line["held_out"] for line in log(tmp_path) if "held_out" in line] == [1.0, 2.0]
    np.testing.assert_array_equal(asked[-1], ended["line"]["kernel"])
    first, *others = [line for line in log(tmp_path) if "loss" in line]
    always = {"loss", "grad_norm", "learning_rate", "step"}
    assert first.keys() == always
    for line in others:
        speeds = {"step_ms", "samples_per_second", "model_flops_per_second", "data_wait"}
        speeds |= {"goodput", "compile_s", "data_s", "save_s", "evaluate_s"}
        assert line.keys() == always | speeds  # no `mfu` of a CPU
        assert 0 <= line["data_wait"] <= 1
        assert line["samples_per_second"] == pytest.approx(8e3 / line["step_ms"])
        # 8 rows, 3 trained weights and 4 frozen ones.
        assert line["model_flops_per_second"] == pytest.approx(
            8 * (6 * 3 + 2 * 4) * 1e3 / line["step_ms"]
        )
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()]


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(tmp_path):
    def poisoned(step):
        return {name: value * (np.nan if step == 2 else 1) for name, value in batches(step).items()}

    with pytest.raises(Diverged, match="step 3: loss is nan; lower the learning rate"):
        fit(STAGE, params(), loss_fn, poisoned, tmp_path)
    assert sorted(
        path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()
    ) == ["2"]


def test_parameters_that_are_not_finite_end_the_run_before_they_are_saved(tmp_path):
    """Parameters that are not finite end the run before they are saved, though the loss and the
    gradient of the step before are finite.
    """
    stage = replace(
        STAGE, steps=2, warmup=0, learning_rate=1e30, rates=((".*", 1e30),), save_every=1
    )
    with pytest.raises(Diverged, match=r"step 1: params/line/kernel is not finite; lower the lear"):
        fit(stage, params(), loss_fn, batches, tmp_path)
    assert not [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            (partial(replace, STAGE), name)
            for name in ("learning_rate", "final_rate", "beta2", "weight_decay", "clip")
        ),
        *((partial(replace, STAGE), name) for name in ("warmup", "evaluate_every")),
        (lambda rates: replace(STAGE, rates=(("line", rates),)), "rates"),
        (Distillation, "share"),
        (partial(Anchoring, anchors=3), "decay"),
        (Lora, "alpha"),
        (partial(StagedRecipe, target="", stages=(), buckets=()), "unlearned"),
    ],
)
def test_numbers_are_checked_where_they_are_taken(kind, name):
    for value in (math.nan, math.inf, 1e39, -1.0):
        with pytest.raises(InputError, match=rf"^{name}.*: {re.escape(str(value))}; give a number"):
            kind(**{name: value})


@pytest.mark.full
def test_a_run_of_constant_rates_goes_on_for_more_steps(tmp_path):
    stage = replace(STAGE, final_rate=1.0)
    straight = fit(stage, params(), loss_fn, batches, tmp_path / "straight")
    fit(replace(stage, steps=4), params(), loss_fn, batches, tmp_path / "short")
    seen = []
    longer = fit(
        replace(stage, profile="5:6"),
        params(),
        loss_fn,
        lambda step: seen.append(step) or batches(step),
        tmp_path / "short",
    )
    assert seen == [4, 5]
    np.testing.assert_array_equal(longer["line"]["kernel"], straight["line"]["kernel"])
    with pytest.raises(InputError, match="a run with steps 6, but now it is 5; go on"):
        fit(replace(stage, steps=5), params(), loss_fn, batches, tmp_path / "short")


def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path):
    """A run whose checkpoints are gone is not begun anew: its metrics stay, and the line names the
    folder that it saved in.
    """
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, params(), loss_fn, dies_at(5), run)
    before = log(run)
    moved = replace(STAGE, checkpoints=str(tmp_path / "elsewhere"))
    line = f"elsewhere: no checkpoint, but the run of {run} saved in {run}/checkpoints and reached"
    with pytest.raises(InputError, match=line):
        fit(moved, params(), loss_fn, batches, run)
    assert log(run) == before
    fit(STAGE, params(), loss_fn, batches, run)
    assert [row["step"] for row in log(run)] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, caplog):
    kernel = np.random.default_rng(0).normal(size=(3, 20_000)).astype(np.float32)
    start = {"line": {"kernel": kernel}, "frozen": params()["frozen"]}
    straight = fit(STAGE, start, loss_fn, batches, tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        fit(STAGE, start, loss_fn, dies_at(3), tmp_path / "cut")
    with pytest.raises(InputError) as refused, full_disk():
        fit(STAGE, start, loss_fn, batches, tmp_path / "cut")
    line = str(refused.value)
    assert "\n" not in line
    assert f"{tmp_path}/cut/checkpoints: cannot be written: File too large" in line
    assert "step 2 is whole" in line
    assert not caplog.records  # Orbax's threads print what they raise, with tracebacks
    given = []
    ended = fit(
        STAGE, start, loss_fn, lambda step: given.append(step) or batches(step), tmp_path / "cut"
    )
    assert given == [2, 3, 4, 5]
    np.testing.assert_array_equal(ended["line"]["kernel"], straight["line"]["kernel"])


def test_two_trainings_of_one_directory(tmp_path):
    """The second of two trainings of one directory is refused, and does no harm to the first."""
    refused = []

    def again(step):
        if step == 4:
            with pytest.raises(InputError) as refusal:
                fit(STAGE, params(), loss_fn, batches, tmp_path)
            refused.append(str(refusal.value))
        return batches(step)

    fit(STAGE, params(), loss_fn, again, tmp_path)
    assert len(refused) == 1
    assert (
        f"{tmp_path}/train.lock: held by process {os.getpid()} on {socket.gethostname()};"
        in refused[0]
    )
    assert [line["step"] for line in log(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints",
        "metrics.jsonl",
        "train_config.json",
    }
