"""The training loop: batches read ahead, metrics, evaluations, checkpoints, exact resume on any mesh.

A checkpoint holds the state and the place in the data after the same step, so a run killed at any moment and
started again continues with the next batch and ends with the same parameters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.errors import InputError
from jaxspec.files import sole, write_text
from jaxspec.training.batches import Batch, BatchIterator, StepBatches, read_ahead
from jaxspec.training.config import RUNTIME, TrainConfig
from jaxspec.training.measured import MeasuredStep
from jaxspec.training.metrics import MetricsLog
from jaxspec.training.optimizer import make_optimizer, merge, partition, same_rates
from jaxspec.training.placement import Places, on_host, place_state, placed_on, process_share, put_batch
from jaxspec.training.preemption import Preempted, Preemption
from jaxspec.training.step import LossFn
from jaxspec.typing import Params

Evaluate = Callable[[Params], Mapping[str, float]]
"""Parameters on the host -> metrics of the half-trained model; every process calls it with the same parameters."""


def fit(
    config: TrainConfig,
    params: Params,
    loss_fn: LossFn,
    batches: BatchIterator | Callable[[int], Batch],
    directory: Path,
    *,
    places: Places | None = None,
    evaluate: Evaluate | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> Params:
    """Trains from `params`, or from the newest checkpoint in `directory`; returns the parameters, on the host.

    Args:
      params: numpy or JAX arrays; frozen ones are returned as they came.
      loss_fn: (params, batch) -> (loss, metrics), traced; see `LossFn`.
      batches: an iterator over this process's rows, or a pure function of the step that makes a whole batch.
      directory: receives `metrics.jsonl`, `train_config.json` and Orbax checkpoints.
      places: where parameters lie on the mesh; None: whole on every device.
      evaluate: called every `config.evaluate_every` steps, and after the last; its metrics are logged.
      inputs: what decides the result besides the configuration (data, models, loss), as JSON has it; by other names
        than the configuration's. Every checkpoint tells it, and a run of others is not gone on with.

    Raises:
      InputError: mesh, patterns or directory do not fit, the directory holds the state of another run, or a run that
        is not over.
      Preempted: SIGTERM, Ctrl-C or SIGHUP came; all is saved.
      Diverged: the loss is no longer a number; the newest checkpoint is from before.
    """
    mesh = config.mesh.make(config.batch)
    data: Any = batches if hasattr(batches, "get_state") else StepBatches(batches, process_share(mesh))  # pyright: ignore[reportArgumentType]
    trainable, held = partition(params, config.frozen)
    optimizer = make_optimizer(config, trainable)
    run: dict[str, Any] = json.loads(json.dumps(asdict(config) | dict(inputs or {})))
    saved = config.checkpoints or directory / "checkpoints"
    with _alone(directory), Checkpoints(saved, config.keep, run) as checkpoints:
        _claim(directory, config, run, checkpoints.newest())
        state, fixed = place_state(trainable, held, optimizer, placed_on(mesh, params, places), mesh, config.dtype)
        state, place = checkpoints.restore(state)
        if place is not None:
            data.set_state(place)
        start = int(state.step)
        if start:
            _say(f"resuming {directory} at step {start} of {config.steps}")
        step = MeasuredStep(config, loss_fn, optimizer, fixed, mesh, jax.tree.map(lambda x: x.sharding, state))
        bar = tqdm(
            total=config.steps, initial=start, unit="step", desc=directory.name, smoothing=0.1,
            disable=jax.process_index() > 0,
        )  # fmt: skip
        ahead = closing(read_ahead(data, config.steps - start, partial(put_batch, mesh=mesh)))
        with Preemption() as preemption, MetricsLog(directory, config, start) as log, bar, ahead as ready:
            for done in range(start + 1, config.steps + 1):
                asked = time.perf_counter()
                batch, place = next(ready)
                state = step(state, batch, time.perf_counter() - asked)
                last, told = done == config.steps, preemption.reached(done)
                logs, saves, evaluates = (
                    every > 0 and (last or done % every == 0)
                    for every in (config.log_every, config.save_every, config.evaluate_every)
                )
                if logs:
                    values = step.read(done)
                    log.write(done, values)
                    bar.set_postfix({k: f"{v:.3f}" for k, v in values.items() if k in ("loss", "accuracy")})
                if saves or told or evaluates:
                    with step.pause(done):
                        if evaluate and evaluates and (last or not told):
                            log.write(done, evaluate(merge(on_host(state.params), held)))
                        if saves or told:
                            checkpoints.save(done, state, place, wait=last or told)
                bar.update()
                if told and not last:
                    _say(f"{directory}: told to end; step {done} of {config.steps} is saved")
                    raise Preempted(preemption.number)
    return merge(on_host(state.params), held)


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keeps other trainings out of the directory; of several processes the first does. Raises InputError in all."""
    with ExitStack() as lock:
        refused = None
        if jax.process_index() == 0:
            try:
                lock.enter_context(sole(directory / "train.lock"))
            except InputError as error:
                refused = error
        if multihost_utils.broadcast_one_to_all(np.bool_(refused)) and refused is None:
            refused = InputError(f"{directory}: process 0 cannot train in it, and tells why")
        if refused:
            raise refused
        yield


def _claim(directory: Path, config: TrainConfig, run: dict[str, Any], saved: tuple[int, Any] | None) -> None:
    """Writes `train_config.json`, for people. Refuses to go on with what another run saved.

    Its number of steps may be another where the steps that are done would have been the same.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if saved is not None:
            done, old = saved[0], saved[1] or run
            theirs, mine = _decisive(old), _decisive(run)
            if done <= config.steps and same_rates(config, old["steps"], done):
                theirs["steps"] = config.steps
            for name in sorted(theirs.keys() | mine.keys()):
                before, now = theirs.get(name), mine.get(name)
                if before != now:
                    why = ""
                    if name == "steps" and old["steps"] < config.steps:
                        why = ", on which its learning rates depend (behind the warm-up those of final_rate 1 do not)"
                    raise InputError(
                        f"{directory}: holds a run with {name} {before!r}, and now it is {now!r}{why}; "
                        "go on with that, or train in another directory (--runs)"
                    )
        if jax.process_index() == 0:
            write_text(directory / "train_config.json", json.dumps(run, indent=1) + "\n")
    except OSError as error:
        raise InputError(f"{directory}: cannot be written: {error.strerror}; give another directory") from error


def _decisive(values: Mapping[str, Any]) -> dict[str, Any]:
    """All that may not differ when a run goes on; {a: {b: 1}} as {a.b: 1}, for messages to name what differs."""
    return dict(_leaves("", {name: value for name, value in values.items() if name not in RUNTIME}))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _leaves(f"{name}.{key}" if name else key, part)


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr)
