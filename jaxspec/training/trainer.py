"""The training loop: prefetched batches, progress, metrics, checkpoints, exact resume.

A batch is a pure function of its step, so a run killed at any moment and started again continues with the
same data and ends with the same parameters.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxspec.checkpoints.orbax import Checkpoints
from jaxspec.training.step import LossFn, init_state, make_optimizer, make_step, merge, partition
from jaxspec.typing import Params

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class TrainConfig:
    """Hyperparameters of one stage."""

    steps: int
    """Optimiser steps."""
    batch: int
    """Samples a step."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW."""
    warmup: int = 100
    """Steps of linear warm-up; cosine decay to a tenth follows."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest global gradient norm."""
    frozen: tuple[str, ...] = ()
    """Regexes of parameter paths that do not train."""
    seed: int = 0
    """Of the initial parameters and of the data."""
    save_every: int = 200
    log_every: int = 20


def fit(
    config: TrainConfig,
    params: Params,
    loss_fn: LossFn,
    batch_fn: Callable[[int], Batch],
    directory: Path,
) -> Params:
    """Trains from `params`, or from the newest checkpoint in `directory`, and returns the trained parameters.

    Args:
      loss_fn: (params, batch) -> (loss, metrics), traced.
      batch_fn: step -> numpy batch; pure.
      directory: receives `metrics.jsonl`, `train_config.json` and Orbax checkpoints.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "train_config.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    trainable, held = partition(params, config.frozen)
    optimizer = make_optimizer(config.learning_rate, config.steps, config.warmup, config.weight_decay, config.clip)
    step_fn = make_step(loss_fn, optimizer)
    with Checkpoints(directory / "checkpoints") as checkpoints:
        state = checkpoints.restore(jax.jit(init_state, static_argnums=1)(trainable, optimizer))
        start = int(state.step)
        if start:
            print(f"resuming {directory} at step {start} of {config.steps}")
        bar = tqdm(total=config.steps, initial=start, unit="step", desc=directory.name, smoothing=0.1)
        since, clock = start, time.perf_counter()
        with (directory / "metrics.jsonl").open("a") as log:
            for step, batch in _prefetch(batch_fn, start, config.steps):
                state, metrics = step_fn(state, held, batch)
                done = step + 1
                if done % config.log_every == 0 or done == config.steps:
                    values = {k: float(v) for k, v in metrics.items()}
                    now = time.perf_counter()
                    rate = (done - since) / (now - clock)
                    since, clock = done, now
                    values |= {"step": done, "samples_per_second": rate * config.batch}
                    log.write(json.dumps(values) + "\n")
                    log.flush()
                    bar.set_postfix({k: f"{v:.3f}" for k, v in values.items() if k in ("loss", "accuracy")})
                if done % config.save_every == 0 or done == config.steps:
                    checkpoints.save(done, state)
                bar.update()
        bar.close()
    return merge(state.params, held)


def _prefetch(batch_fn: Callable[[int], Batch], start: int, stop: int, depth: int = 4) -> Iterator[tuple[int, Any]]:
    """Batches of the steps [start, stop), made in a thread `depth` steps ahead."""
    with ThreadPoolExecutor(1) as pool:
        ahead: deque[Any] = deque()
        for step in range(start, stop):
            while len(ahead) < depth and step + len(ahead) < stop:
                ahead.append(pool.submit(batch_fn, step + len(ahead)))
            yield step, ahead.popleft().result()
