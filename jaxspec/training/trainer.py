"""The training loop: batches read ahead, metrics, evaluations, checkpoints, exact resume on any mesh.

A checkpoint holds the state and the place in the data after the same step, so a run killed at any moment and
started again continues with the next batch and ends with the same parameters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.training.batches import BatchIterator, StepBatches, process_share, read_ahead
from jaxspec.training.config import TrainConfig
from jaxspec.training.lease import Lease, on_first_alone
from jaxspec.training.measured import MeasuredStep
from jaxspec.training.metrics import MetricsLog
from jaxspec.training.preemption import Preempted, Preemption
from jaxspec.training.signatures import claim, run_signature
from jaxspec.training.step import (
    LossFn,
    Places,
    make_optimizer,
    merge,
    on_host,
    partition,
    place_state,
    placed_on,
)
from jaxspec.typing import Params

Evaluate = Callable[[Params], Mapping[str, float]]
"""Parameters on the host -> metrics of the half-trained model; every process calls it with the same parameters."""


def fit(
    config: TrainConfig,
    params: Params,
    loss_fn: LossFn,
    batches: BatchIterator | Callable[[int], Any],
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
    data: Any = batches
    if not hasattr(batches, "get_state"):
        data = StepBatches(batches, process_share(mesh))  # pyright: ignore[reportArgumentType]
    trainable, frozen = partition(params, config.frozen)
    optimizer = make_optimizer(config, trainable)
    run = run_signature(config, dict(inputs or {}))
    leases = [Lease(directory / "train.lock")]
    if config.checkpoints:
        leases.append(Lease(f"{config.checkpoints.rstrip('/')}.lock"))
    with (
        on_first_alone(*leases),
        Checkpoints(
            config.checkpoints or directory / "checkpoints", config.keep, run
        ) as checkpoints,
    ):
        claim(directory, config, run, checkpoints.newest())
        state, placed = place_state(
            trainable, frozen, optimizer, placed_on(mesh, params, places), mesh, config.dtype
        )
        state, place = checkpoints.restore(state)
        if place is not None:
            data.set_state(place)
        start = int(state.step)
        if start:
            _say(f"resuming {directory} at step {start} of {config.steps}")
        step = MeasuredStep(
            config, loss_fn, optimizer, placed, mesh, jax.tree.map(lambda x: x.sharding, state)
        )
        bar = tqdm(
            total=config.steps, initial=start, unit="step", desc=directory.name, smoothing=0.1,
            disable=jax.process_index() > 0,
        )  # fmt: skip
        ahead = closing(read_ahead(data, config.steps - start, mesh))
        with (
            Preemption() as preemption,
            MetricsLog(directory, config, start) as log,
            bar,
            ahead as ready,
        ):
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
                    bar.set_postfix(
                        {k: f"{v:.3f}" for k, v in values.items() if k in ("loss", "accuracy")}
                    )
                if saves or told or evaluates:
                    with step.pause(done):
                        if evaluate and evaluates and (last or not told):
                            log.write(done, evaluate(merge(on_host(state.params), frozen)))
                        if saves or told:
                            for lease in leases:
                                lease.check()
                            checkpoints.save(done, state, place, wait=last or told)
                bar.update()
                if told and not last:
                    _say(f"{directory}: told to end; step {done} of {config.steps} is saved")
                    raise Preempted(preemption.number)
    return merge(on_host(state.params), frozen)


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr)
