"""Run the training loop; a stopped run goes on to the same parameters, on any mesh.

A checkpoint holds the state after a step, so the next run reads the batch of the next step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.cluster import sole_on_first
from jaxspec.training.config import TrainConfig
from jaxspec.training.loop.batches import Batches, check_rows, read_ahead
from jaxspec.training.loop.measured import MeasuredStep
from jaxspec.training.loop.metrics import MetricsLog
from jaxspec.training.loop.preemption import Preempted, Preemption
from jaxspec.training.loop.signatures import claim, run_signature
from jaxspec.training.loop.step import (
    ShardingOf,
    TrainState,
    check_patterns,
    merge,
    on_host,
    partition,
    set_up,
)
from jaxspec.training.losses import Loss
from jaxspec.typing import Params

Evaluate = Callable[[Params], Mapping[str, float]]
"""Parameters on the host -> metrics. Every process calls it with the same parameters."""


def fit(
    config: TrainConfig,
    params: Params,
    loss: Loss,
    batches: Batches,
    directory: Path,
    *,
    sharding_of: ShardingOf | None = None,
    evaluate: Evaluate | None = None,
    inputs: Mapping[str, Any] | None = None,
    apart: Sequence[str] = (),
) -> Params:
    """Train from `params`, or from the newest checkpoint, and return the parameters on the host.

    Args:
      params: Arrays of numpy or JAX. Frozen ones are returned unchanged.
      loss: Traced; `mean_of_rows` makes one of a function.
      batches: Function of the step that makes this process's rows; `own_rows` makes one of a
        function that makes whole batches.
      directory: Folder that receives `metrics.jsonl`, `train_config.json` and checkpoints.
      sharding_of: Returns the shardings of the parameters on a mesh; None replicates them.
      evaluate: Function whose metrics are logged every `config.evaluate_every` steps and last.
      inputs: Data, models and loss, as JSON, which decide the result with the configuration. A run
        goes on only with the inputs that it began with.
      apart: First names of the paths of parameters whose gradients are clipped apart.

    Raises:
      InputError: mesh, patterns or directory do not fit, or the directory holds another run.
      Preempted: SIGTERM, Ctrl-C or SIGHUP came, and everything is saved.
      Diverged: the loss or a parameter is not finite. The newest checkpoint is from before.
    """
    mesh = config.make_mesh()
    if config.mesh.data is None and mesh.size < (count := jax.device_count()):
        _say(
            f"{directory}: {mesh.size} of {count} devices train, because copies must divide both "
            f"the devices and the {config.batch // config.accumulate} samples at a time; for more, "
            "change mesh.data or the batch"
        )
    check_patterns(config, params)
    saved = config.checkpoints.rstrip("/")
    locks = [directory / "train.lock", *([f"{saved}.lock"] if saved else [])]
    run = run_signature(config, dict(inputs or {}))

    def result(state: TrainState) -> Params:
        return merge(on_host(state.result), partition(params, config.frozen)[1])

    with ExitStack() as stack:
        # Set up: no other run here; the newest state; batches from its step on.
        stack.enter_context(sole_on_first(*locks))
        checkpoints = stack.enter_context(
            Checkpoints(saved or directory / "checkpoints", config.keep, run)
        )
        claim(directory, config, run, checkpoints.newest())
        state, frozen, compiled = set_up(config, params, loss, mesh, sharding_of, apart)
        state = checkpoints.restore(state)
        start = int(state.step)
        if start:
            _say(f"resuming {directory} at step {start} of {config.steps}")
        step = MeasuredStep(config, compiled, frozen, mesh)
        preemption = stack.enter_context(Preemption())
        log = stack.enter_context(MetricsLog(directory, config, start))
        steps, quiet = config.steps, jax.process_index() > 0
        bar = tqdm(None, directory.name, steps, initial=start, unit="step", disable=quiet)
        stack.enter_context(bar)
        ready = stack.enter_context(closing(read_ahead(batches, range(start, steps), mesh)))
        profiled = config.profiled[max(start + 1 - config.profiled.start, 0) :]
        tracing = stack.enter_context(ExitStack())

        def log_evaluation(done: int, state: TrainState) -> bool:
            """Log the metrics of `evaluate` if they are due; return whether they were."""
            if evaluate is None or not _due(config.evaluate_every, done, done == steps):
                return False
            with step.pause(done, "evaluate"):
                log.write(done, evaluate(result(state)))
            return True

        def leave(done: int) -> Preempted:
            bar.close()  # which ends its line
            _say(f"{directory}: ended by a signal; step {done} of {steps} is saved")
            return Preempted(preemption.number)

        missed = start > 0 and not log.evaluated  # a signal ended the run before the evaluation
        if missed and log_evaluation(start, state) and preemption.reached():
            raise leave(start)
        for done in range(start + 1, steps + 1):
            if done == profiled.start and profiled:
                tracing.enter_context(jax.profiler.trace(str(directory / "profile")))
            since = time.perf_counter()
            batch = next(ready)
            check_rows(batch, config.batch)
            state = step(state, batch, waited=time.perf_counter() - since)
            if done == profiled.stop - 1:
                jax.block_until_ready(state)
                tracing.close()
            last, stops = done == steps, preemption.reached()
            if _due(config.log_every, done, last):
                values = step.read(done)
                log.write(done, values)
                bar.set_postfix(
                    {k: f"{values[k]:.3f}" for k in ("loss", "accuracy") if k in values}
                )
            if last or not stops:
                log_evaluation(done, state)
            stops = stops or preemption.reached()  # a signal in an evaluation
            if stops or _due(config.save_every, done, last):
                with step.pause(done, "save"):
                    step.check(done, state)
                    checkpoints.save(done, state, wait=last or stops)
            bar.update()
            if stops or (last and preemption.reached()):  # a signal in the last save
                raise leave(done)
    return result(state)


def _due(every: int, step: int, last: bool) -> bool:
    """Return whether something is done after this step; `every` 0 is never."""
    return every > 0 and (last or step % every == 0)


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr)
